"""A stage reads finished artifacts and writes one folder, named after everything it depends on."""

import hashlib
import json
import logging
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from drafters.base import DrafterConfig
from pipeline.digests import model_identity
from pipeline.files import out_of_space, sweep
from pipeline.manifest import MANIFEST, check_files, finish, read_manifest
from pipeline.models import Source
from pipeline.runtime import Runtime, hardware

if TYPE_CHECKING:
    from rich.console import RenderableType

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Need:
    """An upstream stage, and the config groups to swap when looking for its artifact."""

    stage: str
    groups: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Workspace:
    """Everything one run of a stage may touch."""

    groups: Mapping[str, Any]  # the groups it reads, typed
    inputs: Mapping[str, Path]  # finished artifacts, by the names used in needs()
    out: Path  # write here; a name that ends in .partial is never taken for finished
    seed: int
    runtime: Runtime

    def manifest(self, name: str) -> dict[str, Any]:
        """The manifest of an input."""
        return read_manifest(self.inputs[name])


@dataclass(frozen=True, kw_only=True)
class Stage(ABC):
    """Settings of one pipeline step; subclass it in the module named after the step."""

    reads: ClassVar[tuple[str, ...]] = ()  # config groups that change the output
    format_version: ClassVar[int] = 1  # raise it when the artifact's layout or meaning changes
    times: ClassVar[bool] = False  # measures seconds: its artifact belongs to one machine
    summary: ClassVar[str] = ""  # one line for the menu
    resumes: ClassVar[bool] = False  # run() goes on from what is in `out`; else `out` is emptied
    repeats: ClassVar[bool] = False  # what it shows is the point: it runs whenever it is asked for
    whole: ClassVar[bool] = False  # asking for it is asking for all that it needs, force included

    def needs(self, groups: Mapping[str, Any]) -> dict[str, Need]:
        """Name each input and the stage that makes it."""
        return {}

    def for_groups(self, groups: Mapping[str, Any]) -> "Stage":
        """These settings as one of the groups that it reads changes them."""
        return self

    def resolved(self, runtime: Runtime) -> "Stage":
        """These settings with what "auto" stands for on this machine: the identity names that."""
        return self

    @abstractmethod
    def run(self, workspace: Workspace) -> dict[str, Any]:
        """Write artifacts under `workspace.out`; return metrics (plain numbers, short text)."""

    def shown(self, out: Path) -> "RenderableType | None":
        """What a person who asked for this stage reads once its artifact is there."""
        return None


@dataclass(frozen=True)
class Artifact:
    """Where a stage's output is or will be, and the identity that names it."""

    stage: str
    identity: dict[str, Any]
    folder: Path

    @property
    def signature(self) -> str:
        return self.folder.name

    @property
    def finished(self) -> bool:
        """Present means finished; another identity under the same name is never reused."""
        if not (self.folder / MANIFEST).exists():
            return False
        if read_manifest(self.folder)["identity"] != self.identity:
            raise ValueError(
                f"{self.folder} was built from another identity; delete the folder and run "
                f"stage={self.stage} again"
            )
        return True


@dataclass(frozen=True)
class Plan:
    """What one call of Pipeline.run may build, and what it has seen to already."""

    build: bool  # what is missing upstream
    force: bool  # everything, though it is there
    settled: set[Path] = field(default_factory=set)


@dataclass(frozen=True)
class Pipeline:
    """All stages of one composed config; running one finds or builds what it needs."""

    stages: Mapping[str, Stage]
    groups: Mapping[str, Any]
    root: Path
    seed: int
    runtime: Runtime
    build_missing: bool = False
    force: bool = False
    on_start: Callable[[Artifact], None] = lambda artifact: None
    on_finish: Callable[[Artifact], None] = lambda artifact: None
    _resolved: dict[Any, Any] = field(default_factory=dict)

    def run(self, name: str) -> Path:
        """The finished artifact of the stage, built now if it is not there yet.

        Raises ValueError where something upstream is missing and may not be built, or is damaged.
        """
        whole = self.stages[name].whole
        plan = Plan(build=self.build_missing or whole, force=self.force and whole)
        return self._run(name, self.groups, plan, asked_for=True)

    def locate(self, name: str, groups: Mapping[str, Any] | None = None) -> Artifact:
        """Where the artifact of a stage is or will be; builds nothing."""
        groups = self.groups if groups is None else groups
        stage = self.stages[name].for_groups(groups).resolved(self.runtime)
        inputs = {
            key: f"{need.stage}/{self.locate(need.stage, {**groups, **need.groups}).signature}"
            for key, need in stage.needs(groups).items()
        }
        identity: dict[str, Any] = {
            "stage": name,
            "format_version": stage.format_version,
            "settings": describe(stage),
            "groups": {name: describe(group) for name, group in self._read(stage, groups).items()},
            "inputs": inputs,
            "seed": self.seed,
        }
        if stage.times:
            identity["hardware"] = {**hardware(), **self.runtime.timing_identity()}
        identity = json.loads(json.dumps(identity, sort_keys=True))  # as it will be read back
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        return Artifact(name, identity, self.root / name / digest)

    def _read(self, stage: Stage, groups: Mapping[str, Any]) -> dict[str, Any]:
        """The groups that a stage reads, with what "auto" stands for on this machine.

        Found when the first stage asks, not before: it may have to fetch the model.
        """
        read = {name: groups[name] for name in stage.reads}
        for name, group in read.items():
            if hasattr(group, "resolved"):
                if group not in self._resolved:
                    self._resolved[group] = group.resolved(self.runtime)
                read[name] = self._resolved[group]
        return read

    def _run(self, name: str, groups: Mapping[str, Any], plan: Plan, *, asked_for: bool) -> Path:
        artifact = self.locate(name, groups)
        if artifact.folder in plan.settled:
            return artifact.folder
        again = plan.force or (asked_for and (self.force or self.stages[name].repeats))
        if not again and artifact.finished:
            return self._reuse(artifact, plan)
        if not (asked_for or plan.build):
            raise ValueError(
                f"stage={name} has not finished for these settings (looked for {artifact.folder}); "
                f"run stage={name} first, or add build_missing=true"
            )
        inputs = {
            key: self._run(need.stage, {**groups, **need.groups}, plan, asked_for=False)
            for key, need in self.stages[name].needs(groups).items()
        }
        with self.runtime.lock(artifact.folder.with_suffix(".lock")):
            if not again and artifact.finished:  # another process built it while this one waited
                return self._reuse(artifact, plan)
            self._build(artifact, groups, inputs, again)
        plan.settled.add(artifact.folder)
        return artifact.folder

    def _reuse(self, artifact: Artifact, plan: Plan) -> Path:
        check_files(artifact.folder)
        log.info("stage=%s is there already: %s", artifact.stage, artifact.folder)
        plan.settled.add(artifact.folder)
        return artifact.folder

    def _build(
        self, artifact: Artifact, groups: Mapping[str, Any], inputs: Mapping[str, Path], again: bool
    ) -> None:
        out = artifact.folder
        stage = self.stages[artifact.stage].for_groups(groups).resolved(self.runtime)
        with suppress(FileNotFoundError):
            (out / MANIFEST).unlink()
        if again or not stage.resumes:
            shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True, exist_ok=True)
        self.on_start(artifact)
        started = time.time()
        read = self._read(stage, groups)
        try:
            metrics = stage.run(Workspace(read, inputs, out, self.seed, self.runtime))
            finish(out, artifact.identity, metrics, started)
        except BaseException as error:
            sweep(out)  # nothing half-written stays
            if not stage.resumes or not any(out.iterdir()):
                shutil.rmtree(out, ignore_errors=True)
            if full := out_of_space(error):  # libraries do not all say where
                raise OSError(full, os.strerror(full), str(out)) from error
            raise
        self.on_finish(artifact)


def describe(config: Any) -> Any:
    """A config as plain values: its own identity() where it names content, else its fields."""
    if isinstance(config, Mapping):
        return {name: describe(child) for name, child in config.items()}
    if isinstance(config, list | tuple):
        return [describe(child) for child in config]
    if hasattr(config, "identity"):
        return config.identity()
    if is_dataclass(config) and not isinstance(config, type):
        names = [field.name for field in fields(config)]
        children = {name: describe(getattr(config, name)) for name in names}
        if isinstance(config, DrafterConfig) and isinstance(children.get("source"), str):
            children["source"] = _model(children["source"])
        return {"kind": f"{type(config).__module__}.{type(config).__qualname__}", **children}
    return config


def _model(name_or_path: str) -> dict[str, str | None]:
    """What a drafter's own model is, wherever its files are."""
    source = Source(name_or_path=name_or_path, revision=None, wheel=None, wheel_sha256=None)
    return model_identity(source.resolve())

"""Toy stages: one that counts slowly and resumes, one that adds, one that fails, one that shows."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pipeline.runtime import Runtime
from pipeline.stage import Artifact, Need, Pipeline, Stage, Workspace

RUNTIME = Runtime(device="cpu", threads=1, clock="system")


@dataclass(frozen=True, kw_only=True)
class Group:
    name: str


@dataclass(frozen=True, kw_only=True)
class Count(Stage):
    """Writes one file a step; a resumed run goes on after the last of them."""

    reads: ClassVar[tuple[str, ...]] = ("data",)
    resumes: ClassVar[bool] = True
    num_steps: int
    step_seconds: float

    def run(self, workspace: Workspace) -> dict[str, Any]:
        resumed_at = len(list(workspace.out.glob("step-*")))
        for step in range(resumed_at, self.num_steps):
            time.sleep(self.step_seconds)
            partial = workspace.out / f"{step}.partial"
            partial.write_text(str(step))
            partial.replace(workspace.out / f"step-{step}")
        with (workspace.out.parent / "runs.log").open("a") as log:
            log.write(f"{os.getpid()} {resumed_at}\n")
        return {"resumed_at": resumed_at}


@dataclass(frozen=True, kw_only=True)
class Add(Stage):
    times: ClassVar[bool] = True

    def needs(self, groups: Mapping[str, Any]) -> dict[str, Need]:
        other = {"data": Group(name="other")}
        return {"counted": Need("count"), "other": Need("count", other)}

    def run(self, workspace: Workspace) -> dict[str, Any]:
        assert not any(workspace.out.iterdir()), "it does not resume: nothing is there"
        steps = [len(list(folder.glob("step-*"))) for folder in workspace.inputs.values()]
        (workspace.out / "sum").write_text(str(sum(steps)))
        return {"sum": sum(steps)}


@dataclass(frozen=True, kw_only=True)
class Fail(Stage):
    writes: bool

    def run(self, workspace: Workspace) -> dict[str, Any]:
        if self.writes:
            (workspace.out / "half").write_text("half")
        raise ValueError("the toy has failed; give it writes=false")


@dataclass(frozen=True, kw_only=True)
class FailResuming(Fail):
    resumes: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Show(Stage):
    repeats: ClassVar[bool] = True
    whole: ClassVar[bool] = True

    def needs(self, groups: Mapping[str, Any]) -> dict[str, Need]:
        return {"sum": Need("add"), "counted": Need("count")}

    def run(self, workspace: Workspace) -> dict[str, Any]:
        return {}


def make(root: Path, steps: int = 3, step_seconds: float = 0.0, **options: Any) -> Pipeline:
    stages = {
        "count": Count(num_steps=steps, step_seconds=step_seconds),
        "add": Add(),
        "fail": Fail(writes=True),
        "fail_resuming": FailResuming(writes=True),
        "show": Show(),
    }
    options = {"seed": 0, "groups": {"data": Group(name="mine")}, **options}
    return Pipeline(stages=stages, root=root, runtime=RUNTIME, **options)


def record(seen: list[str]) -> dict[str, Any]:
    """Options that note which stages are built."""

    def note(artifact: Artifact) -> None:
        seen.append(artifact.stage)

    return {"on_start": note}


def count(root: str, steps: str, step_seconds: str) -> None:
    """What a process of its own runs."""
    make(Path(root), steps=int(steps), step_seconds=float(step_seconds)).run("count")

"""`python -m pipeline [KEY=VALUE ...]`: compose, check, run; without arguments, the menu."""

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from pipeline.compose import compose_config, read_arguments
from pipeline.config import ConfigError, Settings, typed, typed_pool, typed_settings
from pipeline.errors import exit_code, set_up_logging
from pipeline.manifest import read_manifest
from pipeline.menu import show_menu
from pipeline.progress import WIDE, duration
from pipeline.stage import Artifact, Pipeline, Stage
from pipeline.tracking import publish

log = logging.getLogger("pipeline")

GROUPS = ("data", "bench", "target", "encoder", "policy", "runtime", "tracking")
TRAINING = ("finetune", "distill", "member", "memorise")  # one entry at a time


class TypedStages(Mapping[str, Stage]):
    """Stages that are typed when they are first asked for, so that one run imports what it uses."""

    def __init__(self, node: DictConfig) -> None:
        self._node = node
        self._typed: dict[str, Stage] = {}

    def __getitem__(self, name: str) -> Stage:
        if name not in self._typed:
            if name not in self._node:
                raise KeyError(name)
            self._typed[name] = typed(self._node[name], f"stages.{name}")
        return self._typed[name]

    def __iter__(self) -> Iterator[str]:
        return map(str, self._node)

    def __len__(self) -> int:
        return len(self._node)


def main(arguments: Sequence[str]) -> int:
    """Do what is asked; the process's exit code."""
    debug = os.environ.get("HYDRA_FULL_ERROR") == "1" or "debug=true" in arguments
    set_up_logging(debug)
    try:
        run(arguments)
    except (Exception, KeyboardInterrupt) as error:
        known = exit_code(error)
        if debug or known is None:
            raise
        code, sentence = known
        sys.stderr.write(f"{sentence}\n")
        return code
    return 0


def run(arguments: Sequence[str]) -> None:
    """Compose the config and show the menu, print the config or run the stage."""
    action, overrides = read_arguments(arguments)
    config = compose_config(overrides)
    out = Console()
    if action == "config":
        out.print(OmegaConf.to_yaml(config), markup=False, highlight=False, soft_wrap=True, end="")
        return
    settings = typed_settings(config)
    pipeline = build_pipeline(config, settings, overrides)
    if action in ("menu", "help") or settings.stage is None:
        show_menu(pipeline, out)
        return
    pipeline.groups["tracking"].check_login()
    pipeline.runtime.apply()
    folder = pipeline.run(settings.stage)
    log.info("stage=%s: %s", settings.stage, folder)
    shown = pipeline.stages[settings.stage].shown(folder)
    if shown is not None:
        page = out if out.is_terminal else Console(width=WIDE)
        page.print(shown, highlight=False, soft_wrap=not out.is_terminal)


def build_pipeline(config: DictConfig, settings: Settings, overrides: Sequence[str]) -> Pipeline:
    """Every stage and group of a composed config; a stage that overrides name is typed at once."""
    groups: dict[str, Any] = {name: typed(config[name], name) for name in GROUPS}
    groups["pool"] = typed_pool(config.pool)
    stages = TypedStages(config.stages)
    for override in overrides:
        parts = override.lstrip("+~").partition("=")[0].split(".")
        if parts[0] == "stages" and len(parts) > 1:
            stages[parts[1]]
    if settings.stage in TRAINING:
        groups["entry"] = _entry(groups["pool"], settings.entry, settings.stage)
    elif settings.entry is not None:
        raise ConfigError(
            f"entry={settings.entry} goes with stage=finetune or stage=distill; leave it out here"
        )
    if settings.stage == "portfolio":
        groups["members"] = _members(groups["pool"])

    def finished(artifact: Artifact) -> None:
        seconds = read_manifest(artifact.folder)["seconds"]
        log.info("stage=%s is done in %s: %s", artifact.stage, duration(seconds), artifact.folder)
        if not stages[artifact.stage].repeats:
            publish(groups["tracking"], artifact, Path(settings.root))

    return Pipeline(
        stages=stages,
        groups=groups,
        root=Path(settings.root),
        seed=settings.seed,
        runtime=groups["runtime"],
        build_missing=settings.build_missing,
        force=settings.force,
        on_start=_say_start,
        on_finish=finished,
    )


def _entry(pool: Any, name: str | None, stage: str) -> Any:
    from pipeline.build import select_entry

    try:
        return select_entry(pool, name, stage)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _members(pool: Any) -> Any:
    from pipeline.build import portfolio_members

    members = portfolio_members(pool)
    if not members:
        raise ConfigError(
            "no entry of this pool has trained_by=portfolio; give one to at least two of them"
        )
    return members


def _say_start(artifact: Artifact) -> None:
    log.info("stage=%s begins: %s", artifact.stage, artifact.folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

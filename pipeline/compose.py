"""Compose conf/ with what was typed after `python -m pipeline`; a typo ends in one sentence."""

import difflib
import logging
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from pipeline.config import ConfigError, choose, suggestion

log = logging.getLogger(__name__)

EVERY_KEY = "python -m pipeline --cfg job prints every key"


def compose_config(arguments: Sequence[str]) -> DictConfig:
    """The composed tree, in which every key, group and stage that was typed exists."""
    groups = config_groups()
    overrides = [as_bench(parse(argument), groups) for argument in arguments]
    for override in overrides:
        check_group(override, groups)
    chosen = [o.input_line or "" for o in overrides if o.key_or_group in groups]
    base = _compose(chosen)
    keys = list(key_paths(base))
    for override in overrides:
        check_key(override, groups, keys)
    everything = [override.input_line or "" for override in overrides]
    config = base if everything == chosen else _compose(everything)
    if config.stage is not None and config.stage not in config.stages:
        choose("stage", config.stage, map(str, config.stages))
    return config


def config_groups() -> dict[str, list[str]]:
    """Folder of conf/ -> the files to choose from."""
    return {
        folder.name: sorted(
            file.name.removesuffix(".yaml")
            for file in folder.iterdir()
            if file.name.endswith(".yaml")
        )
        for folder in resources.files("conf").iterdir()
        if folder.is_dir() and not folder.name.startswith("_")
    }


def parse(argument: str) -> Override:
    """One override; what cannot be read raises ConfigError."""
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ConfigError(
            f"{argument} cannot be read as KEY=VALUE ({reason}); put quotes around a value with "
            "special characters, as in 'key=\"a, b\"'"
        ) from error
    if override.is_sweep_override():
        raise ConfigError(f"{argument} names several values; run the command once for each of them")
    return override


def as_bench(override: Override, groups: dict[str, list[str]]) -> Override:
    """data=<bench> read as bench=<bench>: it is measured on, and the training data stay."""
    name = override.value()
    known = {*groups["bench"]} - {*groups["data"], "none", "files"}
    if override.key_or_group != "data" or not isinstance(name, str) or name not in known:
        return override
    log.info(
        "data=%s is a benchmark, so bench=%s is what is meant: nothing trains on it", name, name
    )
    return parse(f"bench={name}")


def check_group(override: Override, groups: dict[str, list[str]]) -> None:
    """Raise ConfigError where a group's file does not exist."""
    name, value = override.key_or_group, override.value()
    if name == "stages" and isinstance(value, str) and override.package is None:
        raise ConfigError(f"stages={value} is not a choice; did you mean stage={value}?")
    if name not in groups or override.is_delete():
        return
    if value is None or (isinstance(value, str | int | float) and str(value) not in groups[name]):
        choose(name, "null" if value is None else value, groups[name])


def check_key(override: Override, groups: dict[str, list[str]], keys: Sequence[str]) -> None:
    """Raise ConfigError where a key is not in the tree (added and deleted ones: Hydra's affair)."""
    key = override.key_or_group
    added = override.is_add() and key.split(".")[0] in keys  # typed() looks at what is added
    if key in groups or key in keys or added or override.is_delete():
        return
    line = (override.input_line or key).lstrip("+")
    same_end = [known for known in keys if known.split(".")[-1] == key.split(".")[-1]]
    near = difflib.get_close_matches(key, [*keys, *groups], n=1, cutoff=0.6) or same_end[:1]
    meant = f"did you mean {near[0]}={line.partition('=')[2]}? " if near else ""
    raise ConfigError(f"{line} sets a key that does not exist; {meant}{EVERY_KEY}")


def key_paths(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a tree, mappings included."""
    for name in map(str, node):
        path = f"{prefix}{name}"
        yield path
        child: Any = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none():
            yield from key_paths(child, f"{path}.")


def _compose(overrides: list[str]) -> DictConfig:
    try:
        with initialize_config_module("conf", version_base="1.3"):
            return compose("config", overrides)
    except (HydraException, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"{' '.join(overrides)} cannot be composed ({reason}); {EVERY_KEY}"
        ) from error


def read_arguments(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """What is asked for ("menu", "help", "config" or "run") and the overrides that go with it."""
    action, overrides = "run", []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument in ("-h", "--help"):
            action = "help"
        elif argument in ("-c", "--cfg") and rest[:1] == ["job"]:
            rest.pop(0)
            action = "config"
        elif argument == "--cfg=job":
            action = "config"
        elif argument.startswith("-") and not argument.startswith("~"):
            raise ConfigError(
                f"{argument} is not an option; {suggestion(argument, ['--help', '--cfg job'])}"
            )
        elif argument.startswith("="):
            raise ConfigError(f"{argument} has no key; write KEY=VALUE, as in stage=prepare")
        elif "=" not in argument and not argument.startswith("~"):
            stages = config_groups()["stages"]
            near = (difflib.get_close_matches(argument, stages, n=1) or ["prepare"])[0]
            raise ConfigError(f"{argument} has no value; write KEY=VALUE, as in stage={near}")
        else:
            overrides.append(argument)
    return (action if arguments else "menu"), overrides

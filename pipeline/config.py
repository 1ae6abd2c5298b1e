"""Turn a composed Hydra tree into frozen, type-checked dataclasses; `DictConfig` stops here."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException, ValidationError

from drafters.base import DrafterConfig

EXAMPLES = {  # a word of OmegaConf's message -> what is wanted, and one
    "Dict": ("a mapping", "{NAME:VALUE}"),
    "Integer": ("an integer", "8"),
    "Float": ("a number", "0.5"),
    "bool": ("true or false", "true"),
    "list": ("a list", "[a,b]"),
    "List": ("a list", "[a,b]"),
}
TRAINERS = ("finetune", "distill", "portfolio", "memorise")  # what makes drafters
SCALARS = (int, float, str, bool)


class ConfigError(ValueError):
    """What a person typed cannot be used: one sentence with the value and the next step."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The keys that stand alone: what to run, and where."""

    stage: str | None
    entry: str | None
    build_missing: bool
    force: bool
    root: str
    seed: int
    debug: bool

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ConfigError(
                f"seed={self.seed} must lie between 0 and 2^63 - 1; for example seed=0"
            )


@dataclass(frozen=True, kw_only=True)
class PoolEntry:
    """One member of the pool: a drafter and how it comes to be."""

    drafter: DrafterConfig
    trained_by: str | None  # None (needs no training), or one of TRAINERS
    domains: list[str]  # whose answers train it; empty: all
    init_from: str | None  # another entry to start from; None: as its drafter's config says
    overrides: dict[str, Any] = field(default_factory=dict)  # of its training stage's settings

    @property
    def stage(self) -> str | None:
        """The stage whose artifact is this drafter alone."""
        return "member" if self.trained_by == "portfolio" else self.trained_by


@dataclass(frozen=True, kw_only=True)
class Pool:
    """The drafters that a policy chooses between, by name."""

    entries: dict[str, PoolEntry]


def typed(node: DictConfig, where: str) -> Any:
    """Build the dataclass that `node._target_` names, rejecting unknown keys and wrong types.

    `where` is the key path that messages name. A value with its own `_target_` is built likewise.
    """
    if not isinstance(node, DictConfig) or "_target_" not in node:
        raise ConfigError(f"{where} names no class; choose a file of conf/{where.split('.')[0]}")
    cls = get_class(str(node._target_))
    return _build(cls, node, where)


def typed_settings(config: DictConfig) -> Settings:
    """The keys of a composed config that stand alone."""
    names = [field.name for field in fields(Settings)]
    return _build(Settings, OmegaConf.create({name: config[name] for name in names}), "")


def typed_pool(node: DictConfig) -> Pool:
    """The pool: entries whose drafters are themselves typed groups."""
    node = node.copy()
    OmegaConf.resolve(node)  # an entry may be given another's drafter as ${...}
    entries = {
        str(name): _build(PoolEntry, entry, f"pool.entries.{name}")
        for name, entry in node["entries"].items()
        if entry is not None
    }
    if not entries:
        raise ConfigError("the pool is empty; add an entry, or choose another with pool=quick")
    for name, entry in entries.items():
        where = f"pool.entries.{name}"
        if entry.trained_by not in (None, *TRAINERS):
            choose(f"{where}.trained_by", entry.trained_by, [*TRAINERS, "null"])
        for key, other in [
            ("init_from", entry.init_from),
            *(("drafter", p) for p in entry.drafter.part_names),
        ]:
            if other is not None and other not in entries:
                choose(f"{where}.{key}", other, [known for known in entries if known != name])
    return Pool(entries=entries)


def changed(config: Any, changes: Mapping[str, Any], where: str) -> Any:
    """The same settings but for these, which are checked as if YAML had said them under `where`."""
    values = {one.name: getattr(config, one.name) for one in fields(config)}
    node = OmegaConf.merge(OmegaConf.create(values), OmegaConf.create(dict(changes)))
    assert isinstance(node, DictConfig)
    return _build(type(config), node, where)


def choose(key: str, value: object, choices: Iterable[str]) -> None:
    """Raise the sentence that `key` cannot be `value`, with what it could be."""
    known = list(choices)
    raise ConfigError(f"{key}={value} is not known; {suggestion(str(value), known, f'{key}=')}")


def suggestion(value: str, choices: Iterable[str], prefix: str = "") -> str:
    """As in "did you mean seed=1? (one of: ...)"."""
    known = sorted(choices)
    close = difflib.get_close_matches(value, known, n=1, cutoff=0.5)
    listed = f"one of: {', '.join(known[:20])}{', ...' if len(known) > 20 else ''}"
    return f"did you mean {prefix}{close[0]}? ({listed})" if close else f"use {listed}"


def _build(cls: type, node: DictConfig, where: str) -> Any:
    """An instance of `cls` from a node that lists its fields."""
    hints = get_type_hints(cls)
    values: dict[str, Any] = {str(key): node._get_node(key) for key in node if key != "_target_"}
    _check_names(cls, values, where)
    nested = {
        name: typed(child, f"{where}.{name}".lstrip("."))
        for name, child in values.items()
        if isinstance(child, DictConfig) and not child._is_none() and "_target_" in child
    }
    flat = {name: hints[name] for name in values if name not in nested}
    return cls(**_checked(flat, node, where), **nested)


def _check_names(cls: type, values: Mapping[str, Any], where: str) -> None:
    known = {one.name: one for one in fields(cls)}
    for name in values:
        if name not in known:
            raise ConfigError(
                f"{_join(where, name)} is not a key of {where}; {suggestion(name, known)}"
            )
    for name, one in known.items():
        if name not in values and one.default is MISSING and one.default_factory is MISSING:
            raise ConfigError(f"{_join(where, name)} is missing; give {_join(where, name)}=VALUE")


def _checked(hints: Mapping[str, Any], node: DictConfig, where: str) -> dict[str, Any]:
    """The values of a node, of exactly these types."""
    checked: dict[str, Any] = {}
    for name, hint in hints.items():
        key = _join(where, name)
        one = make_dataclass(
            "One", [("value", hint)]
        )  # one field at a time, so that errors name it
        try:
            value = OmegaConf.to_container(node, resolve=True, throw_on_missing=False)[name]  # type: ignore[index, call-overload]
            if value == "???":
                raise ConfigError(f"{key} has no value yet; add {key}=VALUE")
            _check_elements(key, value, hint)
            merged = OmegaConf.merge(OmegaConf.structured(one), {"value": value})
            checked[name] = OmegaConf.to_object(merged).value  # type: ignore[union-attr]
        except ValidationError as error:
            raise ConfigError(_wrong_type(key, value, error)) from error
        except MissingMandatoryValue as error:
            raise ConfigError(
                f"{error.full_key} has no value yet; add {error.full_key}=VALUE"
            ) from error
        except OmegaConfBaseException as error:
            raise ConfigError(
                f"{key} cannot be read ({_first_line(error)}); check its value"
            ) from error
    return checked


def _check_elements(key: str, value: Any, hint: Any) -> None:
    """Refuse containers inside a container of plain values, which OmegaConf lets through."""
    if get_origin(hint) not in (dict, list) or not isinstance(value, dict | list):
        return
    elements = list(value.values()) if isinstance(value, dict) else value
    if get_args(hint)[-1] in SCALARS:
        for element in elements:
            if isinstance(element, dict | list):
                raise ConfigError(f"{key} holds {element} where one plain value belongs; give one")


def _wrong_type(key: str, value: Any, error: OmegaConfBaseException) -> str:
    """One sentence for OmegaConf's several lines."""
    inner = str(error.full_key or "").removeprefix("value").lstrip(".")
    if isinstance(value, dict) and inner in value:
        key, value = f"{key}.{inner}", value[inner]
    text = _first_line(error)
    if value is None:
        return f"{key}=null is not allowed; give a value, as in {key}=VALUE"
    for name, (kind, example) in EXAMPLES.items():
        if name in text:
            return f"{key}={value} is not {kind}; give one, as in {key}={example}"
    return f"{key}={value} has the wrong type ({text}); look at its usual value with --cfg job"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name

"""Turn a composed Hydra tree into frozen, type-checked dataclasses; `DictConfig` stops here."""

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_type_hints

from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from drafters.base import DrafterConfig


@dataclass(frozen=True, kw_only=True)
class PoolEntry:
    """One member of the pool: a drafter and how it comes to be."""

    drafter: DrafterConfig
    trained_by: str | None  # None (needs no training), "finetune" or "distill"
    domains: list[str]  # whose answers train it; empty: all
    init_from: str | None  # another entry to start from; None: as the drafter's config initialises it


@dataclass(frozen=True, kw_only=True)
class Pool:
    """The drafters that a policy chooses between, by name."""

    entries: dict[str, PoolEntry]


def typed(node: DictConfig, where: str) -> Any:
    """Build the dataclass that `node._target_` names, rejecting unknown keys and wrong types.

    `where` is the key path that error messages name.
    """
    values: dict[str, Any] = OmegaConf.to_container(node, resolve=True)  # type: ignore[assignment]
    cls = get_class(values.pop("_target_"))
    nested = {name for name, hint in get_type_hints(cls).items() if is_dataclass(hint)}
    children = {name: typed(node[name], f"{where}.{name}") for name in nested if name in values}
    flat = {name: value for name, value in values.items() if name not in children}
    schema = OmegaConf.structured(cls) if not nested else OmegaConf.create({})
    if nested:
        return cls(**flat, **children)
    OmegaConf.set_readonly(schema, False)  # OmegaConf locks frozen dataclasses
    for field_name in fields(cls):
        if field_name.name not in flat:
            raise ValueError(f"{where}.{field_name.name} is missing")
    return OmegaConf.to_object(OmegaConf.merge({where: schema}, {where: flat})[where])


def typed_pool(node: DictConfig) -> Pool:
    """The pool: entries whose drafters are themselves typed groups."""
    entries: dict[str, PoolEntry] = {}
    for name, entry in node.entries.items():
        rest = {key: value for key, value in entry.items() if key != "drafter"}
        known = {"trained_by", "domains", "init_from"}
        if set(rest) != known:
            raise ValueError(f"pool.entries.{name} needs exactly the keys drafter, {', '.join(sorted(known))}")
        drafter = typed(entry.drafter, f"pool.entries.{name}.drafter")
        domains = list(rest["domains"])
        entries[str(name)] = PoolEntry(
            drafter=drafter, trained_by=rest["trained_by"], domains=domains, init_from=rest["init_from"]
        )
    return Pool(entries=entries)

"""Targets and drafters for the stages that use them, and the artifacts they come from."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from decode.targets.backends import make_target
from decode.targets.choices import AUTO, fast_dtype
from decode.targets.loading import load_causal_lm, load_tokenizer
from decode.targets.moving import moved
from decode.targets.transformers import TransformersTarget
from decode.types import Drafter
from drafters.base import BuildContext, target_parts
from pipeline.config import TRAINERS, Pool, PoolEntry
from pipeline.models import TargetConfig
from pipeline.runtime import Runtime
from pipeline.stage import Need


@dataclass(frozen=True)
class NamedEntry:
    """A pool entry with its name: the group "entry", which says what a training stage trains."""

    name: str
    entry: PoolEntry
    parts: Mapping[str, PoolEntry] = field(default_factory=dict)  # what it is made of, all levels


def load_target(
    config: TargetConfig, runtime: Runtime, *, dtype: str | None = None, whole: bool = False
) -> TransformersTarget:
    """The target on the runtime's device, in the config's dtype unless another is named; "auto":
    the one that the device multiplies fastest.

    `whole`: through transformers, for work with its modules; a native target would hold its weights
    twice there.
    """
    if dtype is not None:
        named = fast_dtype(runtime.resolved_device()) if dtype == AUTO else dtype
        config = replace(config, dtype=named)
    config = replace(config, backend="transformers", exactness="law") if whole else config
    config = config.resolved(runtime)
    folder, remote = str(config.resolve()), config.trust_remote_code
    model = load_causal_lm(folder, getattr(torch, config.dtype), remote)
    return make_target(
        moved(model, runtime.resolved_device()),
        load_tokenizer(folder, remote),
        config.name_or_path,
        backend=config.backend,
        exactness=config.exactness,
        take=True,
    )


def select_entry(pool: Pool, name: str | None, stage: str) -> NamedEntry:
    """The entry that `stage` trains: the named one, or the only one there is."""
    trainable = [known for known, entry in pool.entries.items() if entry.stage == stage]
    key = "portfolio" if stage == "member" else stage
    choices = f"entries of this pool with trained_by={key}: {', '.join(trainable) or 'none'}"
    if name is None and len(trainable) == 1:
        name = trainable[0]
    if name is None:
        raise ValueError(
            f"stage={stage} trains one drafter at a time; add entry=<name> ({choices})"
        )
    if name not in trainable:
        raise ValueError(
            f"entry={name} is not trained by stage={stage}; choose another ({choices})"
        )
    return named_entry(pool, name)


def named_entry(pool: Pool, name: str) -> NamedEntry:
    """The entry with the parts that it is made of, so that its identity covers them."""
    parts = {part: pool.entries[part] for part in build_order(pool, [name]) if part != name}
    return NamedEntry(name, pool.entries[name], parts)


def parent_need(pool: Pool, entry: PoolEntry) -> dict[str, Need]:
    """What an entry's training starts from: the artifact of init_from as "parent", and those of its
    trained parts as drafter_needs names them.
    """
    parts = drafter_needs(pool, entry.drafter.part_names)
    if entry.init_from is None:
        return parts
    parent = pool.entries.get(entry.init_from)
    if parent is None or parent.trained_by is None:
        raise ValueError(
            f"init_from={entry.init_from} must name a trained entry of the pool "
            f"({', '.join(pool.entries)}); a model that needs no training is named in the entry's "
            "own drafter config"
        )
    return {"parent": trained_need(pool, entry.init_from), **parts}


def trained_need(pool: Pool, name: str) -> Need:
    """Where the trained drafter of an entry comes from."""
    entry = pool.entries[name]
    if entry.stage is None or entry.trained_by not in TRAINERS:
        raise ValueError(
            f"pool entry {name} has trained_by={entry.trained_by}; "
            f"choose null or one of {', '.join(TRAINERS)}"
        )
    return Need(entry.stage, {"entry": named_entry(pool, name)})


def portfolio_members(pool: Pool) -> dict[str, NamedEntry]:
    """The entries that share the prompts out among themselves."""
    return {
        name: named_entry(pool, name)
        for name, entry in pool.entries.items()
        if entry.trained_by == "portfolio"
    }


def drafter_needs(pool: Pool, names: Iterable[str] | None = None) -> dict[str, Need]:
    """One Need per trained entry among `names` (None: all) and the parts they are made of."""
    return {
        f"drafter:{name}": trained_need(pool, name)
        for name in build_order(pool, names)
        if pool.entries[name].trained_by is not None
    }


def build_drafters(
    pool: Pool,
    target: TransformersTarget,
    inputs: Mapping[str, Path],
    names: Iterable[str] | None = None,
) -> dict[str, Drafter]:
    """The named drafters (None: all), in the pool's order; parts are built before composites."""
    parts = target_parts(target)
    built: dict[str, Drafter] = {}
    for name in build_order(pool, names):
        entry = pool.entries[name]
        weights = None if entry.trained_by is None else inputs[f"drafter:{name}"]
        members = {part: built[part] for part in entry.drafter.part_names}
        built[name] = entry.drafter.build(BuildContext(parts, weights, members))
    wanted = set(pool.entries if names is None else names)
    return {name: built[name] for name in pool.entries if name in wanted}


def build_order(pool: Pool, names: Iterable[str] | None = None) -> list[str]:
    """The names and their parts, every part before what is made of it.

    Raises ValueError for a name that is not in the pool and for a drafter that is part of itself.
    """
    order: list[str] = []

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            raise ValueError(
                f"pool entry {name} is part of itself ({' -> '.join((*path, name))}); "
                "break the loop"
            )
        if name not in pool.entries:
            whose = f"part {name} of pool entry {path[-1]}" if path else f"drafter {name}"
            raise ValueError(
                f"{whose} is not in the pool; its entries are {', '.join(pool.entries)}"
            )
        if name not in order:
            for part in pool.entries[name].drafter.part_names:
                visit(part, (*path, name))
            order.append(name)

    for name in pool.entries if names is None else names:
        visit(name, ())
    return order

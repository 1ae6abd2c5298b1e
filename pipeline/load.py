"""An export folder, as a decoder: in a new process, on this machine or on another one."""

import importlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from decode import SpeculativeDecoder
from decode.clock import Clock, SystemClock
from decode.cost_measurement import quick_costs
from decode.costs import Costs, costs_key
from decode.targets.transformers import TransformersTarget
from decode.types import Drafter, Policy
from drafters.base import BuildContext, target_parts
from pipeline.exported import find_target, open_router, read_export

log = logging.getLogger(__name__)


def load_decoder(
    folder: str | Path,
    *,
    target: str | Path | None = None,  # the same model elsewhere; None: found by its name
    policy: Policy | str | None = None,  # None: the exported one
    device: str | None = None,  # None: a GPU where there is one
    dtype: torch.dtype | None = None,  # None: the exported one
    clock: Clock | None = None,
) -> SpeculativeDecoder:
    """The decoder that stage=export wrote: its target, drafters, router, policy and costs.

    Raises ValueError, in one sentence, where a file is missing or the target is another one.
    Costs that another machine measured are measured again, which takes a second or two.
    """
    folder, clock = Path(folder), clock or SystemClock()
    content = read_export(folder)
    found = find_target(content["target"], target)
    backend = TransformersTarget.from_pretrained(
        found,
        dtype=dtype or getattr(torch, content["target"]["dtype"]),
        device=device,
        trust_remote_code=content["target"]["trust_remote_code"],
    )
    drafters = load_drafters(folder, content["drafters"], backend)
    if policy is None:
        policy = load_policy(folder, content, backend, drafters, clock)
    router = open_router(folder, content, str(backend.device))
    return SpeculativeDecoder(backend, drafters, policy, router, clock=clock)


def load_drafters(
    folder: Path, described: Mapping[str, Any], target: TransformersTarget
) -> dict[str, Drafter]:
    """The export's drafters in its order; parts of a composite are built before it."""
    built: dict[str, Drafter] = {}

    def build(name: str) -> Drafter:
        if name not in built:
            entry = described[name]
            config = make(entry["kind"], entry["config"])
            weights = None if entry["folder"] is None else folder / entry["folder"]
            parts = {part: build(part) for part in config.part_names}
            built[name] = config.build(BuildContext(target_parts(target), weights, parts))
        return built[name]

    return {name: build(name) for name in described}


def load_policy(
    folder: Path,
    content: Mapping[str, Any],
    target: TransformersTarget,
    drafters: Mapping[str, Drafter],
    clock: Clock,
) -> Policy:
    """The export's policy, with costs that hold on this machine."""
    settings = dict(content["policy"])
    config = make(settings.pop("_target_"), settings)
    costs = Costs.from_json((folder / content["costs"]).read_text(encoding="utf-8"))
    if config.needs_costs and costs.key != costs_key(target):
        log.warning(
            "the costs in %s were measured on %s, not on %s; measuring them here",
            folder / content["costs"],
            costs.key,
            costs_key(target),
        )
        costs = quick_costs(target, drafters, clock)
    return config.build(costs, list(drafters), 0)


def make(dotted: str, settings: Mapping[str, Any]) -> Any:
    """An instance of a class of this project, named by its dotted path."""
    module, _, name = dotted.rpartition(".")
    if module.partition(".")[0] not in ("decode", "drafters"):
        raise ValueError(
            f"{dotted} is no drafter or policy of this project; run stage=export again"
        )
    return getattr(importlib.import_module(module), name)(**settings)

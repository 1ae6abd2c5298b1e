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
from decode.targets.backends import make_target
from decode.targets.choices import AUTO
from decode.targets.loading import load_causal_lm, load_tokenizer
from decode.targets.moving import moved
from decode.targets.transformers import TransformersTarget
from decode.types import Drafter, Policy
from drafters.base import BuildContext, target_parts
from pipeline.exported import UNCHOSEN, find_target, open_router, read_export

log = logging.getLogger(__name__)


def load_decoder(
    folder: str | Path,
    *,
    target: str | Path | None = None,  # the same model elsewhere; None: found by its name
    policy: Policy | str | None = None,  # None: the exported one
    device: str | None = None,  # None: a GPU where there is one
    dtype: torch.dtype | None = None,  # None: the exported one
    backend: str | None = None,  # auto, native or transformers; None: the exported one
    exactness: str | None = None,  # auto, bitwise or law; None: the exported one
    coupling: str = "rejection",  # gumbel: see SpeculativeDecoder
    clock: Clock | None = None,
) -> SpeculativeDecoder:
    """The decoder that stage=export wrote: its target, drafters, router, policy and costs.

    Raises ValueError, in one sentence, where a file is missing or the target is another one.
    Costs that another machine measured are measured again, which takes a second or two.
    """
    folder, clock = Path(folder), clock or SystemClock()
    content = read_export(folder)
    described = {**UNCHOSEN, **content["target"]}
    name, remote = str(find_target(described, target)), described["trust_remote_code"]
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    kind, promise = (backend, AUTO) if backend else exported_choice(described, device)
    model = load_causal_lm(name, dtype or getattr(torch, described["dtype"]), remote)
    opened = make_target(
        moved(model, device),
        load_tokenizer(name, remote),
        name,
        backend=kind,
        exactness=exactness or promise,
        take=True,
    )
    drafters = load_drafters(folder, content["drafters"], opened)
    if policy is None:
        policy = load_policy(folder, content, opened, drafters, clock)
    router = open_router(folder, content, opened.device)
    return SpeculativeDecoder(opened, drafters, policy, router, coupling=coupling, clock=clock)


def exported_choice(described: Mapping[str, Any], device: str) -> tuple[str, str]:
    """Backend and exactness as exported; "auto" for a native export of another kind of device."""
    made_on = described["device"]
    if described["backend"] == "native" and torch.device(device).type != made_on:
        log.info("the export decodes natively on %s; on %s: auto", made_on, device)
        return AUTO, AUTO
    return described["backend"], described["exactness"]


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

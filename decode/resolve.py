"""From names to parts: a target by its model, drafters by kind, a policy by its YAML."""

import importlib
import json
import logging
from collections.abc import Mapping
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from decode.clock import Clock
from decode.cost_measurement import quick_costs
from decode.targets.choices import AUTO, check_choice, fast_dtype
from decode.types import OFF, Drafter, Policy, Target

log = logging.getLogger(__name__)

KINDS = "outrider.drafters"  # entry points: from_pretrained(name_or_path, target) of each kind
DESCRIPTION = "drafter.json"  # in a trained drafter's folder; its "kind" names the entry point
DEFAULT_POLICY = "posterior"


def resolve_target(
    target: Any,
    *,
    tokenizer: Any | None,
    device: str | None,
    dtype: torch.dtype | str | None,
    backend: str | None = None,
    exactness: str = AUTO,
) -> Target:
    """A Target as it is; a Hugging Face model, a folder or a Hub name through that backend.

    Without a backend a name goes through the usual one, and a model, which is the caller's, through
    its own forward. Without a dtype a name is loaded in float32.
    """
    if isinstance(target, Target):
        return target
    from decode.targets.backends import make_target
    from decode.targets.loading import load_causal_lm, load_tokenizer
    from decode.targets.moving import moved

    check_choice(backend or AUTO, exactness)
    if isinstance(target, str | Path):
        name = str(target)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        loaded = load_causal_lm(name, _torch_dtype(dtype, device) or torch.float32)
        model = moved(loaded, device)
        tokenizer = load_tokenizer(name) if tokenizer is None else tokenizer
        return make_target(
            model, tokenizer, name, backend=backend or AUTO, exactness=exactness, take=True
        )
    if not isinstance(target, torch.nn.Module):
        raise ValueError(
            f"target is a {type(target).__name__}; pass a Target, a Hugging Face model or its name"
        )
    kind = _torch_dtype(dtype, device or str(next(target.parameters()).device))
    model = target if kind is None and device is None else target.to(device=device, dtype=kind)
    if tokenizer is None and (name := getattr(model.config, "_name_or_path", "")):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(name)
    kept = backend or "transformers"
    return make_target(model, tokenizer, backend=kept, exactness=exactness, take=False)


def _torch_dtype(dtype: torch.dtype | str | None, device: str) -> torch.dtype | None:
    """The dtype of that name; "auto" is what the device multiplies fastest."""
    name = fast_dtype(device) if dtype == AUTO else dtype
    kind = getattr(torch, name, None) if isinstance(name, str) else name
    if dtype is not None and not isinstance(kind, torch.dtype):
        raise ValueError(f"dtype={dtype} is not known; use auto, float32, bfloat16 or float16")
    return kind


def resolve_drafters(drafters: Any, target: Target) -> dict[str, Drafter]:
    """Drafters by name; one alone is named "drafter"."""
    if drafters is None:
        return {}
    if not isinstance(drafters, Mapping):
        drafters = {"drafter": drafters}
    return {name: resolve_drafter(drafter, target) for name, drafter in drafters.items()}


def resolve_drafter(drafter: Any, target: Target) -> Drafter:
    """A Drafter as it is; by name: a kind, a trained drafter's folder, or any causal LM."""
    if not isinstance(drafter, str | Path):
        if not isinstance(drafter, Drafter):
            raise ValueError(
                f"drafter {drafter!r} is none; pass a Drafter, a kind, a folder or a model's name"
            )
        return drafter
    name = str(drafter)
    known = {point.name: point for point in entry_points(group=KINDS)}
    kind = _kind(name, set(known))
    if kind not in known:
        raise ValueError(
            f"{name} is a drafter of kind {kind!r}, which is not installed; "
            f"choose one of {', '.join(sorted(known))}"
        )
    return known[kind].load()(name, target)


def _kind(name: str, known: set[str]) -> str:
    description = Path(name) / DESCRIPTION
    if description.is_file():
        return str(json.loads(description.read_text(encoding="utf-8")).get("kind"))
    return name if name in known and not Path(name).exists() else "lm"


def resolve_policy(
    policy: Policy | str | None, target: Target, drafters: Mapping[str, Drafter], clock: Clock
) -> Policy | None:
    """A Policy as it is; by name, or the default one, with costs measured now. None where nothing
    drafts.
    """
    if isinstance(policy, Policy):
        return policy
    if policy is not None and not isinstance(policy, str):
        raise ValueError(
            f"policy {policy!r} is none; pass a Policy or its name, as in policy={DEFAULT_POLICY!r}"
        )
    if not drafters or policy == OFF:
        return None
    config = policy_config(policy or DEFAULT_POLICY)
    costs = None
    if config.needs_costs:
        costs = quick_costs(target, drafters, clock)
        log.info(
            "policy %s: measured %s",
            policy or f"{DEFAULT_POLICY} (none was given)",
            _told(costs, drafters),
        )
    return config.build(costs, list(drafters), 0)


def policy_config(name: str) -> Any:
    """The policy's settings as conf/policy holds them: values live in YAML only."""
    import yaml

    folder = files("conf") / "policy"
    known = sorted(Path(f.name).stem for f in folder.iterdir() if f.name.endswith(".yaml"))
    if name not in known:
        raise ValueError(f"policy={name} is not known; choose one of {', '.join(known)}")
    values = yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
    module, _, cls = values.pop("_target_").rpartition(".")
    return getattr(importlib.import_module(module), cls)(**values)


def _told(costs: Any, drafters: Mapping[str, Drafter]) -> str:
    drafts = "".join(
        f", {name} drafts 4 tokens in {1e3 * costs.draft(name, 4):.1f} ms" for name in drafters
    )
    return f"one plain step takes {1e3 * costs.plain_seconds:.1f} ms{drafts}"

"""An export read back: the same tensors, the same logits, the same priors, or one sentence."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decode.targets.transformers import TransformersTarget
from decode.types import Router, Sampling
from drafters.lora import with_adapter
from drafters.retrieval import RetrievalDrafter

PROBE_TEXTS = ("Write a function that adds two numbers.", "", "How was your day? " * 40)
PROBE_TOKENS = 24
# How far logits may be moved by another order of summation, as a share of the largest of them.
ROUNDING = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def check_drafter(name: str, ours: Any, again: Any, target: TransformersTarget) -> float:
    """Largest relative difference of a reloaded drafter's logits; refused beyond rounding."""
    if isinstance(ours, RetrievalDrafter):  # it has a table and no logits
        return check_table(name, ours, again)
    compare_tensors(name, ours, again)
    probe = probe_ids(target)
    return compare_logits(name, drafter_logits(ours, probe), drafter_logits(again, probe), ours)


def check_table(name: str, ours: RetrievalDrafter, again: RetrievalDrafter) -> float:
    """0.0: the table came back as it was, or ValueError."""
    a, b = ([] if t is None else [t.texts, t.places] for t in (ours.table, again.table))
    if len(a) != len(b) or not all(map(torch.equal, a, b)):
        raise ValueError(
            f"the table of drafter {name} came back from the export changed; check the disk and "
            "run stage=export force=true"
        )
    return 0.0


def check_pretrained(name: str, ours: Any, folder: Path, target: TransformersTarget) -> float:
    """The same for a whole model, as any program loads it, where the drafter has a law."""
    probe = probe_ids(target)
    logits = drafter_logits(ours, probe)
    theirs = logits_where_known(load_pretrained(folder), probe, logits)
    return compare_logits(name, logits, theirs, ours)


def check_adapter(
    name: str, ours: Any, folder: Path, base: Path, target: TransformersTarget
) -> float:
    """The same for an adapter on its base's whole model, as PEFT puts them together."""
    probe = probe_ids(target)
    logits = drafter_logits(ours, probe)
    theirs = logits_where_known(with_adapter(load_pretrained(base), folder), probe, logits)
    return compare_logits(name, logits, theirs, ours)


def check_routers(ours: Router, theirs: Router | None) -> None:
    """Refuse an exported router whose priors are not those of the trained one."""
    if theirs is None:
        raise ValueError("the export has no router; run stage=export force=true")
    for text in PROBE_TEXTS:
        for sampling in (Sampling(), Sampling(temperature=0.8)):
            a, b = (router.prior(text, 20, sampling) for router in (ours, theirs))
            pairs = [(a.mean[name], b.mean[name]) for name in a.mean]
            pairs += [(a.sd[name], b.sd[name]) for name in a.sd]
            if not all(abs(one - other) <= 1e-6 for one, other in pairs):
                raise ValueError(
                    "the router came back from the export with other priors; "
                    "run stage=export force=true"
                )


def probe_ids(target: TransformersTarget) -> Tensor:  # [1, T]
    """Token ids spread over the vocabulary, the same each time."""
    step = max(target.vocab_size // PROBE_TOKENS, 1)
    ids = [(5 + 7 * place * step) % target.vocab_size for place in range(PROBE_TOKENS)]
    return torch.tensor([ids], device=target.device)


@torch.inference_mode()
def drafter_logits(drafter: Any, probe: Tensor) -> Tensor:  # [1, T, V] float32
    """Logits over the target's vocabulary after each probe token."""
    return drafter.widen(drafter.trainable(probe))


@torch.inference_mode()
def logits_where_known(model: Any, probe: Tensor, ours: Tensor) -> Tensor:
    """A whole model's logits where ours are finite: a draft vocabulary has no law elsewhere."""
    theirs = model(probe.cpu()).logits.to(ours)
    return torch.where(torch.isfinite(ours), theirs[..., : ours.shape[-1]], ours)


def load_pretrained(folder: Path) -> Any:
    """A folder's model as any program would load it; no tensor may be missing or left over."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", use_safetensors=True, output_loading_info=True, local_files_only=True
    )
    model, info = loaded
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := info[problem]:
            raise ValueError(
                f"{folder} was exported with {problem.replace('_', ' ')} ({min(map(str, names))}); "
                "set stages.export.pretrained=false, and report it"
            )
    return model.eval()


def compare_tensors(name: str, ours: Any, theirs: Any) -> None:
    """Refuse a reloaded drafter that lacks a tensor, has another one, or differs in a bit."""
    a, b = (drafter.trainable.own_tensors() for drafter in (ours, theirs))
    if a.keys() != b.keys():
        raise ValueError(
            f"drafter {name} came back from the export with other tensors "
            f"({min(a.keys() ^ b.keys())}); check the disk and run stage=export force=true"
        )
    for key, tensor in a.items():
        if not torch.equal(tensor, b[key]):
            raise ValueError(
                f"tensor {key} of drafter {name} came back from the export changed; "
                "check the disk and run stage=export force=true"
            )


def compare_logits(name: str, ours: Tensor, theirs: Tensor, drafter: Any) -> float:
    """Largest difference, relative to the largest logit; refused beyond rounding."""
    tolerance = ROUNDING[next(drafter.trainable.parameters()).dtype]
    known = torch.isfinite(ours)
    if not torch.equal(known, torch.isfinite(theirs)):
        raise ValueError(
            f"drafter {name} came back from the export with another draft vocabulary; "
            "run stage=export force=true"
        )
    scale = float(ours[known].abs().max().clamp(min=1e-6))
    difference = float((ours[known] - theirs[known]).abs().max()) / scale
    if not difference <= tolerance:
        raise ValueError(
            f"logits of drafter {name} came back from the export changed by {difference:.1e} of "
            f"the largest (allowed: {tolerance:.0e}); run stage=export force=true"
        )
    return difference

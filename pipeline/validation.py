"""What training was worth: acceptance_length before and after, with an interval."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.answers import Answer, Answers
from pipeline.files import write_json

FILE = "validation.json"
NUM_RESAMPLES = 2000

Passes = Sequence[Sequence[float]]  # [prompts, 2]: tokens emitted, target passes


def validation_answers(folder: Path, domains: Sequence[str], per_domain: int) -> list[Answer]:
    """Answers under every law to the first validation prompts of each domain (empty: all)."""
    prompts: dict[str, set[str]] = {}
    chosen = []
    for answer in Answers(folder).rows(split="validation", with_teacher=False):
        if not domains or answer.domain in domains:
            known = prompts.setdefault(answer.domain, set())
            if len(known) < per_domain:
                known.add(answer.id)
            if answer.id in known:
                chosen.append(answer)
    if not chosen:
        raise ValueError(
            f"{folder} holds no validation answers of {', '.join(domains) or 'any domain'}; "
            "let stage=regenerate answer the validation split"
        )
    return chosen


def acceptance_length(passes: Passes) -> float:
    """Tokens over target passes, sums and not a mean of ratios."""
    emitted, num_passes = np.asarray(passes, dtype=np.float64).sum(axis=0)
    return float(emitted / num_passes)


def difference_interval(before: Passes, after: Passes, seed: int) -> tuple[float, float]:
    """95 % bootstrap interval of the gain in acceptance_length, prompts drawn in pairs."""
    pairs = np.stack([np.asarray(before), np.asarray(after)]).astype(np.float64)  # [2, prompts, 2]
    random = np.random.Generator(np.random.Philox(key=[seed, 0]))
    rows = random.integers(0, pairs.shape[1], size=(NUM_RESAMPLES, pairs.shape[1]))
    emitted, num_passes = np.moveaxis(pairs[:, rows].sum(axis=2), -1, 0)  # each [2, resamples]
    lengths = emitted / num_passes
    low, high = np.percentile(lengths[1] - lengths[0], [2.5, 97.5])
    return float(low), float(high)


def write_report(
    out: Path,
    answers: Sequence[Answer],
    before: Passes,
    after: Passes,
    seed: int,
    num_draft_tokens: int,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """Write validation.json, per prompt and in sum; returns the sums."""
    low, high = difference_interval(before, after, seed)
    metrics = {
        "acceptance_length_before": acceptance_length(before),
        "acceptance_length_after": acceptance_length(after),
        "acceptance_length_gain": acceptance_length(after) - acceptance_length(before),
        "acceptance_length_gain_low": low,
        "acceptance_length_gain_high": high,
        **_by_law(answers, before, "before"),
        **_by_law(answers, after, "after"),
        **facts,
    }
    prompts = [
        {"id": answer.id, "domain": answer.domain, "law": answer.law, "before": old, "after": new}
        for answer, old, new in zip(answers, before, after, strict=True)
    ]
    content = {"num_draft_tokens": num_draft_tokens, "prompts": prompts, "metrics": metrics}
    write_json(out / FILE, content)
    return metrics


def read_metrics(out: Path) -> dict[str, Any] | None:
    """What write_report returned; None where it has not run yet."""
    path = out / FILE
    return json.loads(path.read_text(encoding="utf-8"))["metrics"] if path.exists() else None


def _by_law(answers: Sequence[Answer], passes: Passes, when: str) -> dict[str, float]:
    laws = sorted({answer.law for answer in answers})
    rows = {law: [p for a, p in zip(answers, passes, strict=True) if a.law == law] for law in laws}
    return {f"acceptance_length_{law}_{when}": acceptance_length(rows[law]) for law in laws}

"""Suite decode: every way to write a text, in turn within every prompt, and what they are worth.

The order rotates from prompt to prompt, so that what else the machine does falls on all ways.
Ratios are of the same prompts; their median is told with a 95% bootstrap interval. A way that fails
is said, left out and named in the results, with what it had written before.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from decode.clock import Clock
from decode.results import ratio
from decode.types import Target
from pipeline.bench_arms import COMPILED, Arm, Way, Written
from pipeline.bench_forward import median_ratio
from pipeline.progress import progress
from pipeline.scores import ALL, first_difference, top_two_gap
from pipeline.wallclock import PLAIN, EvalPrompt, rotated

log = logging.getLogger(__name__)

WARM_UP_TOKENS = 8
OWN, PEER = "ours", "theirs"
LONGEST = 200  # characters of a reason


@dataclass
class Race:
    """What was written: by arm, one text a prompt, None where the arm had failed."""

    prompts: Sequence[EvalPrompt]
    texts: dict[str, list[Written | None]] = field(default_factory=dict)
    first_call_seconds: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    device_bytes: dict[str, int] = field(default_factory=dict)  # that the first call reserved


def race(
    arms: Sequence[Arm], prompts: Sequence[EvalPrompt], max_new_tokens: int, clock: Clock
) -> Race:
    """Every arm over every prompt. Raises ValueError where plain decoding, the measure of all,
    is not among the arms or fails.
    """
    if PLAIN not in {arm.name for arm in arms}:
        raise ValueError("plain decoding is what the others are measured by; leave it in")
    result = Race(prompts)
    ways: dict[str, Way] = {}
    with progress("decode: first calls", len(arms), "ways") as meter:
        for arm in arms:
            result.kinds[arm.name] = OWN if arm.is_ours else PEER
            result.texts[arm.name] = []
            call = partial(_first, arm, ways, result, max_new_tokens, clock)
            _attempt(arm.name, call, result)
            meter.advance()
    with progress("decode: texts", len(prompts) * len(ways), "texts") as meter:
        for turn, prompt in enumerate(prompts):
            for name in rotated([arm.name for arm in arms], turn):
                result.texts[name].append(_text(name, ways, prompt, max_new_tokens, result))
                meter.advance(name in ways)
    return result


def _first(arm: Arm, ways: dict[str, Way], result: Race, max_new_tokens: int, clock: Clock) -> None:
    """Make the arm and call it twice: what it has to compile or load is not timed with a text."""
    prompt = list(result.prompts[0].token_ids)
    start, held = clock.now(), _device_bytes()
    way = arm.make()
    way(prompt, min(WARM_UP_TOKENS, max_new_tokens))
    result.first_call_seconds[arm.name] = clock.now() - start
    way(prompt, max_new_tokens)
    result.device_bytes[arm.name] = _device_bytes() - held
    ways[arm.name] = way


def _device_bytes() -> int:
    """What this process holds of the device's memory, used or not."""
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0


def _text(
    name: str, ways: dict[str, Way], prompt: EvalPrompt, max_new_tokens: int, result: Race
) -> Written | None:
    if name not in ways:
        return None
    written = _attempt(name, lambda: ways[name](list(prompt.token_ids), max_new_tokens), result)
    if written is None:
        del ways[name]
    return written


def _attempt(name: str, call: Callable[[], Any], result: Race) -> Any:
    """What the call gives; None where it fails, which is said. Others go on without it."""
    try:
        return call()
    except Exception as error:
        if name == PLAIN:
            raise
        result.failures[name] = f"{type(error).__name__}: {error}".splitlines()[0][:LONGEST]
        log.warning("%s failed and is left out: %s", name, result.failures[name])
        log.debug("where %s failed", name, exc_info=error)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None


def told(result: Race, target: Target) -> dict[str, Any]:
    """Rows by arm and group of prompts, each text's numbers, and where texts part from plain's."""
    groups: dict[str, list[int]] = {ALL: list(range(len(result.prompts)))}
    for place, prompt in enumerate(result.prompts):
        groups.setdefault(prompt.domain, []).append(place)
    arms = [name for name, texts in result.texts.items() if any(t is not None for t in texts)]
    rows = [
        _row(name, group, places, result)
        for group, places in groups.items()
        for name in arms
        if any(result.texts[name][place] is not None for place in places)
    ]
    return {
        "rows": rows,
        "best": best_by_group(rows),
        "audit": audit(result, target),
        "failures": result.failures,
        "texts": [_numbers(result, name, place) for name in arms for place in groups[ALL]],
        "metrics": {
            **{f"{row['arm']}/{row['group']}": round(row["tokens_per_second"], 1) for row in rows},
            "num_failed": len(result.failures),
        },
    }


def _row(name: str, group: str, places: Sequence[int], result: Race) -> dict[str, Any]:
    ours = [result.texts[name][place] for place in places]
    there = [text for text in ours if text is not None]
    tokens = sum(len(text.token_ids) for text in there)
    passes = sum(text.num_passes or 0 for text in there)
    plain = [result.texts[PLAIN][place] for place in places]
    compiled = [(result.texts.get(COMPILED) or [None] * (place + 1))[place] for place in places]
    equal = [
        text.token_ids == base.token_ids
        for text, base in zip(ours, plain, strict=True)
        if text is not None and base is not None
    ]
    return {
        "arm": name,
        "group": group,
        "kind": result.kinds[name],
        "num_texts": len(there),
        "num_tokens": tokens,
        "tokens_per_second": float(np.nanmedian([text.rate for text in there])),
        "over_plain": _paired(ours, plain),
        "over_compiled": _paired(ours, compiled),
        "equal_texts": sum(equal),
        "tokens_per_pass": ratio(tokens, passes),  # NaN: not told
        "first_token_seconds": median(text.first_seconds for text in there),
        "first_call_seconds": result.first_call_seconds[name],
        "device_bytes": result.device_bytes.get(name),
    }


def _paired(
    ours: Sequence[Written | None], base: Sequence[Written | None]
) -> dict[str, Any] | None:
    """The median ratio of rates over prompts that both have written; None where there are none."""
    pairs = [(a.rate, b.rate) for a, b in zip(ours, base, strict=True) if a and b]
    return median_ratio(*zip(*pairs, strict=True)).plain() if pairs else None


def best_by_group(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By group, in hindsight on these very prompts: the best way of ours and of theirs."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        best = found.setdefault(row["group"], {})
        kind = row["kind"]
        if kind not in best or row["tokens_per_second"] > best[kind]["tokens_per_second"]:
            best[kind] = {key: row[key] for key in ("arm", "tokens_per_second", "over_plain")}
    return found


def audit(result: Race, target: Target) -> dict[str, Any]:
    """Where texts part from plain decoding's, and how near a tie its two best logits were there."""
    cases = []
    tokens = 0
    for name, texts in result.texts.items():
        for prompt, ours, plain in zip(result.prompts, texts, result.texts[PLAIN], strict=True):
            if ours is None or plain is None or name == PLAIN:
                continue
            tokens += len(plain.token_ids) if result.kinds[name] == OWN else 0
            place = first_difference(ours.token_ids, plain.token_ids)
            if place is not None:
                gap = top_two_gap(target, [*prompt.token_ids, *plain.token_ids[:place]])
                cases.append({"arm": name, "id": prompt.id, "position": place, "gap": gap})
    own = sum(result.kinds[str(case["arm"])] == OWN for case in cases)
    return {"own_tokens_compared": tokens, "own_texts_different": own, "differences": cases}


def _numbers(result: Race, name: str, place: int) -> dict[str, Any]:
    """A text in numbers, so that every median can be computed again."""
    text = result.texts[name][place]
    numbers = {"arm": name, "id": result.prompts[place].id}
    if text is None:
        return {**numbers, "failed": True}
    return {
        **numbers,
        "num_tokens": len(text.token_ids),
        "num_first": text.num_first,
        "seconds": text.seconds,
        "first_seconds": text.first_seconds,
        "num_passes": text.num_passes,
    }

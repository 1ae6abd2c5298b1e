"""What the cells of a race say: speed with intervals, where the time went, and whether the text is
the target's.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from decode.results import ratio, weighted_percentile
from decode.types import OFF, Target
from pipeline.intervals import Interval, ratio_of_rates
from pipeline.wallclock import PLAIN, Cell, EvalPrompt, Method

ALL = "all"
HEADLINE_SPLIT = "test"  # "all" is this split; the others stand beside it under their own names
GRAM = 8


@dataclass(frozen=True, slots=True)
class Resampling:
    """How intervals are drawn."""

    num_resamples: int
    seed: int

    def speed(self, ours: Mapping[str, list[float]], base: Mapping[str, list[float]]) -> Interval:
        """Tokens per second over those of the base, over the prompts that both have."""
        ids = [name for name in base if name in ours]
        return ratio_of_rates(
            [ours[name][0] for name in ids],
            [ours[name][1] for name in ids],
            [base[name][0] for name in ids],
            [base[name][1] for name in ids],
            self.num_resamples,
            self.seed,
        )


def scoreboard(
    cells: Sequence[Cell], methods: Mapping[str, Sequence[Method]], resampling: Resampling
) -> list[dict[str, Any]]:
    """One row a (law, domain, method), in the order in which people read them."""
    rows = []
    for law, entrants in methods.items():
        for domain, members in by_domain([cell for cell in cells if cell.law == law]).items():
            plain = [cell for cell in members if cell.method == PLAIN]
            for method in entrants:
                ours = [cell for cell in members if cell.method == method.name]
                row = {"law": law, "domain": domain, "method": method.name, "arm": method.arm}
                rows.append({**row, **score(ours, plain, resampling)})
    return rows


def by_domain(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """The test split as "all", each of its domains, and every other split under its name."""
    groups: dict[str, list[Cell]] = {
        ALL: [cell for cell in cells if cell.split == HEADLINE_SPLIT],
    }
    for cell in cells:
        name = cell.domain if cell.split == HEADLINE_SPLIT else cell.split
        groups.setdefault(name, []).append(cell)
    return {name: members for name, members in groups.items() if members}


def score(cells: Sequence[Cell], plain: Sequence[Cell], resampling: Resampling) -> dict[str, Any]:
    """The figures of one method over these cells."""
    tokens, passes = sum(c.tokens for c in cells), sum(c.passes for c in cells)
    seconds = sum(c.seconds for c in cells)
    plain_step = ratio(sum(c.seconds for c in plain), sum(c.passes for c in plain))
    spread = [(s / n, int(n)) for cell in cells for s, n in cell.steps if n]
    drafters: Counter[str] = Counter()
    for cell in cells:
        drafters.update(cell.drafters)
    return {
        "num_prompts": len({cell.id for cell in cells}),
        "num_tokens": tokens,
        "tokens_per_second": ratio(tokens, seconds),
        "speed_ratio": resampling.speed(per_prompt(cells), per_prompt(plain)).plain(),
        "acceptance_length": ratio(tokens, passes),
        "break_even_length": ratio(ratio(seconds, passes), plain_step),
        "acceptance_rate": ratio(sum(c.accepted for c in cells), sum(c.drafted for c in cells)),
        "draft_ms": 1e3 * ratio(sum(c.draft_seconds for c in cells), passes),
        "verify_ms": 1e3 * ratio(sum(c.verify_seconds for c in cells), passes),
        "host_ms": 1e3 * ratio(sum(c.host_seconds for c in cells), passes),
        "prefill_ms": 1e3 * ratio(sum(c.prefill_seconds for c in cells), len(cells)),
        "p50_token_ms": 1e3 * weighted_percentile(spread, 0.50),
        "p95_token_ms": 1e3 * weighted_percentile(spread, 0.95),
        "share_of_steps_off": ratio(sum(c.steps_off for c in cells), passes),
        "drafters": {name: drafters[name] / passes for name in sorted(drafters) if name != OFF},
        "distinct_8gram_share": distinct_share(cell.token_ids for cell in cells),
        "dropped": {name: why for cell in cells for name, why in cell.dropped.items()},
    }


def per_prompt(cells: Iterable[Cell]) -> dict[str, list[float]]:
    """Prompt id -> [tokens, seconds], repeats added up."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for cell in cells:
        held = sums[cell.id]
        held[0], held[1] = held[0] + cell.tokens, held[1] + cell.seconds
    return dict(sums)


def distinct_share(texts: Iterable[Sequence[int]]) -> float:
    """Different 8-grams over all 8-grams, each text by itself: near 1 for text that does not
    loop.
    """
    distinct = total = 0
    for ids in texts:
        grams = [tuple(ids[i : i + GRAM]) for i in range(len(ids) - GRAM + 1)]
        distinct, total = distinct + len(set(grams)), total + len(grams)
    return ratio(distinct, total)


# ------------------------------------------------------------------------------------------- exactn


def audit(
    cells: Sequence[Cell], greedy_laws: Sequence[str], prompts: Sequence[EvalPrompt], target: Target
) -> dict[str, Any]:
    """How many greedy texts differ from plain decoding's, and how near a tie each was where it
    parted.

    A wider pass sums in another order; where the two best logits are closer than that error, either
    is the maximum. A gap that is not tiny is a defect.
    """
    contexts = {prompt.id: list(prompt.token_ids) for prompt in prompts}
    plain = {
        (c.id, c.law, c.repeat): c.token_ids
        for c in cells
        if c.method == PLAIN and c.law in greedy_laws
    }
    compared: Counter[str] = Counter()
    cases: list[dict[str, Any]] = []
    for cell in cells:
        reference = plain.get((cell.id, cell.law, cell.repeat))
        if reference is None or cell.method == PLAIN:
            continue
        compared[cell.method] += 1
        place = first_difference(cell.token_ids, reference)
        if place is not None:
            prefix = contexts[cell.id] + reference[:place]
            case = {"id": cell.id, "law": cell.law, "repeat": cell.repeat, "method": cell.method}
            cases.append({**case, "position": place, "gap": top_two_gap(target, prefix)})
    differ = Counter(case["method"] for case in cases)
    return {
        "compared": dict(compared),
        "different": {name: differ[name] for name in compared},
        "largest_gap": max((case["gap"] for case in cases), default=0.0),
        "differences": cases,
    }


def first_difference(ours: Sequence[int], reference: Sequence[int]) -> int | None:
    """Where two texts part; None where they are equal."""
    if list(ours) == list(reference):
        return None
    pairs = zip(ours, reference, strict=False)
    places = (i for i, (a, b) in enumerate(pairs) if a != b)
    return next(places, min(len(ours), len(reference)))


@torch.inference_mode()
def top_two_gap(target: Target, prefix: Sequence[int]) -> float:
    """Difference of the two best logits after a text, as plain decoding computes them."""
    session = target.open()
    if len(prefix) > 1:
        target.prefill(session, prefix[:-1])
    best = target.score([session], [[prefix[-1]]])[0, -1].float().topk(2).values
    gap = float(best[0] - best[1])
    return gap if math.isfinite(gap) else math.nan

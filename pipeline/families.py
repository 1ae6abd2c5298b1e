"""Acceptance by domain and by a benchmark's task family, of every drafter, on recorded answers.

Everything is sums over answers: tokens emitted, and the target passes that emitting them takes in
expectation (exactly, where the law is greedy). Intervals resample questions, all drafters and all
turns of a question together, so that drafters can be compared in pairs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from decode.results import ratio
from pipeline.benches import BENCH, bench_of, question_of
from pipeline.intervals import LEVEL, Interval
from pipeline.scores import Resampling
from pipeline.scoring import passes_of

if TYPE_CHECKING:
    import pandas as pd

CHOSEN_ON = ("drafter_train", "router_train", "validation")  # splits that chose something
CHUNK = 256  # resamples at once


@dataclass(frozen=True, slots=True)
class Sums:
    """One answer and one drafter."""

    prompt_id: str
    question: str  # what intervals resample
    is_bench: bool
    split: str  # or the benchmark
    domain: str
    family: str
    law: str
    drafter: str
    tokens: float
    passes: float


KeyOf = Callable[[Sums], str]


def sums_of(frame: "pd.DataFrame", num_draft_tokens: int, laws: Iterable[str]) -> list[Sums]:
    """One entry for each (answer, drafter) of the splits that chose nothing."""
    held_out = ~frame["split"].isin(CHOSEN_ON) & frame["law"].isin(list(laws))
    frame = frame[held_out & (frame["num_tokens"] > 0)]
    passes = passes_of(list(frame["accept"]), num_draft_tokens)
    found = []
    for row, count in zip(frame.itertuples(index=False), passes, strict=True):
        is_bench = row.split == BENCH
        found.append(
            Sums(
                prompt_id=row.prompt_id,
                is_bench=is_bench,
                question=question_of(row.prompt_id) if is_bench else row.prompt_id,
                split=bench_of(row.family) if is_bench else row.split,
                domain=row.domain,
                family=row.family.partition("/")[2] if is_bench else row.family,
                law=row.law,
                drafter=row.drafter,
                tokens=float(row.num_tokens),
                passes=float(count),
            )
        )
    return found


def with_best_of(sums: Sequence[Sums], pools: Mapping[str, Sequence[str]]) -> list[Sums]:
    """The same and, by each name, a drafter that is the best of several on every single answer.

    It chooses in hindsight: what a router that is never wrong would have.
    """
    answers: dict[tuple[str, str], list[Sums]] = {}
    for entry in sums:
        answers.setdefault((entry.prompt_id, entry.law), []).append(entry)
    best = [
        replace(min(own, key=lambda entry: entry.passes), drafter=name)
        for name, members in pools.items()
        for entries in answers.values()
        if (own := [entry for entry in entries if entry.drafter in members])
    ]
    return [*sums, *best]


def by_domain(entry: Sums) -> str:
    """A domain; a benchmark is one as a whole."""
    return entry.split if entry.is_bench else entry.domain


def by_family(entry: Sums) -> str:
    """A benchmark's task family."""
    return entry.family


def acceptance_rows(
    sums: Sequence[Sums], key_of: KeyOf, key: str, resampling: Resampling
) -> list[dict[str, Any]]:
    """acceptance_length of each drafter by law, split and `key`, with the interval around it."""
    rows = []
    for (law, split, name), members in grouped(sums, key_of).items():
        drafters, table = totals(members)
        lengths = _lengths(resampled(table, resampling))  # [R, drafters]
        whole = table.sum(axis=0)
        for place, drafter in enumerate(drafters):
            tokens, passes = whole[place]
            interval = _interval(ratio(tokens, passes), lengths[:, place], len(table))
            rows.append(
                {
                    "drafter": drafter,
                    key: name,
                    "split": split,
                    "law": law,
                    "tokens": tokens,
                    "passes": passes,
                    "num_prompts": len(table),
                    "acceptance_length": interval.value,
                    "low": interval.low,
                    "high": interval.high,
                }
            )
    return rows


def paired_gain(
    sums: Sequence[Sums], drafter_a: str, drafter_b: str, resampling: Resampling
) -> dict[str, Interval]:
    """acceptance_length of one drafter over, and minus, another's on the same questions.

    Both intervals resample questions with both drafters' answers, in pairs.
    """
    members = [entry for entry in sums if entry.drafter in (drafter_a, drafter_b)]
    drafters, table = totals(members)
    for name in (drafter_a, drafter_b):
        if name not in drafters:
            raise ValueError(
                f"drafter {name} has no answers to compare on; those that have are "
                f"{', '.join(dict.fromkeys(entry.drafter for entry in sums)) or 'none'}"
            )
    a, b = drafters.index(drafter_a), drafters.index(drafter_b)
    drawn = _lengths(resampled(table, resampling))
    whole = _lengths(table.sum(axis=0)[None])[0]
    return {
        "ratio": _interval(float(whole[a] / whole[b]), drawn[:, a] / drawn[:, b], len(table)),
        "difference": _interval(float(whole[a] - whole[b]), drawn[:, a] - drawn[:, b], len(table)),
    }


def gain_rows(
    sums: Sequence[Sums], against: str, key_of: KeyOf, resampling: Resampling
) -> list[dict[str, Any]]:
    """The paired gain of every other drafter, by law, split and domain."""
    rows = []
    for (law, split, name), members in grouped(sums, key_of).items():
        for drafter in dict.fromkeys(entry.drafter for entry in members):
            if drafter != against:
                gain = paired_gain(members, drafter, against, resampling)
                found = {kind: interval.plain() for kind, interval in gain.items()}
                where = {"split": split, "domain": name, "law": law}
                rows.append({"drafter": drafter, "against": against, **where, **found})
    return rows


def grouped(sums: Iterable[Sums], key_of: KeyOf) -> dict[tuple[str, str, str], list[Sums]]:
    """(law, split, key) -> entries, in their order."""
    groups: dict[tuple[str, str, str], list[Sums]] = {}
    for entry in sums:
        groups.setdefault((entry.law, entry.split, key_of(entry)), []).append(entry)
    return groups


def totals(sums: Sequence[Sums]) -> tuple[list[str], np.ndarray]:
    """Drafters, and [questions, drafters, 2] of their tokens and passes."""
    drafters = {name: n for n, name in enumerate(dict.fromkeys(entry.drafter for entry in sums))}
    questions = {name: n for n, name in enumerate(dict.fromkeys(entry.question for entry in sums))}
    table = np.zeros((len(questions), len(drafters), 2))
    for entry in sums:
        cell = table[questions[entry.question], drafters[entry.drafter]]
        cell += (entry.tokens, entry.passes)
    return list(drafters), table


def resampled(table: np.ndarray, resampling: Resampling) -> np.ndarray:  # -> [R, drafters, 2]
    """Totals over as many questions drawn with replacement, the same for all drafters."""
    num = len(table)
    if num == 0:
        return np.zeros((0, *table.shape[1:]))
    generator = np.random.default_rng(resampling.seed)
    flat, drawn = table.reshape(num, -1), []
    for start in range(0, resampling.num_resamples, CHUNK):
        rows = min(CHUNK, resampling.num_resamples - start)
        index = generator.integers(0, num, size=(rows, num)) + num * np.arange(rows)[:, None]
        counts = np.bincount(index.ravel(), minlength=rows * num).reshape(rows, num)
        drawn.append(counts @ flat)
    return np.concatenate(drawn).reshape(-1, *table.shape[1:])


def _lengths(sums: np.ndarray) -> np.ndarray:  # [..., 2] -> [...]
    with np.errstate(divide="ignore", invalid="ignore"):
        return sums[..., 0] / sums[..., 1]


def _interval(value: float, drawn: np.ndarray, num: int) -> Interval:
    if num < 2:  # nothing to resample: no interval can be claimed
        return Interval(value, float("nan"), float("nan"), num)
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.nanpercentile(drawn, [tail, 100 - tail])
    return Interval(value, float(low), float(high), num)


def acceptance_tables(
    sums: Sequence[Sums],
    best_of: Mapping[str, Sequence[str]],
    against: Sequence[str],
    resampling: Resampling,
) -> dict[str, list[dict[str, Any]]]:
    """Each drafter, and each best of several, by domain and by family; and its gain over some."""
    every = with_best_of(sums, best_of)
    families = [entry for entry in every if entry.is_bench]
    return {
        "acceptance_by_domain": acceptance_rows(every, by_domain, "domain", resampling),
        "acceptance_by_family": acceptance_rows(families, by_family, "family", resampling),
        "gains": [row for one in against for row in gain_rows(every, one, by_domain, resampling)],
    }


def check_names(
    pool: Sequence[str], best_of: Mapping[str, Sequence[str]], against: Sequence[str]
) -> None:
    """Raise ValueError where a comparison names a drafter that is not in the pool."""
    given = [name for names in best_of.values() for name in names]
    given += [name for name in against if name not in best_of]
    for name in given:
        if name not in pool:
            raise ValueError(
                f"stages.compare.best_of or compare_with names the drafter {name}, which is not "
                f"in the pool; its entries are {', '.join(pool)}"
            )


def check_laws(frame: "pd.DataFrame", temperatures: Mapping[str, float]) -> None:
    """Raise ValueError where answers were recorded at another temperature than is measured."""
    for law, temperature in temperatures.items():
        others = {*frame.loc[frame["law"] == law, "temperature"]} - {temperature}
        if others:
            raise ValueError(
                f"law {law} was answered at temperature {min(others):g} and is to be measured at "
                f"{temperature:g}; make stages.evaluate.temperatures.{law} and "
                "stages.regenerate.temperature equal"
            )

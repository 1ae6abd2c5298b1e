"""Times every part of a step on this machine: the target by width, drafters by number of tokens.

Sizes take turns in a round, so that a slow moment of the machine hits all of them alike.
"""

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import cast

import torch
from torch import Tensor

from decode.clock import Clock
from decode.costs import Costs, costs_key, interpolate
from decode.device.ready import parts_on_device
from decode.native.target import NativeTarget
from decode.sampling import RowSampler
from decode.types import MAX_DRAFT_TOKENS, Drafter, DraftProposal, DraftSession, Sampling, Target
from decode.verification import Draft, Verifier, select_verifier, verify_drafts

log = logging.getLogger(__name__)

GROWTH = 2  # tokens by which a measured row grows between two proposals, as an accepted step would
BUSY = 1.5  # median over fastest, above which timings are not to be trusted
LAWS = (Sampling(), Sampling(temperature=1.0))  # measured: greedy, sampled
SYNTHETIC_PERIOD = 23  # tokens after which the repeating synthetic context repeats


def measure_costs(
    target: Target,
    drafters: Mapping[str, Drafter],
    clock: Clock,
    widths: Sequence[int],
    draft_lengths: Sequence[int],
    context_tokens: int,
    repeats: int,
    contexts: Sequence[Sequence[int]] | None = None,
    with_sampled: bool = True,
) -> Costs:
    """Medians over `repeats` rounds, sizes interleaved in a round so that a slow moment hits all
    alike.

    Where target and all drafters decode on the device, steps are timed there, as they are when
    they are used. Without `with_sampled`, text that is drawn is there taken to cost what greedy
    text does.

    `contexts` are token ids of real text, each cut to `context_tokens`; without them a synthetic
    row that repeats itself and one that does not are used. A drafter's seconds are the mean over
    contexts of its medians.
    """
    given = [list(context)[:context_tokens] for context in contexts or []]
    rows = [row for row in given if len(row) >= 2]
    rows = rows or synthetic_contexts(target.vocab_size, context_tokens)
    widths = sorted({1, *widths})
    found = parts_on_device(target, drafters)
    if found is None or found[1]:  # each step waits for the host, as the loop does
        tables = _on_host(target, drafters, clock, rows, widths, draft_lengths, repeats)
    else:
        from decode.device.measurement import measure_on_device

        tables = measure_on_device(
            cast(NativeTarget, target),
            found[0],
            clock,
            rows,
            widths,
            draft_lengths,
            repeats,
            LAWS if with_sampled else LAWS[:1],
        )
    sampled = len(tables.verify) > 1
    return Costs(
        key=costs_key(target),
        verify_seconds=tables.verify[0],
        draft_seconds=tables.draft[0],
        sampled_verify_seconds=tables.verify[1] if sampled else {},
        sampled_draft_seconds=tables.draft[1] if sampled else {},
        host_seconds=0.0,  # known from the records of a decoder that has run
        first_token_seconds=tables.firsts,
        memory_bytes={name: drafter.memory_bytes for name, drafter in drafters.items()},
        context_tokens=round(fmean(len(row) for row in rows)),
    )


@dataclass(frozen=True, slots=True)
class Tables:
    """What was measured: by law, greedy first."""

    verify: list[dict[int, float]]
    draft: list[dict[str, dict[int, float]]]
    firsts: dict[str, float]  # by drafter: seconds from a fresh row to a draft


def _on_host(
    target: Target,
    drafters: Mapping[str, Drafter],
    clock: Clock,
    rows: Sequence[Sequence[int]],
    widths: Sequence[int],
    draft_lengths: Sequence[int],
    repeats: int,
) -> Tables:
    """Part by part, waiting for the device after each."""
    timer = Timer(clock, target.device)
    verify = _measure_target(target, rows[0], timer, widths, repeats)
    draft: list[dict[str, dict[int, float]]] = [{} for _ in LAWS]
    firsts: dict[str, float] = {}
    for name, drafter in drafters.items():
        for law, table in zip(LAWS, draft, strict=True):
            table[name] = _measure_drafter(drafter, rows, timer, draft_lengths, repeats, law)
        firsts[name] = _measure_first(drafter, rows[0], timer, repeats)
    return Tables(verify, draft, firsts)


def quick_costs(target: Target, drafters: Mapping[str, Drafter], clock: Clock) -> Costs:
    """A rough measurement in a second or two, for a decoder that was given none.

    Drafting is timed at two lengths only and continued in a straight line: sixteen tokens of a
    large drafter take seconds. On the device each law has steps of its own to compile and capture,
    and what it changes is little beside the passes: there greedy steps stand for all.
    """
    widths = [2, 5, MAX_DRAFT_TOKENS + 1]
    length = min(64, target.max_context - MAX_DRAFT_TOKENS - 1)
    return measure_costs(
        target, drafters, clock, widths, [1, 4], length, repeats=3, with_sampled=False
    )


def synthetic_contexts(vocab_size: int, num_tokens: int) -> list[list[int]]:
    """Two rows: one that repeats itself, so that lookup matches, and one that does so as little as
    it can.
    """
    ids = [(i * 7919 + 13) % vocab_size for i in range(num_tokens)]
    return [[ids[i % min(SYNTHETIC_PERIOD, num_tokens)] for i in range(num_tokens)], ids]


class Timer:
    """Reads the clock after the device has finished, so that queued kernels are counted."""

    def __init__(self, clock: Clock, device: str) -> None:
        self.clock = clock
        self.device = torch.device(device)

    def now(self) -> float:
        """Seconds since some fixed moment."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.clock.now()


def _measure_target(
    target: Target, row: Sequence[int], timer: Timer, widths: Sequence[int], repeats: int
) -> list[dict[int, float]]:
    """Seconds to score and verify by width, under each law."""
    verifier = select_verifier(target.device)
    widths = [width for width in widths if len(row) - 1 + width <= target.max_context]
    session = target.open()
    target.prefill(session, row[:-1])
    seconds: list[dict[int, list[float]]] = [{width: [] for width in widths} for _ in LAWS]
    for turn in range(repeats + 1):  # the first turn warms up
        for width in widths:
            tokens = [row[(len(row) - 1 + i) % len(row)] for i in range(width)]
            start = timer.now()
            logits = target.score([session], [tokens])
            scored = timer.now() - start
            for law, table in zip(LAWS, seconds, strict=True):
                start = timer.now()
                _verify(verifier, logits, tokens[1:], law)
                if turn:
                    table[width].append(scored + timer.now() - start)
            target.rollback(session, len(row) - 1)
    warn_if_busy(seconds[0])
    return [{width: median(found) for width, found in table.items()} for table in seconds]


def warn_if_busy(seconds: Mapping[int, Sequence[float]]) -> None:
    """Work of one size takes one time; where it did not, something else was running."""
    worst = max(
        (median(found) / min(found) for found in seconds.values() if min(found) > 0), default=1.0
    )
    if worst > BUSY:
        log.warning(
            "the machine was busy while it was timed: equal passes took up to %.1f times their "
            "fastest; measure again when it is quiet",
            worst,
        )


def _verify(verifier: Verifier, logits: Tensor, draft: list[int], law: Sampling) -> None:
    """What a step does with the logits: verify a draft that has its own law, and read the
    answer.
    """
    rows = None if law.greedy or not draft else logits[0, : len(draft)]
    proposal = DraftProposal(draft, rows, "")
    uniforms = [0.5] * (len(draft) + 1)
    verify_drafts(verifier, logits, [Draft(proposal, law, uniforms, None)]).token_ids.tolist()


Timings = dict[tuple[str, int], list[float]]  # (who guessed, tokens asked for) -> seconds


def _measure_drafter(
    drafter: Drafter,
    rows: Sequence[Sequence[int]],
    timer: Timer,
    lengths: Sequence[int],
    repeats: int,
    law: Sampling,
) -> dict[int, float]:
    """Seconds by number of tokens, the mean over rows; NaN where it never proposed.

    A lookup may match nothing in the rows: then a row that repeats itself shows what a match costs.
    """
    timings = [_measure_row(drafter, row, timer, lengths, repeats, law) for row in rows]
    if any(k not in {size for _, size in found} for found in timings for k in lengths):
        turns = 1 + len(rows[0]) // SYNTHETIC_PERIOD
        looped = list(rows[0][:SYNTHETIC_PERIOD]) * turns
        timings.append(_measure_row(drafter, looped, timer, lengths, repeats, law))
    return blended(timings, lengths)


def blended(timings: Sequence[Timings], lengths: Sequence[int]) -> dict[int, float]:
    """Seconds by number of tokens: of each source the mean over rows of its medians, weighted with
    the share of proposals, of any length, that were the source's.

    A composite guesses now by lookup and now by a model. One median over both would be the seconds
    of whichever came more often at that length, and the lengths would not compare.
    """
    counts: Counter[str] = Counter()
    medians: dict[str, dict[int, list[float]]] = {}
    for found in timings:
        for (source, k), seconds in found.items():
            counts[source] += len(seconds)
            medians.setdefault(source, {}).setdefault(k, []).append(median(seconds))
    tables = {s: {k: fmean(rows) for k, rows in table.items()} for s, table in medians.items()}
    if not tables:
        return dict.fromkeys(lengths, math.nan)
    total = counts.total()
    return {
        k: sum(counts[source] / total * interpolate(table, k) for source, table in tables.items())
        for k in lengths
    }


def _measure_row(
    drafter: Drafter,
    row: Sequence[int],
    timer: Timer,
    lengths: Sequence[int],
    repeats: int,
    law: Sampling,
) -> Timings:
    timings: Timings = {}
    session, length = drafter.open(), len(row)
    for turn in range(repeats + 1):  # the first turn warms up
        for k in lengths:
            length += GROWTH
            if length > len(row):  # a row only grows, so begin again with a fresh one
                session, length = drafter.open(), len(row) // 2 + 1
                _propose(session, row[:length], 1, timer, law)
            spent, proposal = _propose(session, row[:length], k, timer, law)
            if turn and proposal.token_ids:
                timings.setdefault((proposal.source, k), []).append(spent)
    return timings


def _measure_first(drafter: Drafter, row: Sequence[int], timer: Timer, repeats: int) -> float:
    """Seconds from a fresh row to its first draft; the first try warms up."""
    tries = [
        _propose(drafter.open(), row, 1, timer, LAWS[0])[0] for _ in range(min(repeats, 3) + 1)
    ]
    return median(tries[1:])


@torch.inference_mode()
def _propose(
    session: DraftSession, row: Sequence[int], k: int, timer: Timer, law: Sampling
) -> tuple[float, DraftProposal]:
    start = timer.now()
    proposal = session.propose(row, k, RowSampler(law, lambda depth: 0.5, None))
    return timer.now() - start, proposal

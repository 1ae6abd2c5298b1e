"""The tables of decode.costs for what decodes on the device."""

import math
from collections.abc import Mapping, Sequence
from statistics import median

from decode.clock import Clock
from decode.cost_measurement import Tables, Timings, blended, warn_if_busy
from decode.device.parts import DeviceParts
from decode.device.timing import StepTimer, TimedArm, TimedStep
from decode.native.target import NativeTarget
from decode.types import OFF, Sampling


def measure_on_device(
    target: NativeTarget,
    parts: Mapping[str, DeviceParts],
    clock: Clock,
    rows: Sequence[Sequence[int]],
    widths: Sequence[int],
    draft_lengths: Sequence[int],
    repeats: int,
    laws: Sequence[Sampling],
) -> Tables:
    """Medians over rounds, the steps of all shapes once in each; drafting as the mean over rows.

    What a lookup adds to a step is its draft, whether it matches or not. A model's first draft in a
    fresh row is its reading of the row and a draft.
    """
    timer = StepTimer(target, parts, clock)
    length = max(len(row) for row in rows)
    widths = [width for width in widths if length - 1 + width <= target.max_context]
    try:
        found = [_under(law, timer, parts, rows, widths, draft_lengths, repeats) for law in laws]
        verify, draft = [tables[0] for tables in found], [tables[1] for tables in found]
        firsts = {
            name: _first(timer, name, rows[0], min(repeats, 3), draft[0][name]) for name in parts
        }
    finally:
        timer.close()
    return Tables(verify, draft, firsts)


def _under(
    law: Sampling,
    timer: StepTimer,
    parts: Mapping[str, DeviceParts],
    rows: Sequence[Sequence[int]],
    widths: Sequence[int],
    draft_lengths: Sequence[int],
    repeats: int,
) -> tuple[dict[int, float], dict[str, dict[int, float]]]:
    """Seconds to verify by width, and to draft by drafter and number of tokens."""
    length = max(len(row) for row in rows)
    passes = {width: _verifying(timer, parts, width, length, law) for width in widths}
    drafts = {(name, k): TimedArm(name, k, law) for name in parts for k in draft_lengths}
    arms = list(dict.fromkeys([*passes.values(), *drafts.values()]))
    found = [_rounds(timer, arms, row, repeats) for row in rows]
    seconds = {
        width: [step.verify_seconds for steps in found for step in steps[arm]]
        for width, arm in passes.items()
    }
    warn_if_busy(seconds)
    return {width: median(spent) for width, spent in seconds.items()}, {
        name: blended([_timings(steps, drafts, name) for steps in found], draft_lengths)
        for name in parts
    }


def _verifying(
    timer: StepTimer, parts: Mapping[str, DeviceParts], width: int, length: int, law: Sampling
) -> TimedArm:
    """A step of that width in which no model drafts: a lookup's where one can draft so much."""
    for name, part in parts.items():
        arm = TimedArm(name, width - 1, law)
        if width > 1 and part.model is None and timer.limit(arm, length) == width - 1:
            return arm
    return TimedArm(OFF, width - 1, law)


def _rounds(
    timer: StepTimer, arms: Sequence[TimedArm], row: Sequence[int], repeats: int
) -> dict[TimedArm, list[TimedStep]]:
    """The steps of each arm, after ever more of the row's second half."""
    steps: dict[TimedArm, list[TimedStep]] = {arm: [] for arm in arms}
    half = len(row) // 2
    for turn in range(repeats + 1):  # the first turn warms up
        size = len(row) - half * (repeats - turn) // (repeats + 1)
        timed = timer.round(arms, row[:size])
        if turn:
            for arm, step in zip(arms, timed, strict=True):
                steps[arm].append(step)
    return steps


def _timings(
    steps: Mapping[TimedArm, Sequence[TimedStep]],
    arms: Mapping[tuple[str, int], TimedArm],
    name: str,
) -> Timings:
    """Seconds of one drafter in one row, by the part that drafted and tokens asked for."""
    timings: Timings = {}
    for (drafter, k), arm in arms.items():
        for step in steps[arm] if drafter == name else ():
            if step.source is not None:
                timings.setdefault((step.source, k), []).append(step.draft_seconds)
    return timings


def _first(
    timer: StepTimer, name: str, row: Sequence[int], repeats: int, table: Mapping[int, float]
) -> float:
    """Seconds from a fresh row to a drafter's first draft; NaN where its context is too short."""
    model, draft = timer.members.model_of(name), table[min(table)]
    if model is None or math.isnan(draft):
        return draft
    return timer.reading_seconds(model, row, repeats) + draft

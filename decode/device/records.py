"""From a step's numbers to the records that policies learn from."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from decode.device.members import Members
from decode.device.rows import DeviceRow, QueuedStep, RowStep
from decode.device.state import DONE, DRAFTED, NANO, START
from decode.types import OFF, StepRecord
from kernels.step_state import (
    ACCEPTED,
    BROKEN,
    EMITTED,
    FAILED,
    LENGTH,
    LIMIT,
    LOOKUP,
    MODEL,
    NONE,
    NUM_FIELDS,
    NUM_MOMENTS,
    OPENED,
    READ,
    READING,
    SOURCE,
)
from kernels.step_state import DRAFTED as NUM_DRAFTED


@dataclass(frozen=True, slots=True)
class RowResult:
    """What became of one row."""

    numbers: Sequence[int]

    @property
    def token_ids(self) -> list[int]:
        return list(self.numbers[NUM_FIELDS : NUM_FIELDS + self.numbers[EMITTED]])

    @property
    def broken(self) -> bool:
        return bool(self.numbers[BROKEN])

    @property
    def failed(self) -> bool:
        return bool(self.numbers[FAILED])

    @property
    def model_read(self) -> int | None:
        """Verified tokens that the model has read; None where it did not draft."""
        n = self.numbers
        if n[SOURCE] != MODEL:
            return None
        return n[LENGTH] + min(n[NUM_DRAFTED] - 1, n[ACCEPTED])

    @property
    def prefill_seconds(self) -> float:
        return (self.numbers[READ] - self.numbers[OPENED]) / NANO


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Where a step's time went, by the device's clock."""

    draft: float
    verify: float
    host: float  # the device waited, or read prompts, since the step before


def row_results(step: QueuedStep, numbers: Sequence[int]) -> list[RowResult]:
    """Each row's numbers."""
    size = NUM_FIELDS + step.num_drafts + 1
    return [RowResult(numbers[b * size : (b + 1) * size]) for b in range(len(step.rows))]


def step_seconds(
    step: QueuedStep, numbers: Sequence[int], results: Sequence[RowResult], ended: int | None
) -> tuple[StepSeconds, int]:
    """The step's seconds, and when it ended; `ended`: when the step before did."""
    moments = numbers[-NUM_MOMENTS:]
    start = moments[READING] if step.read_ahead else moments[START]
    waited = 0.0 if ended is None or not step.continues else (start - ended) / NANO
    for row, result in zip(step.rows, results, strict=True):
        waited -= 0.0 if row.records else result.prefill_seconds
    seconds = StepSeconds(
        draft=(moments[DRAFTED] - start) / NANO,
        verify=(moments[DONE] - moments[DRAFTED]) / NANO,
        host=max(waited, 0.0),
    )
    return seconds, moments[DONE]


def draft_shares(steps: Sequence[RowStep], seconds: float) -> list[float]:
    """Seconds of drafting by row: a model's are shared by the rows that it was to draft for."""
    drafting = [one.limit > 0 for one in steps]
    if any(one.model is not None for one in steps):
        drafting = [one.model is not None for one in steps]
    count = sum(drafting)
    return [seconds / count if drafts else 0.0 for drafts in drafting]


def make_record(
    row: DeviceRow,
    step: RowStep,
    result: RowResult,
    num_emitted: int,
    members: Members,
    draft_seconds: float,
    verify_seconds: float,
    host_seconds: float,
) -> StepRecord:
    """The record of one row; `row.token_ids` hold what it emitted already."""
    n, choice = result.numbers, step.choice
    asked = n[NUM_DRAFTED] if n[SOURCE] == LOOKUP else n[LIMIT]
    if result.failed:
        choice = replace(choice, reason="drafter dropped")
    if choice.drafter != OFF and asked == 0:
        choice = replace(choice, drafter=OFF, num_draft_tokens=0, reason="nothing offered")
    drew = n[SOURCE] != NONE and choice.drafter != OFF
    return StepRecord(
        request_id=row.request.request_id,
        step=len(row.records),
        position=len(row.token_ids) - num_emitted,
        drafter=choice.drafter,
        source=members.source(choice.drafter, n[SOURCE]) if drew else "",
        num_draft_tokens=asked,
        num_drafted=n[NUM_DRAFTED],
        num_accepted=n[ACCEPTED],
        num_emitted=num_emitted,
        draft_seconds=draft_seconds,
        verify_seconds=verify_seconds,
        host_seconds=host_seconds,
        reason=choice.reason,
        expected_tokens=choice.expected_tokens,
        expected_seconds=choice.expected_seconds,
    )

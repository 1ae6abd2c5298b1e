"""What a step costs on this machine: measured seconds of drafting, scoring and the rest, and the
arithmetic on them.

A step of arm (drafter, K) takes draft(drafter, K) + verify(K + 1 columns) + host seconds; plain
decoding takes verify(1) + host. Tables are measured at a few sizes and interpolated between them.
"""

import hashlib
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from decode.clock import Clock
from decode.types import MAX_DRAFT_TOKENS, OFF, Drafter, DraftSession, Target

SCHEMA = 1
GROWTH = 2  # tokens by which a measured row grows between two proposals, as an accepted step would
SYNTHETIC_PERIOD = 23  # tokens after which the repeating synthetic context repeats


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of every part of a step; NaN where a part could not be measured."""

    key: str  # the machine and target it holds for
    verify_seconds: Mapping[int, float]  # by width: tokens read in one target pass, K + 1
    draft_seconds: Mapping[str, Mapping[int, float]]  # by drafter, by number of tokens drafted
    host_seconds: float  # the rest of a step: policy, bookkeeping
    first_token_seconds: Mapping[str, float] = field(
        default_factory=dict
    )  # fresh row of context_tokens -> 1 draft
    memory_bytes: Mapping[str, int] = field(default_factory=dict)  # a drafter's own weights
    context_tokens: int = 0  # verified tokens in the rows that were measured

    def verify(self, width: int) -> float:
        """Seconds of one target pass over `width` tokens, verification included."""
        return interpolate(self.verify_seconds, width)

    def draft(self, drafter: str, num_draft_tokens: int) -> float:
        """Seconds in which the drafter proposes; 0 for no tokens."""
        if num_draft_tokens == 0:
            return 0.0
        if drafter not in self.draft_seconds:
            raise ValueError(
                f"the costs know no drafter {drafter!r} (they know "
                f"{', '.join(sorted(self.draft_seconds)) or 'none'}); "
                "run stage=profile for this pool"
            )
        return interpolate(self.draft_seconds[drafter], num_draft_tokens)

    def step_seconds(self, drafter: str, num_draft_tokens: int) -> float:
        """Seconds of one step of an arm; those of plain decoding for OFF."""
        if drafter == OFF or num_draft_tokens == 0:
            return self.plain_seconds
        draft = self.draft(drafter, num_draft_tokens)
        return draft + self.verify(num_draft_tokens + 1) + self.host_seconds

    @property
    def plain_seconds(self) -> float:
        """Seconds of one plain decoding step, which emits one token."""
        return self.verify(1) + self.host_seconds

    def break_even_length(self, drafter: str, num_draft_tokens: int) -> float:
        """The acceptance_length at which the arm is as fast as plain decoding."""
        return self.step_seconds(drafter, num_draft_tokens) / self.plain_seconds

    def catch_up_seconds(self, drafter: str, num_tokens: int) -> float:
        """Seconds a drafter needs to read tokens that it has not seen; 0 where that was not
        measured.
        """
        first = self.first_token_seconds.get(drafter, math.nan)
        if not math.isfinite(first) or self.context_tokens == 0:
            return 0.0
        return max(first - self.draft(drafter, 1), 0.0) * num_tokens / self.context_tokens

    def to_json(self) -> str:
        """The costs as JSON text; NaN as null."""
        return json.dumps({"schema": SCHEMA, **_plain(asdict(self))}, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str, *, key: str | None = None) -> "Costs":
        """Read to_json() back. Raises ValueError where `key` is given and the costs hold for
        another one.
        """
        values = json.loads(text)
        if values.pop("schema", None) != SCHEMA:
            raise ValueError("the costs were written by another version; run stage=profile again")
        if key is not None and values["key"] != key:
            raise ValueError(
                f"the costs were measured for {values['key']!r} but this is {key!r}; run "
                "stage=profile on this machine"
            )
        values["verify_seconds"] = _table(values["verify_seconds"])
        values["draft_seconds"] = {name: _table(t) for name, t in values["draft_seconds"].items()}
        values["first_token_seconds"] = {
            n: _number(s) for n, s in values["first_token_seconds"].items()
        }
        values["host_seconds"] = _number(values["host_seconds"])
        return cls(**values)


def interpolate(table: Mapping[int, float], size: int) -> float:
    """Linear between measured sizes, flat below the first, the last slope (never negative) above
    the last.
    """
    if size in table:
        return table[size]
    sizes = sorted(table)
    if not sizes:
        return math.nan
    if size < sizes[0]:
        return table[sizes[0]]
    for low, high in pairwise(sizes):
        if size < high:
            return table[low] + (table[high] - table[low]) * (size - low) / (high - low)
    slope = 0.0
    if len(sizes) > 1:
        slope = (table[sizes[-1]] - table[sizes[-2]]) / (sizes[-1] - sizes[-2])
    return table[sizes[-1]] + max(slope, 0.0) * (size - sizes[-1])


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(child) for name, child in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _table(values: Mapping[str, float | None]) -> dict[int, float]:
    return {int(size): _number(seconds) for size, seconds in values.items()}


# ------------------------------------------------------------------------------------------- measur


def costs_key(target: Target) -> str:
    """What costs hold for, in words: processor, threads, backend, and the target's size and
    type.
    """
    device = torch.device(target.device)
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    else:
        machine = f"{_processor()} x{torch.get_num_threads()}"
    model = getattr(target, "model", None)
    parameters = [] if model is None else list(model.parameters())
    shape = [f"{tuple(p.shape)} {p.dtype}" for p in parameters]
    shape += [f"{target.vocab_size} {target.max_context}"]
    digest = hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:8]
    return f"{machine}, {target.backend}, target {digest}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [line for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return (
        names[0].split(":", 1)[1].strip() if names else platform.processor() or platform.machine()
    )


def measure_costs(
    target: Target,
    drafters: Mapping[str, Drafter],
    clock: Clock,
    widths: Sequence[int],
    draft_lengths: Sequence[int],
    context_tokens: int,
    repeats: int,
    contexts: Sequence[Sequence[int]] | None = None,
) -> Costs:
    """Medians over `repeats` rounds, sizes interleaved within a round so that a slow moment hits
    all alike.

    `contexts` are token ids of real text, each cut to `context_tokens`; without them a synthetic
    row that repeats itself and one that does not are used. A drafter's seconds are the mean over
    contexts of its medians.
    """
    given = [list(context)[:context_tokens] for context in contexts or []]
    rows = [row for row in given if len(row) >= 2] or synthetic_contexts(
        target.vocab_size, context_tokens
    )
    timer = _Timer(clock, target.device)
    drafting = {
        name: _measure_drafter(d, rows, timer, draft_lengths, repeats)
        for name, d in drafters.items()
    }
    scored = _measure_target(target, rows[0], timer, sorted({1, *widths}), repeats)
    return Costs(
        key=costs_key(target),
        verify_seconds=scored,
        draft_seconds={name: table for name, (table, _) in drafting.items()},
        host_seconds=_measure_host(timer, repeats),
        first_token_seconds={name: first for name, (_, first) in drafting.items()},
        memory_bytes={name: d.memory_bytes for name, d in drafters.items()},
        context_tokens=round(fmean(len(row) for row in rows)),
    )


def quick_costs(target: Target, drafters: Mapping[str, Drafter], clock: Clock) -> Costs:
    """A rough measurement in a second or two, for a decoder that was given none."""
    sizes = [1, 4, MAX_DRAFT_TOKENS]
    length = min(64, target.max_context - MAX_DRAFT_TOKENS - 1)
    return measure_costs(target, drafters, clock, [k + 1 for k in sizes], sizes, length, repeats=3)


def synthetic_contexts(vocab_size: int, num_tokens: int) -> list[list[int]]:
    """Two rows: one that repeats itself, so that lookup matches, and one that does so as little as
    it can.
    """
    ids = [(i * 7919 + 13) % vocab_size for i in range(num_tokens)]
    return [[ids[i % min(SYNTHETIC_PERIOD, num_tokens)] for i in range(num_tokens)], ids]


class _Timer:
    """Reads the clock after the device has finished, so that queued kernels are counted."""

    def __init__(self, clock: Clock, device: str) -> None:
        self.clock = clock
        self.cuda = torch.device(device).type == "cuda"
        self.device = device

    def now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize(self.device)
        return self.clock.now()


class _Greedy:
    """Draws the maximum; the measured work of a drafter is its own."""

    greedy = True

    def draw(self, logits: Tensor) -> int:
        return int(logits.argmax())


def _measure_target(
    target: Target, row: Sequence[int], timer: _Timer, widths: Sequence[int], repeats: int
) -> dict[int, float]:
    widths = [width for width in widths if len(row) - 1 + width <= target.max_context]
    session = target.open()
    target.prefill(session, row[:-1])
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    for turn in range(repeats + 1):  # the first turn warms up
        for width in widths:
            tokens = [row[(len(row) - 1 + i) % len(row)] for i in range(width)]
            start = timer.now()
            logits = target.score([session], [tokens])
            logits.argmax(-1).tolist()  # verification reads its answer back too
            end = timer.now()
            target.rollback(session, len(row) - 1)
            if turn:
                seconds[width].append(end - start)
    return {width: median(values) for width, values in seconds.items()}


def _measure_drafter(
    drafter: Drafter,
    rows: Sequence[Sequence[int]],
    timer: _Timer,
    lengths: Sequence[int],
    repeats: int,
) -> tuple[dict[int, float], float]:
    """Seconds by number of tokens (NaN where it never proposed), and seconds to a fresh row's first
    draft.
    """
    measured = [_measure_row(drafter, row, timer, lengths, repeats) for row in rows]
    tables = [table for table, _ in measured]
    mean = {
        k: fmean(found) if (found := [t[k] for t in tables if k in t]) else math.nan
        for k in lengths
    }
    return mean, median(first for _, first in measured)


def _measure_row(
    drafter: Drafter, row: Sequence[int], timer: _Timer, lengths: Sequence[int], repeats: int
) -> tuple[dict[int, float], float]:
    firsts = [_propose(drafter.open(), row, 1, timer)[0] for _ in range(min(repeats, 3) + 1)][1:]
    seconds: dict[int, list[float]] = {k: [] for k in lengths}
    session, length = drafter.open(), len(row)
    for turn in range(repeats + 1):  # the first turn warms up
        for k in lengths:
            length += GROWTH
            if length > len(row):  # a row only grows, so begin again with a fresh one
                session, length = drafter.open(), len(row) // 2 + 1
                _propose(session, row[:length], 1, timer)
            spent, num_drafted = _propose(session, row[:length], k, timer)
            if turn and num_drafted:
                seconds[k].append(spent)
    return {k: median(values) for k, values in seconds.items() if values}, median(firsts)


def _propose(session: DraftSession, row: Sequence[int], k: int, timer: _Timer) -> tuple[float, int]:
    start = timer.now()
    proposal = session.propose(row, k, _Greedy())
    return timer.now() - start, len(proposal.token_ids)


def _measure_host(timer: _Timer, repeats: int) -> float:
    """What reading the clock at every part of a step costs; the decoder's own records say the
    rest.
    """
    seconds = []
    for _ in range(repeats + 1):
        start = timer.now()
        seconds.append(timer.now() - start)
    return median(seconds)

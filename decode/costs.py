"""What a step costs: seconds of drafting, scoring and the rest, and the arithmetic on them.

A step of arm (drafter, K) takes draft(drafter, K) + verify(K + 1 columns) + host seconds; plain
decoding takes verify(1) + host. Tables hold a few sizes, measured on one machine by
`decode.cost_measurement`, and are interpolated between them.
"""

import hashlib
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from decode.types import OFF, Sampling, Target

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of every part of a step; NaN where a part could not be measured."""

    key: str  # the machine and target it holds for
    verify_seconds: Mapping[int, float]  # by width: tokens read in one target pass, K + 1
    draft_seconds: Mapping[str, Mapping[int, float]]  # by drafter, by number of tokens drafted
    host_seconds: float  # the rest of a step: policy, bookkeeping
    # the same two tables where tokens are sampled: laws over the vocabulary cost time; empty: as
    # greedy
    sampled_verify_seconds: Mapping[int, float] = field(default_factory=dict)
    sampled_draft_seconds: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    first_token_seconds: Mapping[str, float] = field(
        default_factory=dict
    )  # fresh row of context_tokens -> 1 draft
    memory_bytes: Mapping[str, int] = field(default_factory=dict)  # a drafter's own weights
    context_tokens: int = 0  # verified tokens in the rows that were measured

    def under(self, sampling: Sampling) -> "Costs":
        """The costs that hold under a law: these for a greedy one, the sampled tables for
        others.
        """
        if sampling.greedy or not self.sampled_verify_seconds:
            return self
        return replace(
            self,
            verify_seconds=self.sampled_verify_seconds,
            draft_seconds=self.sampled_draft_seconds,
        )

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
        for law in ("", "sampled_"):
            verify, draft = f"{law}verify_seconds", f"{law}draft_seconds"
            values[verify] = _table(values[verify])
            values[draft] = {name: _table(table) for name, table in values[draft].items()}
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


def costs_key(target: Target) -> str:
    """What costs hold for, in words: processor, threads, backend, and the target's size and
    type.
    """
    device = torch.device(target.device)
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    else:
        machine = f"{_processor()} x{torch.get_num_threads()}"
    shape = getattr(target, "parameter_shapes", None)  # asking for its model might make a copy
    if shape is None:
        model = getattr(target, "model", None)
        parameters = [] if model is None else list(model.parameters())
        shape = [f"{tuple(p.shape)} {p.dtype}" for p in parameters]
    exactness = getattr(target, "exactness", None)
    backend = f"{target.backend} {exactness}" if exactness else target.backend
    shape = [*shape, f"{target.vocab_size} {target.max_context}"]
    digest = hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:8]
    return f"{machine}, {backend}, target {digest}"


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

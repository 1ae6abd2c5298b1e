"""What the host decides for one step, in one tensor that one copy takes to the device."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from decode.device.parts import DeviceLookup
from decode.types import Sampling
from kernels.race import Key
from kernels.step_state import Asked

LAW = ("temperature", "top_p", "min_p", "repetition_penalty")  # float64; top_k is a whole number
WHOLE = ("slots", "there", "limits", "lookups", "models", "model_slots", "read", "top_k")
NO_KEY: Key = (0, 0)
CATCH_UPS = (2, 8, 32)  # tokens of a model's first pass; the largest holds two whole steps


@dataclass(frozen=True)
class Rules:
    """Which processors some row of a step asks for: what none asks for costs nothing."""

    greedy: bool  # every row is
    gumbel: bool
    top_k: bool
    top_p: bool
    min_p: bool
    penalty: bool

    @classmethod
    def of(cls, samplings: Sequence[Sampling], gumbel: bool) -> "Rules":
        """What these rows need."""
        drawn = [law for law in samplings if not law.greedy]
        return cls(
            greedy=not drawn,
            gumbel=gumbel and bool(drawn),
            top_k=any(law.top_k for law in drawn),
            top_p=any(law.top_p < 1 for law in drawn),
            min_p=any(law.min_p > 0 for law in drawn),
            penalty=any(law.repetition_penalty != 1 for law in samplings),
        )


@dataclass(frozen=True)
class Shape:
    """All that a step's launches depend on: equal shapes are one captured graph."""

    num_rows: int
    most_drafts: int  # K, columns of the draft
    model: int | None  # which model drafts, by number
    model_drafts: int  # tokens that it drafts at most
    catch_up: int  # tokens of its first pass
    lookups: tuple[DeviceLookup, ...]
    rules: Rules

    def holds(self, other: "Shape") -> bool:
        """Whether a step of this shape can do what one of the other does."""
        return (
            self.num_rows == other.num_rows
            and self.most_drafts >= other.most_drafts
            and other.model in (None, self.model)
            and self.model_drafts >= other.model_drafts
            and self.catch_up >= other.catch_up
            and set(self.lookups) >= set(other.lookups)
            and self.rules == other.rules
        )


@dataclass(frozen=True)
class RowPlan:
    """One row of a step."""

    slot: int
    sampling: Sampling
    limit: int = 0  # tokens to draft at most
    lookup: int = -1  # of the shape's lookups; -1: none
    by_model: bool = False
    model_slot: int = 0
    read: int = 0  # tokens that the model has read at least
    uniforms: Sequence[float] = ()  # K + 1, that of the recovered or bonus token first
    draft_uniforms: Sequence[float] = ()
    key: Key = NO_KEY


@dataclass(frozen=True)
class Plan:
    """The tensor, and views of its parts; rows past those given are padding."""

    shape: Shape
    words: Tensor  # int64, floats bit for bit
    _places: dict[str, slice] = field(repr=False)

    @classmethod
    def new(cls, shape: Shape, device: torch.device) -> "Plan":
        """One for steps of a shape, at an address of its own."""
        places = _layout(shape)
        size = max(place.stop for place in places.values())
        with torch.inference_mode(False):  # so that it can be filled in any mode
            words = torch.zeros(size, dtype=torch.int64, device=device)
        return cls(shape, words, places)

    def fill(self, rows: Sequence[RowPlan]) -> None:
        """Say what the next step does; one copy to the device, which nobody waits for."""
        numbers = np.zeros(len(self.words), np.int64)
        floats = numbers.view(np.float64)
        most, count = self.shape.most_drafts, len(rows)
        for name in LAW:
            floats[self._places[name]] = 1.0
            floats[self._places[name]][:count] = [getattr(row.sampling, name) for row in rows]
        uniforms = floats[self._places["uniforms"]].reshape(-1, most + 1)
        drafting = floats[self._places["draft_uniforms"]].reshape(-1, self._stride)
        keys = numbers[self._places["keys"]].reshape(-1, 3).view(np.uint64)
        for b, row in enumerate(rows):
            if row.uniforms:
                uniforms[b] = [*row.uniforms[1 : most + 1], row.uniforms[0]]
            drafting[: len(row.draft_uniforms), b] = row.draft_uniforms
            keys[b, :2] = row.key
        columns = np.array([_whole(row) for row in rows], np.int64).T
        for name, column in zip(WHOLE, columns, strict=True):
            numbers[self._places[name]][:count] = column
        given = torch.from_numpy(numbers)
        if self.words.is_cuda:
            given = given.pin_memory()
        self.words.copy_(given, non_blocking=True)

    @cached_property
    def asked(self) -> Asked:
        return Asked(*(self._whole(name) for name in WHOLE[:-1]))

    @cached_property
    def law(self) -> dict[str, Tensor | None]:
        """Parameters [B] as verification names them; None where no row asks for one."""
        rules, floats = self.shape.rules, {name: self._floats(name) for name in LAW}
        return {
            "temperature": floats["temperature"],
            "top_k": self._whole("top_k") if rules.top_k else None,
            "top_p": floats["top_p"] if rules.top_p else None,
            "min_p": floats["min_p"] if rules.min_p else None,
            "repetition_penalty": floats["repetition_penalty"] if rules.penalty else None,
        }

    @cached_property
    def uniforms(self) -> Tensor:  # [B, K + 1] float64, as verification wants them
        return self.words[self._places["uniforms"]].view(torch.float64).view(self._rows, -1)

    @cached_property
    def race_words(self) -> Tensor:  # [B, 3] int64: a key and a place, which the device fills in
        return self.words[self._places["keys"]].view(self._rows, 3)

    def draft_uniforms(self, depth: int) -> Tensor:  # [B, 1] float64
        start = self._places["draft_uniforms"].start + depth * self._stride
        return self.words[start : start + self._rows].view(torch.float64).view(-1, 1)

    @property
    def _rows(self) -> int:
        return self.shape.num_rows

    @property
    def _stride(self) -> int:
        return _even(self.shape.num_rows)

    def _floats(self, name: str) -> Tensor:
        return self._whole(name).view(torch.float64)

    def _whole(self, name: str) -> Tensor:
        return self.words[self._places[name]][: self._rows]


def _whole(row: RowPlan) -> tuple[int, ...]:
    """Its numbers in the order of WHOLE."""
    by_model, top_k = int(row.by_model), row.sampling.top_k
    return row.slot, 1, row.limit, row.lookup, by_model, row.model_slot, row.read, top_k


def _layout(shape: Shape) -> dict[str, slice]:
    """Where each part lies: parts begin at multiples of 16 bytes, as kernels like it."""
    rows = shape.num_rows
    sizes = dict.fromkeys((*LAW, *WHOLE), rows)
    sizes["keys"] = 3 * rows
    sizes["uniforms"] = rows * (shape.most_drafts + 1)
    sizes["draft_uniforms"] = shape.model_drafts * _even(rows)
    places, start = {}, 0
    for name, size in sizes.items():
        places[name] = slice(start, start + size)
        start += _even(size)
    return places


def _even(number: int) -> int:
    return number + number % 2

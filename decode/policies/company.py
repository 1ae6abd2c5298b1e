"""What rows that are decoded side by side draft, weighed against each other: they share one pass.

Alone a row asks what its draft adds to a pass that is bound by the weights it reads. Beside others
the pass is bound by arithmetic, and every drafted token costs all rows time. So the rows' wishes
are cut to the drafts that give most tokens a second together. What a pass takes is one row's
profile, continued in a line over the positions of all rows, and corrected by every pass. (One
length for all rows, by a model of the pass, is arXiv 2406.14066's; here rows keep their own.)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from decode.policies.base import off
from decode.policies.belief import Floats
from decode.policies.pricing import PLAUSIBLE
from decode.types import Choice, Sharing

REASON = "company"  # of a choice that was cut, or given up, for the sake of all rows
AWAIT = 2  # steps until what a probe has shown is known; on the device that is one later
LONGEST_REST = 8  # times the first
SIZES_AN_OCTAVE = 4  # of passes that are told apart

Lengths = NDArray[np.intp]


class PassSeconds:
    """Seconds of a target's pass by the positions that it computes for all rows."""

    def __init__(self, profile: Mapping[int, float], memory: float) -> None:
        self._sizes = np.array(sorted(profile), dtype=float)
        self._seconds = np.array([profile[size] for size in sorted(profile)])
        rise = self._seconds[-1] - self._seconds[0]
        self._slope = max(rise / max(self._sizes[-1] - self._sizes[0], 1), 0.0)
        self._memory = memory  # weight of a pass in the correction of its size
        # By size, on a scale of logarithms: what passes took over what the profile says, and how
        # many of them were counted.
        self._ratio = {_size(size): 1.0 for size in self._sizes}
        self._counted = dict.fromkeys(self._ratio, 0)

    def __call__(self, positions: Floats) -> Floats:
        """Of passes over so many; between sizes that were seen, corrected by both."""
        known = sorted(self._ratio)
        ratios = [self._ratio[size] for size in known]
        correction = np.interp(SIZES_AN_OCTAVE * np.log2(positions), known, ratios)
        return self._profiled(positions) * correction

    def observe(self, positions: int, seconds: float) -> None:
        """Take in a pass; the first of a size warms it up and does not count."""
        size, exact = _size(positions), np.array([float(positions)])
        counted = self._counted[size] = self._counted.get(size, -1) + 1
        if counted == 0 or not (math.isfinite(seconds) and seconds > 0):
            return
        profiled, believed = float(self._profiled(exact)[0]), float(self(exact)[0])
        seconds = min(max(seconds, believed / PLAUSIBLE), believed * PLAUSIBLE)
        ratio = self._ratio.get(size, believed / profiled)
        self._ratio[size] = ratio + max(1 / counted, self._memory) * (seconds / profiled - ratio)

    def _profiled(self, positions: Floats) -> Floats:
        inside = np.interp(positions, self._sizes, self._seconds)
        return inside + self._slope * np.maximum(positions - self._sizes[-1], 0)


def _size(positions: float) -> int:
    return round(SIZES_AN_OCTAVE * math.log2(positions))


@dataclass(frozen=True, slots=True)
class Wish:
    """What one row would draft were it alone."""

    choice: Choice
    tokens: Floats  # [D + 1] that a step emits on average, by the length of the draft
    draft_seconds: Floats  # [D + 1]


@dataclass(frozen=True, slots=True)
class Cuts:
    """Ways to cut the rows' wishes, by number; 0 leaves nothing."""

    tokens: Floats  # [C] of all rows
    positions: Floats  # [C] of the pass
    draft_seconds: Floats  # [C]
    lengths: Callable[[int], Lengths]  # [B] of one way


class Company:
    """Settles what rows draft together; where nothing pays they rest, and now and then one step
    tries again.
    """

    def __init__(self, seconds: PassSeconds, first_rest: int) -> None:
        self.seconds = seconds
        self._first_rest = self._next_rest = first_rest  # steps; 0: every step is settled anew
        self._left, self._rested, self._size = 0, False, 0

    def rests(self, num_rows: int) -> bool:
        """Whether nothing is drafted in this step, whatever the rows wish; a rest ends early where
        there are half or twice as many rows.
        """
        if num_rows.bit_length() != self._size:
            self._size, self._left = num_rows.bit_length(), 0
            self._next_rest, self._rested = self._first_rest, False
        self._left -= 1
        return self._left >= 0

    def settle(self, wishes: Sequence[Wish], sharing: Sharing) -> list[Choice]:
        """The rows' choices: their wishes, cut to what pays for all."""
        cuts = padded_cuts(wishes, sharing) if sharing.padded else packed_cuts(wishes)
        rates = cuts.tokens / (self.seconds(cuts.positions) + cuts.draft_seconds)
        best, reason = int(rates.argmax()), REASON
        if best:
            self._next_rest, self._rested = self._first_rest, False
        elif len(rates) > 1 and self._rested:
            best, reason = 1 + int(rates[1:].argmax()), "probe"
            self._left, self._rested = AWAIT, False
        elif self._first_rest:
            self._left, self._rested = self._next_rest, True
            self._next_rest = min(2 * self._next_rest, LONGEST_REST * self._first_rest)
        lengths = cuts.lengths(best)
        return [_cut(wish, int(k), reason) for wish, k in zip(wishes, lengths, strict=True)]


def padded_cuts(wishes: Sequence[Wish], sharing: Sharing) -> Cuts:
    """All rows to one length at most, for passes that are as wide as their widest row."""
    wanted = np.array([wish.choice.num_draft_tokens for wish in wishes])
    widths = np.arange(wanted.max(initial=0) + 1)
    lengths = np.minimum(wanted, widths[:, None])  # [C, B]
    rows = np.arange(len(wishes))
    tokens = np.array([wish.tokens for wish in wishes])[rows, lengths]
    drafting = np.array([wish.draft_seconds for wish in wishes])[rows, lengths]
    return Cuts(
        tokens.sum(axis=1),
        len(wishes) * (widths + 1.0),
        drafting.max(axis=1) if sharing.drafts_together else drafting.sum(axis=1),
        lambda number: lengths[number],
    )


def packed_cuts(wishes: Sequence[Wish]) -> Cuts:
    """The drafted tokens of all rows, most likely first, for passes over nothing else."""
    gains, seconds, owners = [], [], []
    for row, wish in enumerate(wishes):
        wanted = wish.choice.num_draft_tokens
        gains.append(np.diff(wish.tokens[: wanted + 1]))
        seconds.append(np.diff(wish.draft_seconds[: wanted + 1]))
        owners.append(np.full(wanted, row))
    gain, owner = np.concatenate(gains), np.concatenate(owners)
    order = np.argsort(-gain, kind="stable")  # a row's tokens stay in order: each gains less
    drafting = np.concatenate(seconds)[order].cumsum()
    return Cuts(
        len(wishes) + np.append(0.0, gain[order].cumsum()),
        len(wishes) + np.arange(len(order) + 1.0),
        np.append(0.0, drafting),
        lambda number: np.bincount(owner[order[:number]], minlength=len(wishes)),
    )


def _cut(wish: Wish, length: int, reason: str) -> Choice:
    choice = wish.choice
    if length == choice.num_draft_tokens:
        return replace(choice, reason=reason) if reason == "probe" and length else choice
    if length == 0:
        return off(reason)
    tokens = float(wish.tokens[length])
    return replace(choice, num_draft_tokens=length, reason=reason, expected_tokens=tokens)

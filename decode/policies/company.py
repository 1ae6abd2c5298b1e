"""What rows that are decoded side by side draft, weighed against each other: they share one pass.

Alone a row asks what its draft adds to a pass that is bound by the weights it reads. Beside others
the pass is bound by arithmetic, and every drafted token costs all rows time. So the rows' wishes
are cut to the drafts that give most tokens a second together, by what passes have taken so far.
(One length for all rows, by a model of the pass, is arXiv 2406.14066's; here rows keep their own,
and the model learns from every pass.)
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from decode.policies.base import NOTHING_OFFERED, off
from decode.policies.belief import Floats
from decode.policies.pricing import PLAUSIBLE
from decode.types import Choice, Sharing

REASON = "company"  # of a choice that was cut, or given up, for the sake of all rows
AWAIT = 2  # steps until what a probe has shown is known; on the device that is one later
FIRST_REST, LONGEST_REST = 2, 8  # steps; times the steps between probes
PLAIN_PASSES = 3  # without drafts, before the first of about so many rows with them
NOISE = 0.1  # of a pass's seconds, as a share
SPREAD = (0.5, 0.1, 0.1)  # of the terms before any pass, in passes over one token
WIDEST = 0.25  # share of it that they are forgotten to
LEAST = 0.1  # of the profile's pass over one token: no pass takes less

Lengths = NDArray[np.intp]


class PassSeconds:
    """Seconds of the target's pass: so many, so many a row and so many a drafted token.

    The three are a Gaussian belief, begun at the profile of one row and corrected by every pass.
    Before each it gets a little wider, but never as wide as it was at first: so it follows a
    machine that changes, and what passes do not show stays as it was.
    """

    def __init__(self, profile: Mapping[int, float], memory: float) -> None:
        measured = [width for width in profile if math.isfinite(profile[width])]
        first, last = min(measured), max(measured)
        self._unit = profile[first]  # seconds; all else is in passes over one token
        slope = max(profile[last] / self._unit - 1, 0.0) / max(last - first, 1)
        self._memory = memory
        self._terms: Floats = np.array([1 - slope, slope, slope])
        self._precision: Floats = np.diag(1 / np.square(SPREAD))  # [3, 3]
        self._least = self._precision / WIDEST**2  # that is forgotten to

    def __call__(self, num_rows: int, drafted: Floats) -> Floats:
        """Of passes that compute so many drafted tokens in all rows, padding among them."""
        fixed, row, token = self._terms
        passes = fixed + num_rows * max(row, 0.0) + drafted * max(token, 0.0)
        return self._unit * np.maximum(passes, LEAST)

    def observe(self, num_rows: int, drafted: int, seconds: float) -> None:
        """Take in a pass; one that took far more or less than was believed only goes a part of
        the way.
        """
        believed = float(self(num_rows, np.array([drafted]))[0])
        if not math.isfinite(seconds):
            return
        seconds = min(max(seconds, believed / PLAUSIBLE), believed * PLAUSIBLE)
        size = np.array([1.0, num_rows, drafted])
        weight = (NOISE * believed / self._unit) ** -2
        kept = (1 - self._memory) * self._precision + self._memory * self._least
        self._precision = kept + weight * np.outer(size, size)
        error = seconds / self._unit - size @ self._terms
        self._terms = self._terms + np.linalg.solve(self._precision, weight * error * size)


@dataclass(frozen=True, slots=True)
class Wish:
    """What one row would draft, did the pass take no longer for it."""

    choice: Choice
    tokens: Floats  # [D + 1] that a step emits on average, by the length of the draft
    draft_seconds: Floats  # [D + 1] of steps in which all rows draft as this one does


@dataclass(frozen=True, slots=True)
class Cuts:
    """Ways to cut the rows' wishes, by number; 0 leaves nothing."""

    tokens: Floats  # [C] of all rows
    drafted: Floats  # [C] tokens that the pass computes besides one a row
    draft_seconds: Floats  # [C]
    lengths: Callable[[int], Lengths]  # [B] of one way


class Company:
    """Settles what rows draft together; where nothing pays they rest, and now and then one step
    tries again.
    """

    def __init__(self, seconds: PassSeconds, probe_every: int) -> None:
        self.seconds = seconds
        self._probe_every = probe_every  # steps without drafts at least; 0: never, and no rests
        self._left, self._num_rows = 0, 0
        self._rested, self._next_rest = 0, FIRST_REST  # steps of the last rest, and of the next
        self._passes: Counter[int] = Counter()  # by about how many rows

    def rests(self, num_rows: int) -> bool:
        """Whether nothing is drafted in this step, whatever the rows wish; a rest ends early where
        there are half or twice as many rows. All else is held against plain passes, so the first
        ones are plain.
        """
        if not self._num_rows < 2 * num_rows < 4 * self._num_rows:
            self._num_rows, self._left = num_rows, 0
            self._rested, self._next_rest = 0, FIRST_REST
        self._left -= 1
        return self._left >= 0 or self._passes[num_rows.bit_length()] < PLAIN_PASSES

    def settle(self, wishes: Sequence[Wish], sharing: Sharing) -> list[Choice]:
        """The rows' choices: their wishes, cut to what pays for all."""
        cuts = padded_cuts(wishes, sharing) if sharing.padded else packed_cuts(wishes)
        rates = cuts.tokens / (self.seconds(len(wishes), cuts.drafted) + cuts.draft_seconds)
        best, reason = int(rates.argmax()), REASON
        if best:
            self._rested, self._next_rest = 0, FIRST_REST
        elif len(rates) > 1 and self._rested >= self._probe_every > 0:
            best, reason = 1 + int(rates[1:].argmax()), "probe"
            self._left, self._rested = AWAIT, 0
        elif self._probe_every and any(wish.choice.reason != NOTHING_OFFERED for wish in wishes):
            self._left = self._rested = self._next_rest
            self._next_rest = min(2 * self._next_rest, LONGEST_REST * self._probe_every)
        lengths = cuts.lengths(best)
        return [_cut(wish, int(k), reason) for wish, k in zip(wishes, lengths, strict=True)]

    def observe(self, num_rows: int, num_positions: int, seconds: float) -> None:
        """Take in a pass over so many positions in all rows."""
        size = num_rows.bit_length()
        self._passes[size] += 1
        if self._passes[size] > 1:  # the first warms up
            self.seconds.observe(num_rows, num_positions - num_rows, seconds)


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
        len(wishes) * widths.astype(float),
        drafting.max(axis=1) if sharing.drafts_together else drafting.mean(axis=1),
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
    drafting = np.concatenate(seconds)[order].cumsum() / len(wishes)
    return Cuts(
        len(wishes) + np.append(0.0, gain[order].cumsum()),
        np.arange(len(order) + 1.0),
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

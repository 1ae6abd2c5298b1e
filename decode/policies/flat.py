"""Flat arms: every (drafter, K) and OFF an unrelated arm, its reward the tokens per second of a
step.

This is what bandits from the literature do; it is kept as the baseline of the policies that price
arms. The mean of per-step rates is not the rate of the totals, and K = 3 learns nothing about K =
5.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from decode.policies.pricing import PriceList
from decode.types import MAX_DRAFT_TOKENS, OFF, Choice, StepRecord

OFF_ARM = (-1, 0)


class FlatArms:
    """Counts and sums of every arm; the state that one row or all rows share."""

    def __init__(self, prices: PriceList, lengths: Sequence[int], reward_cap: float) -> None:
        self.prices = prices
        self.arms = [OFF_ARM, *((i, k) for i in range(len(prices.drafters)) for k in lengths)]
        self.lengths = tuple(lengths)
        self.reward_cap = reward_cap  # this many times plain decoding is reward 1
        self.count = np.zeros(len(self.arms))
        self.total = np.zeros(len(self.arms))
        self.squares = np.zeros(len(self.arms))
        self.usable = np.array([self._priced(arm) for arm in self.arms])

    def eligible(self, offers: Mapping[str, int]) -> NDArray[np.int64]:
        """Arms that can be played: OFF, K up to the offer, and the shortest K, clamped, where the
        offer is shorter.
        """
        most = [min(offers.get(name, 0), MAX_DRAFT_TOKENS) for name in self.prices.drafters]
        return np.array(
            [
                place
                for place, (index, k) in enumerate(self.arms)
                if self.usable[place] and (index < 0 or self._fits(k, most[index]))
            ]
        )

    def choice(self, place: int, offers: Mapping[str, int], reason: str) -> Choice:
        """The arm as the decoder plays it; expected tokens follow from its mean reward."""
        index, k = self.arms[place]
        name = OFF if index < 0 else self.prices.drafters[index]
        k = min(k, offers[name]) if index >= 0 else 0
        seconds = self.prices.costs.step_seconds(name, k)
        tokens = math.nan
        if self.count[place]:
            tokens = (
                float(self.mean()[place])
                * self.reward_cap
                / self.prices.costs.plain_seconds
                * seconds
            )
        return Choice(name, k, reason, tokens, seconds)

    def mean(self) -> NDArray[np.float64]:
        """Mean reward of every arm, 0 where it was never played."""
        return self.total / np.maximum(self.count, 1)

    def learn(self, record: StepRecord) -> None:
        """Credit a step to its arm; an arm whose seconds are not a number is dropped."""
        place = self._place(record)
        if place is None:
            return
        if not (math.isfinite(record.seconds) and record.seconds > 0):
            if place:  # OFF always remains
                self.usable[place] = False
            self.prices.say(
                f"seconds of arm {place}",
                "arm %s took no finite time; it is dropped",
                self.arms[place],
            )
            return
        plain = 1 / self.prices.costs.plain_seconds
        reward = min(record.num_emitted / record.seconds / (self.reward_cap * plain), 1.0)
        self.count[place] += 1
        self.total[place] += reward
        self.squares[place] += reward**2

    def _priced(self, arm: tuple[int, int]) -> bool:
        index, k = arm
        return index < 0 or bool(np.isfinite(self.prices.draft[index, k] + self.prices.target[k]))

    def _fits(self, k: int, most: int) -> bool:
        return k <= most or (most > 0 and k == self.lengths[0])

    def _place(self, record: StepRecord) -> int | None:
        if record.drafter == OFF:
            return 0
        index = self.prices.index.get(record.drafter)
        if index is None:
            return None
        k = max((k for k in self.lengths if k <= record.num_draft_tokens), default=self.lengths[0])
        return self.arms.index((index, k))

"""Prices arms in seconds: E[N - lambda c], with the profile's costs corrected by what steps really
took.

N are the tokens of a step, c its seconds, lambda the tokens per second of the text so far: a second
spent here is lambda tokens not emitted elsewhere (Dinkelbach's form of tokens over seconds).
Everything is a function of the profile and of past records.
"""

import logging
import math
from collections.abc import Collection, Sequence
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from decode.costs import Costs
from decode.types import MAX_DRAFT_TOKENS, Sampling, StepRecord

log = logging.getLogger(__name__)
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
PLAUSIBLE = (
    4.0  # a step this many times slower or faster than expected is clipped: one hiccup is no trend
)
TIE = 1e-9  # scores closer than this are equal, and the smaller arm wins


class Prices:
    """The price lists of a policy: what an arm costs depends on whether tokens are sampled."""

    def __init__(self, costs: Costs, drafters: Sequence[str]) -> None:
        said: set[str] = set()
        self.costs, self.drafters = costs, tuple(drafters)
        self.greedy = PriceList(costs, drafters, said)
        sampled = costs.under(Sampling(temperature=1.0))
        self.sampled = self.greedy if sampled is costs else PriceList(sampled, drafters, said)

    def under(self, sampling: Sampling) -> "PriceList":
        """The prices that hold under a law."""
        return self.greedy if sampling.greedy else self.sampled


class PriceList:
    """The profile under one law as arrays: seconds by drafter and number of drafted tokens."""

    def __init__(self, costs: Costs, drafters: Sequence[str], said: set[str]) -> None:
        depths = range(MAX_DRAFT_TOKENS + 1)
        self.costs = costs
        self.drafters = tuple(drafters)
        self.index = {name: i for i, name in enumerate(self.drafters)}
        self.target: Floats = np.array(
            [costs.verify(k + 1) + costs.host_seconds for k in depths]
        )  # [D + 1]
        self.draft: Floats = np.array(
            [[costs.draft(n, k) for k in depths] for n in drafters]
        )  # [N, D + 1]
        self.draft = self.draft.reshape(len(self.drafters), MAX_DRAFT_TOKENS + 1)
        # [N] seconds in which each reads a token that it has not seen
        self.reading: Floats = np.array([costs.catch_up_seconds(n, 1) for n in drafters])
        self.said = said  # what was warned of already
        if not 0 < self.target[0] < np.inf:
            raise ValueError(
                f"plain decoding takes {self.target[0]} seconds a step by these costs; run "
                "stage=profile again"
            )
        for name, row in zip(self.drafters, self.draft, strict=True):
            if not np.isfinite(row + self.target).all():
                _say_unpriced(self.drafters, name)

    def say(self, key: str, message: str, *values: object) -> None:
        """Warn once per policy, however many rows meet the same trouble."""
        if key not in self.said:
            self.said.add(key)
            log.warning(message, *values)


@cache
def _say_unpriced(pool: tuple[str, ...], drafter: str) -> None:
    """Once for a pool, though every method that is compared builds policies over it."""
    log.warning("drafter %s has arms without finite costs; they are not chosen", drafter)


class Pricing:
    """One row's lambda, corrections of the profile, and dropped drafters."""

    def __init__(
        self,
        prices: PriceList,
        *,
        rate_memory: float,
        cost_memory: float,
        unsure: Collection[str] = (),
    ) -> None:
        self.prices = prices
        self.unsure = frozenset(
            unsure
        )  # drafters whose steps cost as much where they draft nothing
        self.rate_memory = rate_memory  # weight of one step in lambda
        self.cost_memory = (
            cost_memory  # weight of one step in the corrections; 0 trusts the profile
        )
        self.target_scale = 1.0
        self.draft_scale = np.ones(len(prices.drafters))
        self.usable = np.ones(len(prices.drafters), dtype=bool)
        self.read = np.zeros(len(prices.drafters))  # tokens each drafter has seen
        self.tokens = self.spent = 0.0  # moving averages; their ratio is lambda
        # Rows that share the steps, and that a drafter drafts for in turn: a row prices steps in
        # which all do as it does.
        self.num_rows = self.num_drafting = 1

    def start(self, expected_tokens: Floats, lengths: Sequence[int]) -> None:
        """Set lambda to the best rate that the belief promises at these K, before any step has
        run.
        """
        self.lengths = [0, *lengths]
        self.tokens, self.spent = 1.0, 1 / self._promised(expected_tokens, self.seconds())

    def beside(self, num_rows: int, drafts_together: bool) -> None:
        """So many rows share a step from now on. Drafts for one after another take so many times as
        long; what else changes, steps will show.
        """
        drafting = 1 if drafts_together else num_rows
        if (num_rows, drafting) == (self.num_rows, self.num_drafting):
            return
        self.draft_scale *= drafting / self.num_drafting
        self.num_rows, self.num_drafting = num_rows, drafting

    def tokens_per_second(self, expected_tokens: Floats, seconds: Floats) -> float:
        """Lambda: what recent steps gave, no less than plain decoding and no more than the belief
        promises; both tables [N, D + 1].
        """
        promised = self._promised(expected_tokens, seconds)
        return min(max(self.tokens / self.spent, 1 / self.plain_seconds), promised)

    def _promised(self, expected_tokens: Floats, seconds: Floats) -> float:
        rates = (expected_tokens / seconds)[:, self.lengths]
        return float(rates[np.isfinite(rates)].max(initial=1 / self.plain_seconds))

    @property
    def plain_seconds(self) -> float:
        """Seconds of a step without drafting, as they are now."""
        return float(self.prices.target[0] * self.target_scale)

    def seconds(self) -> Floats:  # [N, D + 1]
        """Seconds of a step of each arm as they are now; NaN where the arm has been dropped or
        never measured.
        """
        seconds = (
            self.prices.target * self.target_scale + self.prices.draft * self.draft_scale[:, None]
        )
        return np.where(self.usable[:, None], seconds, np.nan)

    def catch_up(self, position: int) -> Floats:  # [N]
        """Seconds each drafter needs to read what it has not seen."""
        return self.prices.reading * np.maximum(position - self.read, 0)

    def observe(self, record: StepRecord) -> None:
        """Take in a step's tokens and the row's share of its seconds; a drafter whose seconds are
        not a number is dropped.
        """
        index, depth = self.prices.index.get(record.drafter), self._depth(record)
        expected_target = float(self.prices.target[depth])
        target = self._finite(
            self.num_rows * (record.verify_seconds + record.host_seconds),
            expected_target * self.target_scale,
        )
        self.target_scale = self._correct(self.target_scale, target, expected_target)
        draft = 0.0
        if index is not None and depth:
            draft = self._observe_draft(index, record)
        self.tokens += self.rate_memory * (record.num_emitted - self.tokens)
        self.spent += self.rate_memory * (target + draft - self.spent)

    def _depth(self, record: StepRecord) -> int:
        """The drafted tokens by which a step is priced."""
        looked_up = record.drafter in self.unsure and not record.num_drafted
        depth = record.num_draft_tokens if looked_up else record.num_drafted
        return min(depth, MAX_DRAFT_TOKENS)

    def _observe_draft(self, index: int, record: StepRecord) -> float:
        expected = float(self.prices.draft[index, self._depth(record)])
        caught_up = record.position - self.read[index] <= MAX_DRAFT_TOKENS + 1
        for reader in (index, self.prices.index.get(record.source, index)):
            self.read[reader] = record.position  # a part of a composite shares what it has read
        if not math.isfinite(record.draft_seconds):
            self.usable[index] = False
            self.prices.say(
                f"seconds of {record.drafter}",
                "drafter %s took no finite time; it is dropped",
                record.drafter,
            )
            return 0.0
        scale, seconds = float(self.draft_scale[index]), self.num_rows * record.draft_seconds
        if caught_up:  # else the seconds hold a prefill, which is priced apart
            self.draft_scale[index] = self._correct(scale, seconds, expected)
        return min(seconds, PLAUSIBLE * expected * scale) if expected > 0 else seconds

    def _finite(self, seconds: float, expected: float) -> float:
        if not math.isfinite(seconds):
            self.prices.say(
                "seconds of the target",
                "a step took no finite time; the profile's seconds are used",
            )
            return expected
        return min(max(seconds, expected / PLAUSIBLE), expected * PLAUSIBLE)

    def _correct(self, scale: float, seconds: float, expected: float) -> float:
        if not (expected > 0 and math.isfinite(expected)):
            return scale
        ratio = min(max(seconds / expected, scale / PLAUSIBLE), scale * PLAUSIBLE)
        return scale + self.cost_memory * (ratio - scale)


@lru_cache(maxsize=4096)
def arms_on_offer(offers: tuple[int, ...], lengths: tuple[int, ...]) -> Mask:  # [N, D + 1]
    """Which arms can be played, by what each drafter offers: K clamped to the offer, none of an
    offer of 0.
    """
    arms = np.zeros((len(offers), MAX_DRAFT_TOKENS + 1), dtype=bool)
    for index, most in enumerate(offers):
        for k in lengths if most > 0 else ():
            arms[index, min(k, most)] = True
    arms.flags.writeable = False
    return arms


def scored(scores: Floats, arms: Mask) -> Floats:  # [N, D + 1] both
    """The scores of those arms; -inf for what cannot be played or has no finite score."""
    return np.where(arms & np.isfinite(scores), scores, -np.inf)


def best_arm(scores: Floats) -> tuple[int, int] | None:
    """Drafter and K of the best of `scored`, the shortest draft winning a tie; None: no arm is
    left.
    """
    best = scores.max(initial=-np.inf)
    if best == -np.inf:
        return None
    near = scores >= best - TIE
    k = int(near.any(axis=0).argmax())
    return int(near[:, k].argmax()), k

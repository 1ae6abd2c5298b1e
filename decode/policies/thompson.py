"""Thompson sampling: play the arm that is best were one draw from the posterior the truth.

Structured: one draw of acceptance per drafter prices all its K and OFF. Flat: a normal draw around
each arm's mean reward. The draws come from a generator keyed by the seed and the row's request id.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from decode.costs import Costs
from decode.policies.base import check_draft_lengths, require_costs
from decode.policies.belief import Floats
from decode.policies.flat import FlatArms
from decode.policies.posterior import PosteriorConfig, PosteriorPolicy, PosteriorSession
from decode.policies.pricing import Prices
from decode.types import Choice, Policy, PolicySession, Request, StepRecord

UNPLAYED_SD = 0.25  # of an arm's reward, until two plays say better


@dataclass(frozen=True, kw_only=True)
class ThompsonConfig(PosteriorConfig):
    """Settings of Thompson sampling; those of the posterior policy hold for the structured form."""

    structured: bool  # False: flat arms
    spread: float  # of the posterior that is drawn from; below 1 explores less
    reward_cap: float  # flat: this many times the rate of plain decoding counts as reward 1

    @property
    def uses_prior(self) -> bool:
        return self.structured

    @property
    def learns_from_texts(self) -> bool:
        return self.structured and self.experience > 0

    def build(self, costs: Costs | None, drafters: Sequence[str], seed: int) -> Policy:
        if self.spread <= 0 or self.reward_cap <= 0:
            raise ValueError(
                f"policy.spread={self.spread} and reward_cap={self.reward_cap} must be positive"
            )
        prices = Prices(require_costs(costs, "thompson"), drafters)
        self.check()
        lengths = check_draft_lengths(self.draft_lengths)
        kind = ThompsonPolicy if self.structured else FlatThompsonPolicy
        return kind(self, lengths, prices, seed)


class ThompsonPolicy(PosteriorPolicy):
    """Rows share their beliefs with those that follow."""

    def __init__(
        self, config: ThompsonConfig, lengths: Sequence[int], prices: Prices, seed: int
    ) -> None:
        super().__init__(config, lengths, prices)
        self.thompson, self.seed = config, seed

    def open(self, request: Request) -> PolicySession:
        return ThompsonSession(self, request, _generator(self.seed, request), self.thompson.spread)


class FlatThompsonPolicy:
    """Rows share nothing."""

    def __init__(
        self, config: ThompsonConfig, lengths: Sequence[int], prices: Prices, seed: int
    ) -> None:
        self.config, self.lengths, self.prices, self.seed = config, lengths, prices, seed

    def open(self, request: Request) -> PolicySession:
        arms = FlatArms(self.prices.under(request.sampling), self.lengths, self.config.reward_cap)
        return FlatThompsonSession(arms, _generator(self.seed, request), self.config.spread)


def _generator(seed: int, request: Request) -> np.random.Generator:
    """Of a row, whatever others are decoded beside it."""
    key = hashlib.sha256(f"{seed}/{request.request_id}".encode()).digest()
    return np.random.default_rng(int.from_bytes(key[:16], "big"))


class ThompsonSession(PosteriorSession):
    """Prices arms as the posterior policy does, on one draw instead of the mean."""

    def __init__(
        self,
        policy: PosteriorPolicy,
        request: Request,
        generator: np.random.Generator,
        spread: float,
    ) -> None:
        super().__init__(policy, request)
        self.generator, self.spread = generator, spread

    def _believed_tokens(self, expected: Floats) -> Floats:
        return self.belief.sampled_tokens(self.generator, self.spread)


class FlatThompsonSession:
    """One row's play of unrelated arms."""

    def __init__(self, arms: FlatArms, generator: np.random.Generator, spread: float) -> None:
        self.arms, self.generator, self.spread = arms, generator, spread

    def choose(self, offers: Mapping[str, int]) -> Choice:
        eligible = self.arms.eligible(offers)
        if len(eligible) == 1:
            return self.arms.choice(int(eligible[0]), offers, "nothing offered")
        counts = self.arms.count[eligible]
        if not counts.all():
            return self.arms.choice(int(eligible[counts.argmin()]), offers, "explore")
        mean = self.arms.mean()[eligible]
        spread = np.sqrt(np.maximum(self.arms.squares[eligible] / counts - mean**2, 0))
        sd = np.where(counts >= 2, spread, UNPLAYED_SD) / np.sqrt(counts)
        draw = mean + self.spread * sd * self.generator.standard_normal(len(eligible))
        return self.arms.choice(int(eligible[draw.argmax()]), offers, "data")

    def learn(self, record: StepRecord) -> None:
        self.arms.learn(record)

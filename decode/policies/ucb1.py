"""UCB1 over flat arms (Auer et al. 2002; for speculation arXiv 2505.15141): the baseline, in the
paper's form.

Plays every arm once, then the arm with the greatest mean reward + exploration * sqrt(2 log t / n of
that arm).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from decode.costs import Costs
from decode.policies.base import PolicyConfig, check_draft_lengths, require_costs
from decode.policies.flat import FlatArms
from decode.policies.pricing import Prices
from decode.types import Choice, PolicySession, Request, StepRecord


@dataclass(frozen=True, kw_only=True)
class Ucb1Config(PolicyConfig):
    """Settings of UCB1."""

    draft_lengths: list[int]
    exploration: float  # 1: as in the paper
    reward_cap: float  # this many times the rate of plain decoding counts as reward 1
    persist: bool  # keep what was learned from row to row

    @property
    def uses_prior(self) -> bool:
        return False

    @property
    def learns_from_texts(self) -> bool:
        return self.persist

    def build(self, costs: Costs | None, drafters: Sequence[str], seed: int) -> "Ucb1Policy":
        if self.reward_cap <= 0:
            raise ValueError(f"policy.reward_cap={self.reward_cap} must be positive")
        prices = Prices(require_costs(costs, "ucb1"), drafters)
        return Ucb1Policy(self, check_draft_lengths(self.draft_lengths), prices)


class Ucb1Policy:
    """Holds the arms where they persist."""

    def __init__(self, config: Ucb1Config, lengths: Sequence[int], prices: Prices) -> None:
        self.config, self.lengths, self.prices = config, lengths, prices
        self.kept: dict[bool, FlatArms] = {}  # by whether the law is greedy: their costs differ

    def open(self, request: Request) -> PolicySession:
        arms = FlatArms(self.prices.under(request.sampling), self.lengths, self.config.reward_cap)
        if self.config.persist:
            arms = self.kept.setdefault(request.sampling.greedy, arms)
        return Ucb1Session(arms, self.config.exploration)


class Ucb1Session:
    """One row's play of the arms."""

    def __init__(self, arms: FlatArms, exploration: float) -> None:
        self.arms, self.exploration = arms, exploration

    def choose(self, offers: Mapping[str, int]) -> Choice:
        eligible = self.arms.eligible(offers)
        if len(eligible) == 1:
            return self.arms.choice(int(eligible[0]), offers, "nothing offered")
        counts = self.arms.count[eligible]
        if not counts.all():
            return self.arms.choice(int(eligible[counts.argmin()]), offers, "explore")
        bonus = self.exploration * np.sqrt(2 * math.log(self.arms.count.sum()) / counts)
        place = int(eligible[(self.arms.mean()[eligible] + bonus).argmax()])
        return self.arms.choice(place, offers, "data")

    def learn(self, record: StepRecord) -> None:
        self.arms.learn(record)

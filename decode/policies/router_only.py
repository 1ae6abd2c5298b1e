"""One arm per prompt, the best by the prior alone: what a router is worth without learning while
decoding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from decode.costs import Costs
from decode.policies.base import PolicyConfig, check_draft_lengths, require_costs
from decode.policies.belief import Belief
from decode.policies.fixed import FixedPolicy, FixedSession
from decode.policies.pricing import Prices
from decode.types import OFF, PolicySession, Request


@dataclass(frozen=True, kw_only=True)
class RouterOnlyConfig(PolicyConfig):
    """Settings: the K that may be chosen."""

    draft_lengths: list[int]

    def build(self, costs: Costs | None, drafters: Sequence[str], seed: int) -> "RouterOnlyPolicy":
        prices = Prices(require_costs(costs, "router_only"), drafters)
        return RouterOnlyPolicy(check_draft_lengths(self.draft_lengths), prices)


class RouterOnlyPolicy:
    """Prices every arm once, when a row opens."""

    def __init__(self, lengths: Sequence[int], prices: Prices) -> None:
        self.lengths, self.prices = lengths, prices

    def open(self, request: Request) -> PolicySession:
        drafter, k = self.arm(request)
        reason = "prior" if request.prior is not None else "no router"
        return FixedSession(FixedPolicy(drafter, k, self.prices.costs), reason)

    def arm(self, request: Request) -> tuple[str, int]:
        """The arm with the most expected tokens per second under the prior; OFF where plain
        decoding has more.
        """
        belief = Belief(
            self.prices.drafters,
            request.prior,
            request.unsure,
            population_share=0.0,
            population_spread=1.0,
            hazard=0.0,
            likelihood_power=1.0,
        )
        tokens = belief.expected_tokens()
        costs = self.prices.costs.under(request.sampling)
        best, arm = 1 / costs.plain_seconds, (OFF, 0)
        for index, name in enumerate(self.prices.drafters):
            for k in self.lengths:
                rate = float(tokens[index, k]) / costs.step_seconds(name, k)
                if rate > best:  # False for NaN, which drops the arm
                    best, arm = rate, (name, k)
        return arm

"""Always the same arm; OFF where its drafter offers nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from decode.costs import Costs
from decode.policies.base import PolicyConfig, off
from decode.types import MAX_DRAFT_TOKENS, OFF, Choice, PolicySession, Request, StepRecord


@dataclass(frozen=True, kw_only=True)
class FixedConfig(PolicyConfig):
    """Settings: the arm. OFF with 0 tokens is plain decoding."""

    needs_costs: ClassVar[bool] = False
    drafter: str
    num_draft_tokens: int

    @property
    def uses_prior(self) -> bool:
        return False

    def build(self, costs: Costs | None, drafters: Sequence[str], seed: int) -> "FixedPolicy":
        if self.drafter != OFF and self.drafter not in drafters:
            known = ", ".join([*drafters, OFF])
            raise ValueError(
                f"policy.drafter={self.drafter!r} is not in the pool; choose one of {known}"
            )
        if not 0 <= self.num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(
                f"policy.num_draft_tokens={self.num_draft_tokens} must lie between 0 and "
                f"{MAX_DRAFT_TOKENS}"
            )
        return FixedPolicy(self.drafter, self.num_draft_tokens, costs)


class FixedPolicy:
    """One arm for every row; keeps nothing."""

    def __init__(self, drafter: str, num_draft_tokens: int, costs: Costs | None) -> None:
        self.drafter, self.num_draft_tokens, self.costs = drafter, num_draft_tokens, costs

    def open(self, request: Request) -> PolicySession:
        return FixedSession(self)


class FixedSession:
    """Remembers nothing."""

    def __init__(self, policy: FixedPolicy, reason: str = "fixed") -> None:
        self.policy, self.reason = policy, reason

    def choose(self, offers: Mapping[str, int]) -> Choice:
        name, k = self.policy.drafter, self.policy.num_draft_tokens
        if name == OFF or k == 0:
            return off(self.reason)
        k = min(k, offers.get(name, 0))
        return Choice(name, k, self.reason) if k else off("nothing offered")

    def learn(self, record: StepRecord) -> None:
        """A fixed choice learns nothing."""

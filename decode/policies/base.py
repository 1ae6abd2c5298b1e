"""What every policy has: a config that builds it."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from decode.costs import Costs
from decode.types import MAX_DRAFT_TOKENS, OFF, Choice, Policy

NOTHING_OFFERED = "nothing offered"  # why a row does not draft, though it would


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(ABC):
    """Settings of one policy; the subclass sits in the module named after it."""

    needs_costs: ClassVar[bool] = True  # False: build() does without measured seconds

    @property
    def uses_prior(self) -> bool:
        """Whether a router's prior changes what it chooses."""
        return True

    @property
    def learns_from_texts(self) -> bool:
        """Whether what one text has shown changes what is chosen in the next."""
        return False

    @abstractmethod
    def build(self, costs: Costs | None, drafters: Sequence[str], seed: int) -> Policy:
        """A policy over the drafters of that name. Raises ValueError where they do not fit."""


def require_costs(costs: Costs | None, policy: str) -> Costs:
    """The costs, or one sentence for the person who gave none."""
    if costs is None:
        raise ValueError(
            f"policy={policy} prices its choices: give it costs, from stage=profile or "
            "quick_costs()"
        )
    return costs


def check_draft_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    """The lengths in order, without repeats. Raises ValueError outside 1..16."""
    if not lengths or not all(1 <= k <= MAX_DRAFT_TOKENS for k in lengths):
        raise ValueError(
            f"draft_lengths={list(lengths)} must be numbers from 1 to {MAX_DRAFT_TOKENS}"
        )
    return tuple(sorted(set(lengths)))


def off(reason: str, seconds: float = math.nan) -> Choice:
    """The choice not to speculate in this step."""
    return Choice(OFF, 0, reason, 1.0, seconds)

"""The default policy: one acceptance posterior per drafter; every K and OFF priced from it in
seconds.

Choosing by the posterior mean, with a chance in every step that the text has changed, does better
over the 30 to 150 steps of a prompt than sampling or upper bounds do: too few steps pay for
exploration. For the same reason a text begins with what the last texts under its law have shown.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from decode.costs import Costs
from decode.policies.base import (
    NOTHING_OFFERED,
    PolicyConfig,
    check_draft_lengths,
    off,
    require_costs,
)
from decode.policies.belief import Belief, Floats
from decode.policies.company import REASON, Company, PassSeconds, Wish
from decode.policies.pricing import TIE, Prices, Pricing, arms_on_offer, best_arm, scored
from decode.types import (
    MAX_DRAFT_TOKENS,
    OFF,
    Choice,
    Policy,
    PolicySession,
    Request,
    Sharing,
    StepRecord,
)

LONGEST_PAUSE = (
    8  # unsuccessful probes double the pause between them up to this many times the first
)
ONE_TOKEN: Floats = np.ones(MAX_DRAFT_TOKENS + 1)  # by length, where nothing is drafted
NO_SECONDS: Floats = np.zeros(MAX_DRAFT_TOKENS + 1)


@dataclass(frozen=True, kw_only=True)
class PosteriorConfig(PolicyConfig):
    """Settings of the default policy."""

    draft_lengths: list[int]  # the K that may be chosen
    population_share: (
        float  # weight of the population in the prior: what a wrong router costs at most
    )
    population_spread: float  # the population's standard deviation is widened by this factor
    hazard: float  # chance per step that the text has changed
    likelihood_power: (
        float  # below 1 where neighbouring tokens are accepted alike and so count for less
    )
    rate_memory: float  # weight of one step in lambda, the tokens per second so far
    cost_memory: (
        float  # weight of one step in the correction of the profiled seconds; 0 trusts the profile
    )
    switch_horizon: float  # steps over which a drafter's reading of unseen tokens is paid back
    explore_horizon: (
        float  # steps over which a better drafter, once found, pays for the trial; 0: no trials
    )
    probe_every: int  # steps without drafting after which one draft is tried again; 0: never
    experience: int  # last texts that say how the next will be; 0: none

    @property
    def learns_from_texts(self) -> bool:
        return self.experience > 0

    def build(self, costs: Costs | None, drafters: Sequence[str], seed: int) -> Policy:
        self.check()
        lengths = check_draft_lengths(self.draft_lengths)
        return PosteriorPolicy(self, lengths, Prices(require_costs(costs, "posterior"), drafters))

    def check(self) -> None:
        """Raise ValueError at a value outside its range."""
        for name in (
            "population_share",
            "hazard",
            "rate_memory",
            "cost_memory",
            "likelihood_power",
        ):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"policy.{name}={value} must lie between 0 and 1")
        if (
            self.population_spread <= 0
            or self.switch_horizon <= 0
            or min(self.probe_every, self.explore_horizon, self.experience) < 0
        ):
            raise ValueError(
                f"policy.population_spread={self.population_spread} and "
                f"switch_horizon={self.switch_horizon} must be "
                f"positive, and probe_every={self.probe_every}, explore_horizon="
                f"{self.explore_horizon} and experience={self.experience} not negative"
            )


class PosteriorPolicy:
    """Greedy on the posterior mean; rows share their beliefs with those that follow."""

    def __init__(self, config: PosteriorConfig, lengths: Sequence[int], prices: Prices) -> None:
        self.config, self.lengths, self.prices = config, lengths, prices
        # By whether tokens are sampled, which decides how much is accepted.
        self._last: dict[bool, deque[Belief]] = {
            greedy: deque(maxlen=config.experience) for greedy in (True, False)
        }
        self._company = {
            greedy: Company(
                PassSeconds(costs.verify_seconds, config.cost_memory), config.probe_every
            )
            for greedy, costs in ((True, prices.greedy.costs), (False, prices.sampled.costs))
        }

    def open(self, request: Request) -> PolicySession:
        return PosteriorSession(self, request)

    def choose_together(
        self,
        sessions: Sequence[PolicySession],
        offers: Sequence[Mapping[str, int]],
        sharing: Sharing,
    ) -> list[Choice]:
        rows = cast(Sequence[PosteriorSession], sessions)
        for row in rows:
            row.pricing.beside(len(rows), sharing.drafts_together)
        company = self._company_of(rows)
        if company.rests(len(rows)):
            return [off(REASON)] * len(rows)
        wishes = [row.wish(offered) for row, offered in zip(rows, offers, strict=True)]
        return company.settle(wishes, sharing)

    def learn_together(
        self, sessions: Sequence[PolicySession], num_positions: int, seconds: float
    ) -> None:
        rows = cast(Sequence[PosteriorSession], sessions)
        self._company_of(rows).observe(len(rows), num_positions, seconds)

    def _company_of(self, rows: Sequence["PosteriorSession"]) -> Company:
        """By whether all are greedy: drawing tokens takes time."""
        return self._company[all(row.greedy for row in rows)]

    def texts(self, request: Request) -> list[Belief]:
        """What was believed in the last texts under the request's law."""
        return list(self._last[request.sampling.greedy])

    def remember(self, request: Request, belief: Belief) -> None:
        """Its row goes on learning; whoever asks gets what it has learned by then."""
        self._last[request.sampling.greedy].append(belief)


class PosteriorSession:
    """One row's belief about every drafter."""

    def __init__(self, policy: PosteriorPolicy, request: Request) -> None:
        config = policy.config
        self.policy = policy
        self.prices = policy.prices.under(request.sampling)
        self.position = self.num_prompt_tokens = request.num_prompt_tokens
        self.max_new_tokens = request.max_new_tokens
        self.greedy = request.sampling.greedy
        self.belief = Belief(
            self.prices.drafters,
            request.prior,
            request.unsure,
            policy.texts(request),
            population_share=config.population_share,
            population_spread=config.population_spread,
            hazard=config.hazard,
            likelihood_power=config.likelihood_power,
        )
        policy.remember(request, self.belief)
        self.pricing = Pricing(
            self.prices,
            rate_memory=config.rate_memory,
            cost_memory=config.cost_memory,
            unsure=request.unsure,
        )
        self.pricing.start(self.belief.expected_tokens(), policy.lengths)
        self.steps_off = 0
        self.pause = config.probe_every

    def choose(self, offers: Mapping[str, int]) -> Choice:
        self.pricing.beside(1, drafts_together=False)
        return self.wish(offers).choice

    def wish(self, offers: Mapping[str, int]) -> Wish:
        """What it would choose, and what that is worth by its length."""
        drafters, plain = self.prices.drafters, self.pricing.plain_seconds
        offered = tuple(offers.get(name, 0) if name != OFF else 0 for name in drafters)
        if not any(offered):
            return _nothing(NOTHING_OFFERED, plain)
        expected, seconds = self.belief.expected_tokens(), self.pricing.seconds()
        rate = self.pricing.tokens_per_second(expected, seconds)
        reading = rate * self.pricing.catch_up(self.position)  # [N] tokens that it costs
        spread = reading / self.policy.config.switch_horizon  # paid back by the steps that profit
        scores = scored(
            self._believed_tokens(expected) - rate * seconds - spread[:, None],
            arms_on_offer(offered, self.policy.lengths),
        )
        best = best_arm(scores)
        if best is None:
            return _nothing("no arm has finite costs", plain)
        gain = float(scores[best])
        incumbent = max(gain, 1 - rate * plain)
        trial = self._worth_a_trial(scores, rate * seconds, reading - spread, incumbent)
        index, k = best if trial is None else trial
        if trial is not None:
            reason = "explore"
        elif gain > 1 - rate * plain:
            reason = "data" if self.belief.num_observed[index] else "prior"
        elif self._probe_is_due():
            reason = "probe"
        else:
            return _nothing("cost", plain)
        tokens, spent = float(expected[index, k]), float(seconds[index, k])
        choice = Choice(drafters[index], k, reason, tokens, spent)
        draft_seconds = self.prices.draft[index] * self.pricing.draft_scale[index]
        return Wish(choice, expected[index], draft_seconds)

    def learn(self, record: StepRecord) -> None:
        self.position = record.position + record.num_emitted
        self.pricing.observe(record)
        for name in {record.drafter, record.source}:  # a composite's draft is its part's as well
            index = self.prices.index.get(name)
            if index is not None:
                self.belief.observe(index, record.num_accepted, record.num_drafted)
        asked = self.prices.index.get(record.drafter)
        if self.belief.matches is not None and asked is not None and record.num_draft_tokens:
            self.belief.matches.observe(asked, record.num_drafted > 0)
        self.belief.drift()
        self._count_pause(record)

    def _believed_tokens(self, expected: Floats) -> Floats:  # [N, D + 1] both
        """Tokens by drafter and K that the choice is made on."""
        return expected

    def _worth_a_trial(
        self,
        scores: Floats,  # [N, D + 1] of the arms on offer
        prices: Floats,  # [N, D + 1] tokens that their seconds cost
        unpaid: Floats,  # [N] of the reading of unseen tokens, what `scores` leave to later steps
        incumbent: float,
    ) -> tuple[int, int] | None:
        """The arm whose expected improvement on the incumbent, while it lasts, most exceeds what
        one draft loses.

        Improvement is E[max over K of (N - lambda c) - incumbent]+ under the drafter's own
        posterior. A trial may be the only draft, so all of its reading counts as lost.
        """
        left = self.max_new_tokens - (self.position - self.num_prompt_tokens)
        horizon = min(self.policy.config.explore_horizon, left)
        own = scores.max(axis=1)  # [N]
        tried = np.flatnonzero((own < incumbent) & (own > -np.inf))
        if not len(tried) or horizon <= 0:
            return None
        on_offer = scores[tried] > -np.inf  # [n, D + 1]
        least = np.where(on_offer, prices[tried], np.inf)
        values = (self.belief.tokens_of(tried) - least[:, None, :]).max(axis=2)  # [n, G]
        improvement = np.maximum(values - incumbent, 0)
        gain = (self.belief.posterior[tried] * improvement).sum(axis=1) * horizon
        net = gain - (incumbent - own[tried] + unpaid[tried])
        most = int(net.argmax())
        if not net[most] > 0:
            return None
        index = int(tried[most])
        return index, int((scores[index] >= own[index] - TIE).argmax())

    def _probe_is_due(self) -> bool:
        return self.pause > 0 and self.steps_off >= self.pause

    def _count_pause(self, record: StepRecord) -> None:
        if record.drafter == OFF:
            self.steps_off += 1
            return
        longest = LONGEST_PAUSE * self.policy.config.probe_every
        self.pause = (
            min(2 * self.pause, longest)
            if record.reason == "probe"
            else self.policy.config.probe_every
        )
        self.steps_off = 0


def _nothing(reason: str, seconds: float) -> Wish:
    return Wish(off(reason, seconds), ONE_TOKEN, NO_SECONDS)

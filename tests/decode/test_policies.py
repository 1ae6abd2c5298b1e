"""Bugs these tests would catch: a rejection that teaches nothing; a draft cut short counted as a
rejection; an arm chosen that nobody offered; a draft priced longer than the offer; a NaN cost or
time that poisons every score; a belief that never follows a change of text; a router's prior that
is ignored, or one that cannot be unlearnt; a lookup that is asked in vain, priced as if it always
matched, or one whose offers are exact and which is doubted all the same; OFF that never comes or
never ends; K that ignores costs; what a composite's part did held against the composite alone; a
trial that takes its reading of the text for free; experience of other texts that outweighs a router
or this text, or that outlives its truth; choices that depend on a clock; slow choices.

The simulated worlds are seeded, so the figures below are fixed; margins say what would still be
acceptable.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np
import pytest

from decode.costs import Costs
from decode.policies.base import PolicyConfig
from decode.policies.belief import (
    GRID,
    MATCH_CHANCE,
    Belief,
    depth_tables,
)
from decode.policies.fixed import FixedConfig
from decode.policies.posterior import PosteriorConfig, PosteriorSession
from decode.policies.pricing import _say_unpriced
from decode.policies.router_only import RouterOnlyConfig
from decode.policies.thompson import ThompsonConfig
from decode.policies.ucb1 import Ucb1Config
from decode.types import OFF, Choice, Policy, PolicySession, Prior, Request, Sampling, StepRecord

LENGTHS = [1, 2, 3, 5, 8, 16]
DRAFTERS = ["ngram", "small", "large"]
POSTERIOR = PosteriorConfig(
    draft_lengths=LENGTHS,
    population_share=0.2,
    population_spread=1.4,
    hazard=0.005,
    likelihood_power=1.0,
    rate_memory=0.03,
    cost_memory=0.05,
    switch_horizon=12.0,
    explore_horizon=1.5,
    probe_every=32,
    experience=0,
)
THOMPSON = ThompsonConfig(
    **asdict(POSTERIOR),
    structured=True,
    spread=1.0,
    reward_cap=4.0,
)
UCB1 = Ucb1Config(draft_lengths=[1, 3, 5], exploration=1.0, reward_cap=4.0, persist=False)
EVERY_POLICY: dict[str, PolicyConfig] = {
    "fixed": FixedConfig(drafter="small", num_draft_tokens=3),
    "ucb1": UCB1,
    "thompson": THOMPSON,
    "thompson flat": replace(THOMPSON, structured=False),
    "posterior": POSTERIOR,
    "router_only": RouterOnlyConfig(draft_lengths=LENGTHS),
}


def costs(small: float = 0.05, large: float = 0.2, verify: float = 0.01) -> Costs:
    """Seconds in units of one target pass; drafts linear in K."""
    return Costs(
        key="test",
        verify_seconds={1: 1.0, 17: 1.0 + 16 * verify},
        draft_seconds={
            "ngram": {1: 0.001, 16: 0.001},
            "small": {1: small, 16: 16 * small},
            "large": {1: large, 16: 16 * large},
        },
        host_seconds=0.02,
    )


def request(name: str = "r", prior: Prior | None = None) -> Request:
    return Request(name, 20, 200, Sampling(), prior)


def prior(**mean: float) -> Prior:
    """A router sure of these logits, over a population that knows little."""
    return Prior(
        mean=mean,
        sd=dict.fromkeys(mean, 0.4),
        population_mean=dict.fromkeys(mean, 0.0),
        population_sd=dict.fromkeys(mean, 1.2),
        source="router",
    )


def record(step: int, choice: Choice, accepted: int, drafted: int, **seconds: float) -> StepRecord:
    times = {"draft_seconds": 0.1, "verify_seconds": 1.0, "host_seconds": 0.02, **seconds}
    return StepRecord(
        request_id="r",
        step=step,
        position=20 + step,
        drafter=choice.drafter,
        source=choice.drafter,
        num_draft_tokens=choice.num_draft_tokens,
        num_drafted=drafted,
        num_accepted=accepted,
        num_emitted=accepted + 1,
        reason=choice.reason,
        expected_tokens=choice.expected_tokens,
        expected_seconds=choice.expected_seconds,
        **times,
    )


class World:
    """Accepts each drafted token with its drafter's chance; a step takes what the costs say."""

    def __init__(self, rates: Mapping[str, float], table: Costs, seed: int = 0) -> None:
        self.rates, self.table = dict(rates), table
        self.generator = np.random.default_rng(seed)
        self.tokens, self.seconds, self.steps = 0, 0.0, 0
        self.choices: list[Choice] = []

    def run(self, session: PolicySession, steps: int, offer: int = 16) -> float:
        """Tokens per second over these steps."""
        before = self.tokens, self.seconds
        for _ in range(steps):
            choice = session.choose(dict.fromkeys(DRAFTERS, offer))
            k = choice.num_draft_tokens
            hits = self.generator.random(16) < self.rates.get(choice.drafter, 0.0)
            accepted = int(np.cumprod(hits[:k]).sum())
            draft = self.table.draft(choice.drafter, k) if k else 0.0
            session.learn(
                record(
                    self.steps,
                    choice,
                    accepted,
                    k,
                    draft_seconds=draft,
                    verify_seconds=self.table.verify(k + 1),
                )
            )
            self.choices.append(choice)
            self.tokens += accepted + 1
            self.seconds += self.table.step_seconds(choice.drafter, k)
            self.steps += 1
        return (self.tokens - before[0]) / (self.seconds - before[1])


def session(config: PolicyConfig, table: Costs, given: Prior | None = None) -> PolicySession:
    return config.build(table, DRAFTERS, seed=3).open(request(prior=given))


def belief(given: Prior | None = None, hazard: float = 0.0, power: float = 1.0) -> Belief:
    return Belief(
        ["small"],
        given,
        population_share=0.2,
        population_spread=1.4,
        hazard=hazard,
        likelihood_power=power,
    )


# -------------------------------------------------------------------------------------------- belie


@pytest.mark.parametrize(
    ("accepted", "drafted"), [(0, 1), (0, 5), (2, 5), (4, 5), (5, 5), (1, 1), (16, 16)]
)
def test_likelihood_is_the_censored_geometric(accepted: int, drafted: int) -> None:
    row = belief()
    before = row.posterior[0].copy()
    row.observe(0, accepted, drafted)
    chance = 1 / (1 + np.exp(-GRID))
    law = before * chance**accepted * (1 - chance if accepted < drafted else 1)
    np.testing.assert_allclose(row.posterior[0], law / law.sum(), rtol=1e-10)  # float64 arithmetic


def test_a_rejection_after_accepted_tokens_is_not_dropped() -> None:
    """4 drafted at a true chance of 0.6: forgetting the last rejection converges to 0.76 and
    more.
    """
    row, generator = belief(), np.random.default_rng(1)
    for _ in range(600):
        row.observe(0, int(np.cumprod(generator.random(4) < 0.6).sum()), 4)
    assert row.acceptance()[0] == pytest.approx(
        0.6, abs=0.03
    )  # standard error of some 1,300 tokens: 0.014


def test_nothing_drafted_says_nothing() -> None:
    row = belief()
    before = row.posterior.copy()
    row.observe(0, 0, 0)
    np.testing.assert_array_equal(row.posterior, before)


def test_depth_offsets_lower_deep_acceptance_and_hold_past_their_end() -> None:
    flat, falling = depth_tables(()), depth_tables((0.0, -0.5, -1.0))
    assert (falling.tokens[:, 1] == flat.tokens[:, 1]).all()
    assert (falling.tokens[:, 3] < flat.tokens[:, 3]).all()
    conditional = np.diff(falling.accepted, axis=0)  # log h by depth
    np.testing.assert_allclose(conditional[2], conditional[15])


def test_expected_tokens_match_a_simulation() -> None:
    row = belief(prior(small=1.0))
    row.posterior = np.eye(len(GRID))[[30]]  # certain
    chance = 1 / (1 + math.exp(-GRID[30]))
    closed = [(1 - chance ** (k + 1)) / (1 - chance) for k in range(17)]
    np.testing.assert_allclose(row.expected_tokens()[0], closed, rtol=1e-10)


# ------------------------------------------------------------------------------------------ all pol


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_never_plays_what_is_not_on_offer(name: str) -> None:
    row, generator = (
        session(EVERY_POLICY[name], costs(), prior(ngram=3.0, small=1.0, large=1.0)),
        np.random.default_rng(5),
    )
    for step in range(120):
        offers = {drafter: int(generator.integers(0, 7)) for drafter in DRAFTERS}
        if step % 11 == 0:
            offers = {"small": 0}
        choice = row.choose(offers)
        assert (choice.drafter == OFF) == (choice.num_draft_tokens == 0)
        if choice.drafter != OFF:
            assert 1 <= choice.num_draft_tokens <= offers[choice.drafter]
        else:
            assert any(offers.values()) or name == "fixed" or choice.reason != "data"
        assert choice.reason
        drafted = int(generator.integers(0, choice.num_draft_tokens + 1))
        row.learn(record(step, choice, int(generator.integers(0, drafted + 1)), drafted))


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_choices_depend_on_offers_and_past_records_only(name: str) -> None:
    """Two sessions of one policy, another row between their steps: the same story, the same
    choices.
    """
    policy: Policy = EVERY_POLICY[name].build(costs(), DRAFTERS, seed=3)
    first, second, other = (
        policy.open(request()),
        policy.open(request()),
        policy.open(request("other")),
    )
    generator = np.random.default_rng(2)
    for step in range(60):
        offers = {drafter: int(generator.integers(0, 9)) for drafter in DRAFTERS}
        mine, theirs = first.choose(offers), second.choose(dict(reversed(offers.items())))
        assert repr(mine) == repr(theirs)  # NaN has no equal
        drafted = min(mine.num_draft_tokens, int(generator.integers(0, 9)))
        done = record(step, mine, int(generator.integers(0, drafted + 1)), drafted)
        first.learn(done)
        second.learn(done)
        elsewhere = other.choose(offers)
        other.learn(record(step, elsewhere, 0, elsewhere.num_draft_tokens, draft_seconds=0.7))


@pytest.mark.parametrize("name", ["ucb1", "thompson", "thompson flat", "posterior", "router_only"])
def test_an_arm_with_nan_cost_is_dropped_and_said_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    table = costs()
    table = replace(
        table, draft_seconds={**table.draft_seconds, "small": {1: math.nan, 16: math.nan}}
    )
    with caplog.at_level(logging.WARNING):
        world = World({"ngram": 0.5, "large": 0.5, "small": 1.0}, table)
        _say_unpriced.cache_clear()  # an earlier test may have said it
        for row in range(3):
            policy = EVERY_POLICY[name].build(table, DRAFTERS, seed=0)  # once for all over a pool
            world.run(policy.open(request(f"r{row}", prior(ngram=0.0, small=4.0, large=0.0))), 30)
    assert "small" not in {choice.drafter for choice in world.choices}
    assert sum("small" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("name", ["ucb1", "thompson", "thompson flat", "posterior"])
def test_nan_seconds_drop_the_arm_and_nothing_else(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    row = session(EVERY_POLICY[name], costs(), prior(ngram=1.0, small=1.0, large=1.0))
    broken = 0
    with caplog.at_level(logging.WARNING):
        for step in range(60):
            choice = row.choose(dict.fromkeys(DRAFTERS, 8))
            bad = choice.drafter == "small"
            broken += bad
            row.learn(
                record(
                    step, choice, 0, choice.num_draft_tokens, draft_seconds=math.nan if bad else 0.1
                )
            )
    # once a drafter where it is one belief, once an arm where arms are unrelated
    assert broken <= (len(LENGTHS) if name in ("ucb1", "thompson flat") else 1)
    assert len(caplog.messages) == broken


def test_nan_seconds_of_the_target_leave_the_policy_whole() -> None:
    row = session(POSTERIOR, costs(), prior(ngram=1.0, small=1.0, large=1.0))
    for step in range(20):
        choice = row.choose(dict.fromkeys(DRAFTERS, 8))
        assert choice.drafter != OFF
        assert math.isfinite(choice.expected_seconds)
        row.learn(record(step, choice, 3, choice.num_draft_tokens, verify_seconds=math.nan))


def test_seed_and_request_decide_what_thompson_draws() -> None:
    def story(seed: int, name: str) -> list[tuple[str, int]]:
        row = THOMPSON.build(costs(), DRAFTERS, seed).open(request(name))
        world = World(dict.fromkeys(DRAFTERS, 0.5), costs())
        world.run(row, 40)
        return [(choice.drafter, choice.num_draft_tokens) for choice in world.choices]

    assert story(1, "a") == story(1, "a")
    assert story(1, "a") != story(2, "a")
    assert story(1, "a") != story(1, "b")


# ------------------------------------------------------------------------------------------- poster


def test_more_expensive_drafts_are_shorter() -> None:
    given = prior(small=2.0)
    best = [
        session(POSTERIOR, costs(small=price), given).choose({"small": 16}).num_draft_tokens
        for price in (0.01, 0.05, 0.2)
    ]
    assert best[0] > best[1] > best[2] > 0


def test_k_is_priced_at_the_offer() -> None:
    """A sure drafter that offers one token loses to a less sure one that offers eight."""
    given = prior(ngram=3.0, small=1.8, large=-3.0)
    row = session(POSTERIOR, costs(small=0.01), given)
    assert row.choose({"ngram": 16, "small": 16}).drafter == "ngram"
    assert row.choose({"ngram": 1, "small": 16}).drafter == "small"
    assert row.choose({"ngram": 1}).num_draft_tokens == 1


def test_off_when_nothing_pays_and_probed_again() -> None:
    quiet = replace(POSTERIOR, explore_horizon=0.0, hazard=0.0)
    world = World(dict.fromkeys(DRAFTERS, 0.02), costs(small=0.5, large=0.5, verify=0.2))
    row = session(quiet, world.table)
    world.run(row, 360)
    tried = [s for s, choice in enumerate(world.choices) if choice.drafter != OFF and s > 30]
    assert {world.choices[step].reason for step in tried} == {"probe"}
    gaps = np.diff(tried)
    assert all(gaps[1:] > gaps[:-1])  # in vain: the pauses grow
    world.rates = dict.fromkeys(DRAFTERS, 0.95)
    world.run(row, 600)  # a pause is at most 8 * 32 steps
    assert OFF not in {choice.drafter for choice in world.choices[-50:]}


def test_off_costs_little_and_ends_when_drafting_pays() -> None:
    """With hazard and trials on, plain decoding is best here: 5% of its speed at most goes into
    looking.
    """
    world = World(dict.fromkeys(DRAFTERS, 0.02), costs(small=0.5, large=0.5, verify=0.2))
    row = session(POSTERIOR, world.table)
    assert world.run(row, 300) > 0.95 / world.table.plain_seconds
    world.rates = dict.fromkeys(DRAFTERS, 0.95)
    world.run(row, 100)
    assert OFF not in {choice.drafter for choice in world.choices[-50:]}


def test_without_probes_trials_and_hazard_off_lasts() -> None:
    still = replace(POSTERIOR, probe_every=0, hazard=0.0, explore_horizon=0.0)
    world = World(dict.fromkeys(DRAFTERS, 0.02), costs(small=0.5, large=0.5, verify=0.2))
    world.run(session(still, world.table), 300)
    assert {choice.drafter for choice in world.choices[-200:]} == {OFF}


@pytest.mark.parametrize("seed", range(3))
def test_follows_a_switch_in_the_text(seed: int) -> None:
    """After 80 steps the two drafters change places: within 25 steps the policy has gone along."""
    table = costs(small=0.05, large=0.05)
    world = World({"small": 0.85, "large": 0.1}, table, seed)
    row = session(POSTERIOR, table, prior(ngram=-3.0, small=1.5, large=-1.5))
    world.run(row, 80)
    assert [choice.drafter for choice in world.choices[40:80]].count(
        "small"
    ) >= 36  # a trial or two
    world.rates = {"small": 0.1, "large": 0.85}
    world.run(row, 60)
    assert [choice.drafter for choice in world.choices[105:]].count("large") >= 30


def test_a_good_prior_beats_none_and_a_wrong_one_is_unlearnt() -> None:
    rates = {"ngram": 0.1, "small": 0.4, "large": 0.85}
    table = costs(small=0.1, large=0.1)
    good = prior(**{name: math.log(rate / (1 - rate)) for name, rate in rates.items()})
    wrong = prior(ngram=1.7, small=0.4, large=-2.2)

    def speed(config: PolicyConfig, given: Prior | None) -> float:
        world = World(rates, table, seed=7)
        for _ in range(60):
            world.run(session(config, table, given), 25)
        return world.tokens / world.seconds

    best = max((1 - 0.85 ** (k + 1)) / 0.15 / table.step_seconds("large", k) for k in LENGTHS)
    with_router = speed(POSTERIOR, good)  # 1,500 steps: standard errors of about 2%
    assert with_router > 0.95 * best
    assert with_router > 1.05 * speed(POSTERIOR, None)
    assert speed(POSTERIOR, wrong) > 1.2 * speed(EVERY_POLICY["router_only"], wrong)


def texts(config: PolicyConfig, rates: dict[str, float], count: int, seed: int = 7) -> World:
    """So many texts of 25 steps each, one after the other, under one policy."""
    table = costs(small=0.1, large=0.1)
    world, policy = World(rates, table, seed=seed), config.build(table, DRAFTERS, 0)
    for number in range(count):
        world.run(policy.open(request(str(number))), 25)
    return world


def test_texts_begin_with_what_earlier_ones_have_shown() -> None:
    rates = {"ngram": 0.1, "small": 0.4, "large": 0.85}
    alone, remembered = (
        texts(replace(POSTERIOR, experience=number), rates, 60) for number in (0, 32)
    )
    first = [choice.drafter for choice in remembered.choices[25::25]]
    assert first.count("large") > 40
    speeds = [world.tokens / world.seconds for world in (alone, remembered)]
    assert speeds[1] > 1.04 * speeds[0], speeds


def test_experience_gives_way_to_what_texts_have_become() -> None:
    before, after = ({"ngram": 0.1, "small": a, "large": b} for a, b in ((0.85, 0.1), (0.1, 0.85)))
    table = costs(small=0.1, large=0.1)
    policy = replace(POSTERIOR, experience=4).build(table, DRAFTERS, 0)
    for rates, wanted in ((before, "small"), (after, "large")):
        world = World(rates, table, seed=3)
        for number in range(12):
            world.run(policy.open(request(str(number))), 25)
        late = [choice.drafter for choice in world.choices[150:]]
        assert late.count(wanted) > 0.85 * len(late)


def test_experience_is_of_one_law() -> None:
    table = costs(small=0.1, large=0.1)
    policy = replace(POSTERIOR, experience=32).build(table, DRAFTERS, 0)
    world = World({"ngram": 0.1, "small": 0.1, "large": 0.85}, table, seed=3)
    for number in range(8):
        world.run(policy.open(request(str(number))), 25)
    offers = dict.fromkeys(DRAFTERS, 16)
    sampled = replace(request("s"), sampling=Sampling(temperature=1.0))
    fresh = POSTERIOR.build(table, DRAFTERS, 0).open(sampled)
    assert policy.open(sampled).choose(offers) == fresh.choose(offers)
    assert policy.open(request("g")).choose(offers).drafter == "large"


def told(texts: Sequence[Belief] = (), given: Prior | None = None) -> Belief:
    """A belief about three drafters, the first of which may propose nothing."""
    return Belief(
        DRAFTERS,
        given,
        ["ngram"],
        texts,
        population_share=0.2,
        population_spread=1.0,
        hazard=0.0,
        likelihood_power=1.0,
    )


def text(accepted: int, drafted: int, times: int) -> Belief:
    """What a text has left in which the third drafter did so, and the first always proposed."""
    made = told()
    for _ in range(times):
        made.observe(2, accepted, drafted)
        assert made.matches is not None
        made.matches.observe(0, True)
    return made


def test_experience_is_the_law_that_made_earlier_texts_most_likely() -> None:
    chances = 1 / (1 + np.exp(-GRID))
    unseen, nothing = told([text(0, 0, 0)] * 9), told()
    assert np.allclose(unseen.posterior, nothing.posterior, atol=1e-3)
    assert unseen.matches is not None
    assert np.allclose(unseen.matches.chance, [MATCH_CHANCE, 1, 1])
    for count, most in {1: 0.42, 3: 0.3, 20: 0.13}.items():
        few = told([text(0, 4, 1)] * count)  # each shows next to nothing, together they show much
        assert few.posterior[2] @ chances < most
        assert np.allclose(few.posterior[:2], nothing.posterior[:2], atol=1e-3)
    both = told([text(8, 8, 9)] * 5 + [text(0, 8, 9)] * 5)
    assert np.allclose(both.posterior.sum(axis=1), 1)
    assert 0.4 < both.posterior[2] @ chances < 0.6
    between = (chances > 0.2) & (chances < 0.8)
    assert both.posterior[2][between].sum() < 0.15  # it is either, and nothing between
    assert both.matches is not None
    assert both.matches.chance[0] > 0.8


def test_a_routers_word_goes_for_a_text_of_what_texts_have_become() -> None:
    chances = 1 / (1 + np.exp(-GRID))
    flat = prior(ngram=0.0, small=0.0, large=0.0)
    same = replace(flat, sd=dict.fromkeys(DRAFTERS, 1.2))  # no word about this text
    good = replace(flat, mean={**flat.mean, "large": 1.0})
    assert np.allclose(told((), good).posterior, told([], good).posterior)
    texts = [text(0, 4, 2)] * 12
    silent, spoken = told(texts, same), told(texts, good)
    assert np.allclose(silent.posterior, silent.population)
    mean = silent.posterior[2] @ chances
    assert mean < 0.35  # and not the population's half
    assert mean + 0.02 < spoken.posterior[2] @ chances < told((), good).posterior[2] @ chances
    sure = replace(flat, mean={**flat.mean, "large": 9.0}, sd=dict.fromkeys(DRAFTERS, 0.0))
    assert np.isfinite(told(texts, sure).posterior).all()
    assert np.allclose(told(texts, sure).posterior.sum(axis=1), 1)


def test_reads_its_prior_and_says_so() -> None:
    row = session(POSTERIOR, costs(), prior(ngram=-3.0, small=2.0, large=-3.0))
    choice = row.choose(dict.fromkeys(DRAFTERS, 16))
    assert (choice.drafter, choice.reason) == ("small", "prior")
    assert choice.expected_tokens > 2
    assert choice.expected_seconds == pytest.approx(
        costs().step_seconds("small", choice.num_draft_tokens)
    )
    row.learn(record(0, choice, 2, choice.num_draft_tokens))
    assert row.choose(dict.fromkeys(DRAFTERS, 16)).reason == "data"


def test_a_non_finite_prior_is_no_prior() -> None:
    given = replace(prior(small=1.0), mean={"small": math.nan})
    choice = session(POSTERIOR, costs(), given).choose({"small": 8})
    assert math.isfinite(choice.expected_tokens)


def test_seconds_that_grow_with_the_text_shorten_nothing_by_themselves() -> None:
    """All parts three times slower than profiled: the same arm remains best."""
    rates, table = {"ngram": 0.1, "small": 0.8, "large": 0.3}, costs()
    row, world = session(POSTERIOR, table), World(rates, table, seed=2)
    world.run(row, 150)
    usual = [choice.num_draft_tokens for choice in world.choices[-50:]]
    world.table = replace(
        table,
        verify_seconds={width: 3 * s for width, s in table.verify_seconds.items()},
        draft_seconds={n: {k: 3 * s for k, s in t.items()} for n, t in table.draft_seconds.items()},
    )
    world.run(row, 150)
    slow = [choice.num_draft_tokens for choice in world.choices[-50:]]
    assert abs(np.mean(usual) - np.mean(slow)) < 2


def test_what_a_composites_part_drafts_is_learned_of_the_part_too() -> None:
    table = replace(costs(), first_token_seconds={"small": 5.0, "large": 5.0}, context_tokens=20)
    row = session(POSTERIOR, table)
    assert isinstance(row, PosteriorSession)
    before = row.belief.acceptance()
    choice = Choice("large", 4, "data")  # the composite; its part is in the pool as well
    row.learn(replace(record(0, choice, 0, 4), source="small"))
    after = row.belief.acceptance()
    assert after[0] == pytest.approx(before[0], abs=0.01)  # but for the hazard
    assert (after[1:] < before[1:] - 0.1).all()
    assert row.pricing.catch_up(20).tolist() == [0.0, 0.0, 0.0]  # one state, so both have read


@pytest.mark.parametrize("name", ["posterior", "thompson"])
def test_exact_offers_leave_no_doubt(name: str) -> None:
    """In decode.loop a lookup that finds nothing offers nothing. Whatever a drafter proposes, even
    nothing, says nothing there of how often it will.
    """
    config, choices = EVERY_POLICY[name], []
    for known in (prior(ngram=0.5), replace(prior(ngram=0.5), match_chance={"ngram": 0.1})):
        session = config.build(costs(), DRAFTERS, 0).open(request(prior=known))
        for step in range(40):
            choices.append(session.choose({"ngram": 16 * (step % 3 > 0), "small": 16}))
            drafted = choices[-1].num_draft_tokens * (step % 4 > 0)
            session.learn(record(step, choices[-1], drafted // 2, drafted))
    assert choices[:40] == choices[40:]
    assert any(choice.drafter == "ngram" for choice in choices[20:])


def test_a_lookup_that_is_asked_in_vain_is_priced_so() -> None:
    """It matches in a quarter of the steps, and then all of it is accepted; the model drafts three
    in four right. E[tokens] of the lookup's arm is 1 + K / 4.
    """
    table = costs(small=0.05)
    chosen: dict[bool, list[str]] = {}
    for told in (True, False):
        unsure = frozenset({"ngram"} if told else ())
        session = POSTERIOR.build(table, DRAFTERS, 0).open(replace(request(), unsure=unsure))
        chosen[told] = []
        for step in range(150):
            choice = session.choose({"ngram": 5, "small": 5})
            k = choice.num_draft_tokens
            if choice.drafter == "ngram":
                drafted = accepted = k if step % 4 == 0 else 0
            else:
                drafted, accepted = k, 3 * k // 4
            session.learn(
                record(step, choice, accepted, drafted, draft_seconds=table.draft("small", k))
            )
            chosen[told].append(choice.drafter)
        assert isinstance(session, PosteriorSession)
        if not told:
            continue
        index = session.prices.index["ngram"]
        found = session.belief.expected_tokens()[index, 5]
        sure = session.belief.posterior[index] @ session.belief.token_tables[index][:, 5]
        assert found < 1 + 0.6 * (sure - 1)
    assert chosen[True][50:].count("ngram") < 10
    assert chosen[False][50:].count("ngram") > 90


def test_the_chance_of_a_match_is_learned_and_forgotten() -> None:
    settings = {"population_share": 0.0, "population_spread": 1.0, "likelihood_power": 1.0}
    known = replace(prior(ngram=1.0, small=1.0), match_chance={"ngram": 0.8, "small": 0.1})
    belief = Belief(DRAFTERS, known, {"ngram", "large"}, hazard=0.1, **settings)
    assert belief.matches is not None
    assert belief.matches.chance == pytest.approx([0.8, 1.0, 0.5])  # `small` is known to draft
    before = belief.expected_tokens()
    assert before[:, 0] == pytest.approx(1.0)
    assert before[0, 3] == pytest.approx(1 + 0.8 * (before[1, 3] - 1))
    assert belief.posterior[0] @ belief.tokens_of(0)[:, 3] == pytest.approx(before[0, 3])
    for matched in (False, False, True):
        belief.matches.observe(0, matched)
    assert belief.matches.chance[0] == pytest.approx((0.8 * 2 + 1) / 5)
    for _ in range(200):
        belief.drift()
    assert belief.matches.chance[0] == pytest.approx(0.8)
    for impossible in (0.0, 1.0, math.nan):
        known = replace(known, match_chance={"ngram": impossible})
        matches = Belief(DRAFTERS, known, {"ngram"}, hazard=0.0, **settings).matches
        assert matches is not None
        assert 0 < matches.chance[0] < 1


def test_a_step_that_looked_up_in_vain_costs_what_it_was_priced_at() -> None:
    """It was as wide as one with drafts, so that its seconds say nothing of the profile."""
    table = costs(verify=0.1)
    session = POSTERIOR.build(table, DRAFTERS, 0).open(
        replace(request(), unsure=frozenset({"ngram"}))
    )
    assert isinstance(session, PosteriorSession)
    choice = Choice("ngram", 16, "data")
    seconds = {"verify_seconds": table.verify(17), "draft_seconds": table.draft("ngram", 16)}
    for step in range(30):
        session.learn(record(step, choice, 0, 0, **seconds))
    assert session.pricing.target_scale == pytest.approx(1.0)
    assert session.pricing.spent == pytest.approx(sum(seconds.values()) + 0.02, rel=0.3)


def test_a_trial_pays_for_all_that_it_must_read() -> None:
    """Reading takes 3 passes: more than a better drafter gains while a find lasts, though a twelfth
    of it would be less.
    """
    table, given = costs(small=0.05, verify=0.05), prior(ngram=0.5, small=0.4, large=-4.0)
    given = replace(given, sd={**given.sd, "small": 1.5})

    def trials(seconds: float) -> int:
        dear = replace(table, first_token_seconds={"small": seconds}, context_tokens=20)
        world = World({"ngram": 0.62, "small": 0.1}, dear)
        world.run(session(POSTERIOR, dear, given), 3)
        return sum(choice.drafter == "small" for choice in world.choices)

    assert trials(0.0) > 0
    assert trials(3.0) == 0


# -------------------------------------------------------------------------------------------- basel


def test_ucb1_tries_every_arm_then_prefers_the_best() -> None:
    world = World({"ngram": 0.1, "small": 0.9, "large": 0.1}, costs(), seed=4)
    row = session(replace(UCB1, exploration=0.1), world.table)
    world.run(row, 10)
    assert len({(choice.drafter, choice.num_draft_tokens) for choice in world.choices}) == 10
    world.run(row, 300)
    late = [choice.drafter for choice in world.choices[-100:]]
    assert late.count("small") > 60


def test_ucb1_keeps_what_it_learnt_only_where_told() -> None:
    for persist, reason in ((True, "data"), (False, "explore")):
        policy = replace(UCB1, persist=persist).build(costs(), DRAFTERS, 0)
        World(dict.fromkeys(DRAFTERS, 0.5), costs()).run(policy.open(request("a")), 40)
        assert policy.open(request("b")).choose(dict.fromkeys(DRAFTERS, 16)).reason == reason


def test_router_only_holds_one_arm_and_off_where_nothing_pays() -> None:
    config = EVERY_POLICY["router_only"]
    world = World({"large": 0.0}, costs())
    world.run(session(config, costs(), prior(ngram=-3.0, small=-3.0, large=3.0)), 20)
    assert {choice.drafter for choice in world.choices} == {"large"}
    nothing = costs(small=2.0, large=2.0, verify=2.0)
    choice = session(config, nothing, prior(ngram=-3.0, small=-3.0, large=-3.0)).choose(
        {"small": 5}
    )
    assert choice.drafter == OFF


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (FixedConfig(drafter="nobody", num_draft_tokens=3), "nobody"),
        (FixedConfig(drafter="small", num_draft_tokens=17), "17"),
        (replace(POSTERIOR, draft_lengths=[]), "draft_lengths"),
        (replace(POSTERIOR, hazard=1.5), "hazard"),
        (replace(THOMPSON, spread=0.0), "spread"),
        (replace(UCB1, draft_lengths=[0, 2]), "draft_lengths"),
    ],
)
def test_bad_settings_are_refused_by_name(config: PolicyConfig, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        config.build(costs(), DRAFTERS, seed=0)


def test_a_drafter_without_costs_is_refused() -> None:
    with pytest.raises(ValueError, match="stage=profile"):
        POSTERIOR.build(costs(), [*DRAFTERS, "new"], seed=0)


def test_choosing_and_learning_take_under_half_a_millisecond() -> None:
    """The budget of a step; the fastest tenth of 200 steps, so that a busy machine does not
    count.
    """
    row, spent = session(POSTERIOR, costs(), prior(ngram=0.0, small=1.0, large=1.0)), []
    for step in range(200):
        start = time.perf_counter()
        choice = row.choose(dict.fromkeys(DRAFTERS, 16))
        row.learn(record(step, choice, 0, choice.num_draft_tokens))
        spent.append(time.perf_counter() - start)
    assert sorted(spent)[20] < 5e-4

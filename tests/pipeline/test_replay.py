"""Bugs these tests would catch: a silence counted as a rejection or charged as a draft; the
recursion losing or double-counting a token; a draft of the last token; a policy scored at a price
it did not pay; an arm whose expected sums differ from the mean of its walks; an oracle that is
scored on what it was chosen on; intervals that are not paired, or claimed from one prompt.

Acceptance tables are drawn with a seed. Sums over a law are exact (1e-9); a mean of 400 walks is
held to 4 standard errors.
"""

import math
from collections.abc import Mapping
from dataclasses import astuple, replace

import numpy as np
import pytest
import torch

from decode.costs import Costs
from decode.policies.fixed import FixedConfig
from decode.policies.named import policy_config
from decode.types import OFF, Sampling, StepRecord
from drafters.training import expected_passes
from pipeline.intervals import ratio_of_rates, ratio_of_totals
from pipeline.leaderboard import BEST_FIXED, HINDSIGHT, ORACLE_ARM, Player, grid, play
from pipeline.replay import (
    PLAIN,
    Case,
    arm_tables,
    arm_totals,
    best_arm,
    draws,
    offered_lengths,
    realised,
    replay,
)
from pipeline.scores import Resampling, distinct_share, first_difference

COSTS = Costs(
    key="test",
    verify_seconds={1: 1.0, 9: 1.8},
    draft_seconds={"lookup": {1: 0.001, 8: 0.001}, "lm": {1: 0.1, 8: 0.8}},
    host_seconds=0.05,
    sampled_verify_seconds={1: 2.0, 9: 3.0},
    sampled_draft_seconds={"lookup": {1: 0.001, 8: 0.001}, "lm": {1: 0.2, 8: 1.6}},
)
LENGTHS = [1, 2, 5, 8]


def case(
    number: int = 0, tokens: int = 23, depth: int = 5, law: str = "sampled", **about: str
) -> Case:
    """Chances for a model that always proposes, and for a lookup that is silent at two of three
    starts.
    """
    generator = np.random.default_rng(number)
    lm = generator.uniform(0.2, 0.95, size=(tokens, depth))
    lookup = generator.uniform(0.5, 1.0, size=(tokens, depth))
    if law == "greedy":
        lm, lookup = (lm > 0.4).astype(float), (lookup > 0.6).astype(float)
    lookup[generator.random(tokens) < 2 / 3] = np.nan
    lookup[3, 2:] = np.nan  # a proposal that is cut short
    for start in range(tokens):  # nothing lies past the end
        lm[start, tokens - start :] = lookup[start, tokens - start :] = np.nan
    return Case(
        prompt_id=f"p{number}",
        split=about.get("split", "test"),
        domain=about.get("domain", "code"),
        text="",
        law=law,
        sampling=Sampling(temperature=0.0 if law == "greedy" else 0.8),
        num_prompt_tokens=7,
        num_tokens=tokens,
        accept={"lookup": lookup, "lm": lm},
    )


@pytest.mark.parametrize("law", ["greedy", "sampled"])
@pytest.mark.parametrize("tokens", [1, 2, 5, 23])
def test_expected_passes_are_those_of_the_acceptance_artifact(law: str, tokens: int) -> None:
    one = case(4, tokens, law=law) if tokens > 3 else tiny_case(tokens, law)
    totals = arm_totals(one, COSTS, LENGTHS)
    for name in one.accept:
        for k in LENGTHS:
            assert totals[(name, k)].passes == pytest.approx(
                expected_passes(torch.from_numpy(one.accept[name][:, :k]))
            )


def tiny_case(tokens: int, law: str) -> Case:
    return Case("p", "test", "d", "", law, Sampling(), 3, tokens, {"lm": np.full((tokens, 5), 0.5)})


def test_many_answers_at_once_are_each_answer_alone() -> None:
    """Lengths and laws mixed, one answer shorter than a draft."""
    many = [case(n, tokens=5 + 3 * n, law=("greedy", "sampled")[n % 2]) for n in range(7)]
    short = {name: table[:1] for name, table in many[0].accept.items()}
    many.append(replace(many[0], num_tokens=1, accept=short))
    for one, table in zip(many, arm_tables(many, COSTS, LENGTHS), strict=True):
        alone = arm_totals(one, COSTS, LENGTHS)
        assert list(table) == list(alone)
        for arm, found in table.items():
            assert astuple(found) == pytest.approx(astuple(alone[arm]), rel=1e-12)


@pytest.mark.parametrize("arm", [("lm", 1), ("lm", 5), ("lookup", 2), ("lookup", 8)])
def test_expected_sums_are_the_mean_of_walks(arm: tuple[str, int]) -> None:
    one = case(1)
    policy = FixedConfig(drafter=arm[0], num_draft_tokens=arm[1]).build(None, list(one.accept), 0)
    walks = [replay(one, policy, COSTS, draws(one, 5, repeat)) for repeat in range(400)]
    expected = arm_totals(one, COSTS, LENGTHS)[arm]
    for name in ("passes", "seconds", "draft_seconds", "steps_off"):
        values = np.array([getattr(walk, name) for walk in walks])
        error = values.std() / math.sqrt(len(values)) + 1e-9
        assert abs(values.mean() - getattr(expected, name)) < 4 * error, name


@pytest.mark.parametrize("law", ["greedy", "sampled"])
def test_a_walk_is_its_realised_case_exactly(law: str) -> None:
    one = case(2, law=law)
    outcomes = draws(one, 9, 1)
    table = arm_totals(realised(one, outcomes), COSTS, LENGTHS)
    for arm, totals in table.items():
        policy = FixedConfig(drafter=arm[0], num_draft_tokens=arm[1]).build(
            None, list(one.accept), 0
        )
        walk = replay(one, policy, COSTS, outcomes)
        assert (walk.passes, walk.steps_off) == (totals.passes, totals.steps_off)
        assert walk.seconds == pytest.approx(totals.seconds, abs=1e-9)


def test_silence_costs_a_plain_step() -> None:
    one = case(3)
    silent = {"lookup": np.full_like(one.accept["lookup"], np.nan), "lm": one.accept["lm"]}
    totals = arm_totals(
        Case("p", "test", "d", "", "greedy", Sampling(), 7, 23, silent), COSTS, LENGTHS
    )
    assert totals[("lookup", 5)].seconds == pytest.approx(totals[PLAIN].seconds)
    assert totals[("lookup", 5)].steps_off == 23


def test_the_last_token_is_never_drafted() -> None:
    accept = np.full((4, 3), 0.5)
    assert offered_lengths(accept).tolist() == [3, 2, 1, 0]
    accept[0, 1] = np.nan
    assert offered_lengths(accept).tolist() == [1, 2, 1, 0]


def test_greedy_repeats_are_equal_and_sampled_ones_differ() -> None:
    for law, same in (("greedy", True), ("sampled", False)):
        one = case(6, law=law)
        first, second = draws(one, 0, 0), draws(one, 0, 1)
        assert all((first[name] == second[name]).all() for name in first) == same
        again = draws(one, 0, 0)
        assert all((first[name] == again[name]).all() for name in first)


@pytest.mark.parametrize("name", ["posterior", "thompson", "thompson_flat", "ucb1", "router_only"])
def test_policies_walk_the_whole_text_at_the_sampled_prices(name: str) -> None:
    one, steps = case(8, tokens=40), list[StepRecord]()
    policy = policy_config(name).build(COSTS, list(one.accept), 0)
    totals = replay(one, policy, COSTS, draws(one, 1, 0), record=steps.append)
    assert sum(step.num_emitted for step in steps) == totals.tokens == 40
    sampled = COSTS.under(one.sampling)
    priced = [sampled.step_seconds(step.drafter, step.num_drafted) for step in steps]
    assert [step.seconds for step in steps] == pytest.approx(priced)
    assert totals.seconds == pytest.approx(sum(priced))


def test_the_best_arm_may_be_off_only_where_allowed() -> None:
    tables = [arm_totals(case(n), COSTS, LENGTHS) for n in range(4)]
    dear = [arm_totals(case(n), dear_costs(), LENGTHS) for n in range(4)]
    assert best_arm(tables, allow_off=True) != PLAIN
    assert best_arm(dear, allow_off=True) == PLAIN
    assert best_arm(dear, allow_off=False)[0] in ("lm", "lookup")


def dear_costs() -> Costs:
    return Costs(
        key="dear",
        verify_seconds={1: 1.0, 2: 9.0, 9: 9.0},
        draft_seconds={"lookup": {1: 9.0}, "lm": {1: 9.0}},
        host_seconds=0.0,
    )


def test_a_drafter_without_finite_costs_is_never_best() -> None:
    nan = Costs(
        key="nan",
        verify_seconds={1: 1.0, 9: 1.0},
        draft_seconds={"lookup": {1: 0.0}, "lm": {1: math.nan}},
        host_seconds=0.0,
    )
    assert best_arm([arm_totals(case(1), nan, LENGTHS)], allow_off=False)[0] == "lookup"


def leaderboard(cases: list[Case]) -> Mapping[tuple[str, str, str], dict]:
    names = ["lookup", "lm"]
    players = [
        Player("policy", lambda: policy_config("posterior").build(COSTS, names, 0), lambda c: None),
        Player("ucb1", lambda: policy_config("ucb1").build(COSTS, names, 0), lambda c: None),
    ]
    fixed = {"greedy": ("lm", 2), "sampled": ("lm", 1)}
    rows = play(cases, players, fixed, COSTS, LENGTHS, Resampling(100, 0))
    return {(row["law"], row["domain"], row["policy"]): row for row in rows}


def test_the_leaderboard_groups_and_orders() -> None:
    cases = [case(n, law=law) for n in range(6) for law in ("greedy", "sampled")]
    cases += [case(n, split="mixed", domain="other") for n in range(6, 8)]
    rows = leaderboard(cases)
    assert {key[:2] for key in rows} == {
        ("greedy", "all"),
        ("greedy", "code"),
        ("sampled", "all"),
        ("sampled", "code"),
        ("sampled", "mixed"),
    }
    for law in ("greedy", "sampled"):
        at = {
            name: rows[(law, "all", name)] for name in (BEST_FIXED, ORACLE_ARM, "plain", "policy")
        }
        assert at["plain"]["speed_ratio"]["value"] == pytest.approx(1.0)
        assert at[BEST_FIXED]["ratio_to_best_fixed"]["value"] == pytest.approx(1.0)
        assert at["plain"]["share_of_steps_off"] == 1.0
    # exact hindsight at temperature 0: no fixed arm can beat the best arm of each prompt
    exact = {
        name: rows[("greedy", "all", name)]["tokens_per_second"]
        for name in (ORACLE_ARM, HINDSIGHT, BEST_FIXED)
    }
    assert exact[ORACLE_ARM] >= exact[HINDSIGHT] >= exact[BEST_FIXED]


def test_an_oracle_without_information_gains_nothing() -> None:
    """All arms' chances are equal: what a first realisation favoured is luck, and not to be
    scored.
    """
    flat = [
        Case(
            f"p{n}",
            "test",
            "d",
            "",
            "sampled",
            Sampling(temperature=1.0),
            3,
            40,
            {name: np.full((40, 4), 0.5) for name in ("lookup", "lm")},
        )
        for n in range(40)
    ]
    even = Costs(
        key="even",
        verify_seconds={1: 1.0, 9: 1.0},
        draft_seconds={"lookup": {1: 0.0}, "lm": {1: 0.0}},
        host_seconds=0.0,
    )
    rows = play(flat, [], {"sampled": ("lm", 4)}, even, [4], Resampling(200, 0))
    oracle = next(row for row in rows if row["policy"] == ORACLE_ARM and row["domain"] == "all")
    assert oracle["ratio_to_best_fixed"]["low"] < 1.0 < oracle["ratio_to_best_fixed"]["high"]


def test_the_grid_says_what_pays() -> None:
    rows = grid([case(n) for n in range(5)], COSTS, LENGTHS, Resampling(100, 0))
    assert {(r["drafter"], r["num_draft_tokens"]) for r in rows} == {
        PLAIN,
        *((name, k) for name in ("lookup", "lm") for k in LENGTHS),
    }
    for row in rows:
        faster = row["acceptance_length"] / row["break_even_length"]
        assert row["speed_ratio"]["value"] == pytest.approx(faster)
        assert (row["drafter"] == OFF) == (row["share_of_steps_off"] == 1.0)


# ------------------------------------------------------------------------------------------- interv


def test_paired_intervals_cancel_what_prompts_share() -> None:
    generator = np.random.default_rng(0)
    seconds = generator.uniform(1, 9, 40)  # prompts differ ninefold, the methods by a tenth
    tokens = np.full(40, 20.0)
    found = ratio_of_rates(tokens, seconds, tokens, 1.1 * seconds, 500, 0)
    assert found.value == pytest.approx(1.1)
    assert found.high - found.low < 1e-9
    alone = ratio_of_totals(tokens, seconds, 500, 0)
    assert alone.high - alone.low > 0.1 * alone.value


def test_an_interval_needs_two_prompts() -> None:
    one = ratio_of_totals([3.0], [2.0], 100, 0)
    assert one.value == 1.5
    assert math.isnan(one.low)
    assert ratio_of_totals([], [], 100, 0).num == 0


def test_intervals_cover_the_truth() -> None:
    """The true ratio of rates is 2; of 100 experiments some 95 cover it (binomial: 88 or more)."""
    generator, hits = np.random.default_rng(3), 0
    for _ in range(100):
        base = generator.gamma(4, 1, 30)
        ours = base / 2 * generator.lognormal(0, 0.2, 30) / math.exp(0.02)
        found = ratio_of_rates(np.ones(30), ours, np.ones(30), base, 400, 0)
        hits += found.low <= 2 <= found.high
    assert hits >= 86


def test_distinct_share_and_first_difference() -> None:
    assert distinct_share([list(range(20))]) == 1.0
    assert distinct_share([[1, 2] * 10]) == pytest.approx(2 / 13)
    assert math.isnan(distinct_share([[1, 2, 3]]))
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 9, 3], [1, 2, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2

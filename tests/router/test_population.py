"""Would catch: counting noise read as a difference between prompts, the ease of prompts that reach
deep drafts read as an effect of depth, a sampled answer given the greedy belief, a drafter seen
once believed at once; a lookup that is asked in vain taken for one that is rejected.

Tolerances are some three standard errors of 200 prompts with 60 tokens: 0.15 logits for a mean,
0.12 for an sd, 0.2 for a depth's offset.
"""

import dataclasses

import numpy as np
import pytest
import torch
from world import draw_accept, make_examples, make_rows

from router.examples import collect_examples
from router.population import centre_of, fit_population

BLANK = make_rows(0, informative=True)[0]


def prompts(
    rng, mean, sd, *, count=200, num_tokens=60, depth=4, drop=0.3, temperature=0.0, **changes
):
    return [
        dataclasses.replace(
            BLANK,
            prompt_id=f"{temperature}-{i}",
            temperature=temperature,
            accept=draw_accept(rng, mean + sd * rng.normal(), num_tokens, depth, drop),
            **changes,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize(("mean", "sd"), [(0.5, 0.3), (-1.0, 0.8), (1.5, 1.2)])
def test_known_mean_spread_and_depths_are_found(mean, sd):
    rows = prompts(np.random.default_rng(1), mean, sd)
    population = fit_population(collect_examples(rows))
    found = centre_of(population.log_odds[0], population.sd[0])
    assert float(found) == pytest.approx(mean, abs=0.15 + 0.1 * sd)
    assert float(population.sd[0, 0]) == pytest.approx(sd, abs=0.12 + 0.1 * sd)
    assert population.depth_offsets[0, 0].tolist() == pytest.approx([0, -0.3, -0.6, -0.9], abs=0.2)


def test_equal_prompts_are_not_told_apart():
    rows = prompts(np.random.default_rng(2), 0.3, 0.0, num_tokens=30)
    assert float(fit_population(collect_examples(rows)).sd[0, 0]) < 0.2


def test_depths_never_reached_follow_the_one_before():
    rows = prompts(np.random.default_rng(3), 0.3, 0.2, depth=6)
    for row in rows:
        row.accept[:, 2:] = np.nan
    offsets = fit_population(collect_examples(rows)).depth_offsets[0, 0]
    assert offsets[1] < 0
    assert offsets[2:].tolist() == pytest.approx([float(offsets[1])] * 4)


def test_each_temperature_has_its_belief_and_those_between_are_mixed():
    rng = np.random.default_rng(4)
    rows = prompts(rng, 1.0, 0.2) + prompts(rng, -1.0, 0.2, temperature=0.8)
    population = fit_population(collect_examples(rows))
    asked = torch.tensor([0.0, 0.4, 0.8, 2.0], dtype=torch.float64)
    log_odds, sd, offsets = population.at(asked)
    assert log_odds[:, 0].tolist() == pytest.approx([1, 0, -1, -1], abs=0.15)
    assert float(log_odds[1]) == pytest.approx(float((log_odds[0] + log_odds[2]) / 2))
    assert sd.shape == (4, 1)
    assert offsets.shape == (4, 1, 4)


def test_one_law_serves_every_temperature():
    population = fit_population(collect_examples(prompts(np.random.default_rng(5), 0.4, 0.2)))
    log_odds, _, _ = population.at(torch.tensor([0.0, 0.7], dtype=torch.float64))
    assert log_odds[0] == log_odds[1]


def test_a_drafter_hardly_seen_is_drawn_towards_the_others():
    rows = prompts(np.random.default_rng(6), -1.0, 0.2)
    lucky = dataclasses.replace(rows[0], drafter="lucky", accept=np.ones((3, 4), dtype=np.float32))
    never = dataclasses.replace(
        rows[0], drafter="never", accept=np.full((3, 4), np.nan, dtype=np.float32)
    )
    population = fit_population(collect_examples([*rows, lucky, never]))
    known, seen_once, unseen = population.log_odds[0].tolist()
    assert known < seen_once < 0.5
    assert unseen == pytest.approx(known, abs=0.1)
    assert torch.isfinite(population.depth_offsets).all()
    assert float(population.sd[0, 2]) == pytest.approx(0.6, abs=0.05)


def test_acceptance_of_all_or_nothing_stays_finite():
    rows = prompts(np.random.default_rng(7), 40.0, 0.0, drop=0.0)
    rows += prompts(np.random.default_rng(7), -40.0, 0.0, drop=0.0, drafter="bad")
    population = fit_population(collect_examples(rows))
    assert population.log_odds[0, 0] > 4
    assert population.log_odds[0, 1] < -4
    assert torch.isfinite(population.depth_offsets).all()


def test_the_two_laws_of_the_world_differ():
    population = fit_population(make_examples(0, informative=False))
    assert (population.log_odds[0] - population.log_odds[1]).tolist() == pytest.approx(
        [0.3, 0.3], abs=0.15
    )


def test_how_often_a_drafter_proposes_is_found_by_temperature():
    rng = np.random.default_rng(5)
    rows = []
    for temperature, share in ((0.0, 0.7), (0.8, 0.2)):
        some = prompts(rng, 0.5, 0.3, temperature=temperature)
        for row in some:
            row.accept[rng.random(len(row.accept)) >= share] = np.nan
        rows += [dataclasses.replace(row, drafter="lookup") for row in some]
        rows += prompts(rng, 0.5, 0.3, temperature=temperature, drafter="small")
    population = fit_population(collect_examples(rows, ("lookup", "small")))
    # 12,000 starts: three standard errors are 0.013.
    assert population.match_chance[:, 0].tolist() == pytest.approx([0.7, 0.2], abs=0.013)
    assert population.match_chance[:, 1].tolist() == pytest.approx([1.0, 1.0], abs=2e-3)
    between = population.match_chance_at(torch.tensor([0.4, 2.0], dtype=torch.float64))
    assert between[:, 0].tolist() == pytest.approx([0.45, 0.2], abs=0.013)


def test_a_drafter_asked_once_is_not_believed_to_match_always():
    row = dataclasses.replace(BLANK, drafter="lookup", accept=np.ones((1, 1), np.float32))
    (chance,) = fit_population(collect_examples([row], ("lookup",))).match_chance[0].tolist()
    assert 0.5 < chance < 0.6


def test_an_answer_without_a_proposal_is_no_rejection():
    rows = prompts(np.random.default_rng(6), 1.0, 0.3, count=50)
    silent = [dataclasses.replace(row, prompt_id=f"silent {row.prompt_id}") for row in rows]
    silent = [dataclasses.replace(r, accept=np.full_like(r.accept, np.nan)) for r in silent]
    told = fit_population(collect_examples([*rows, *silent]))
    assert told.log_odds.tolist() == fit_population(collect_examples(rows)).log_odds.tolist()
    assert told.match_chance[0].tolist() == pytest.approx([0.5], abs=1e-3)

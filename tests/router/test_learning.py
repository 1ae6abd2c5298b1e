"""Would catch: a router that learns nothing, one that claims what prompts do not tell, a shuffled
control that wins, calibration that makes things worse, tokens of prompts without a proposal
counted, weights that depend on anything but the seed, an interval of unpaired differences, a
baseline that looks across laws.

Margins: in the informative world topics explain some 0.06 nats a token of 0.69; a router must find
half. Where nothing can be learned it may lose 0.002 nats, three times what six seeds showed.
"""

import numpy as np
import pytest
import torch
from world import HashEncoder, make_examples

from pipeline.train_router import shuffled
from router.calibration import (
    Calibration,
    acceptance_error,
    brier,
    expected_calibration_error,
    fit_calibration,
    reliability,
    token_nll,
)
from router.examples import Examples
from router.head import Batch, HeadSettings, mean_nll
from router.model import FittedRouter, example_features, fit_router
from router.neighbours import Neighbours, fit_neighbours, unit
from router.report import compare

SETTINGS = HeadSettings(
    hidden=32, penalties=[0.01, 0.1], learning_rate=0.02, max_steps=120, patience=25
)
ENCODER = HashEncoder()


def embed(examples: Examples) -> torch.Tensor:
    return ENCODER.encode(list(examples.texts))


def fit(examples: Examples, seed: int = 0, shuffle: bool = False) -> FittedRouter:
    train, validation = examples.split("router_train"), examples.split("validation")
    if shuffle:
        train, validation = shuffled(train, seed), shuffled(validation, seed + 1)
    return fit_router(train, embed(train), validation, embed(validation), SETTINGS, seed)


def predict(fitted: FittedRouter, part: Examples) -> tuple[torch.Tensor, torch.Tensor]:
    return fitted.model.predict(embed(part), example_features(part), part.temperatures)


def methods(examples: Examples, seed: int) -> tuple[Examples, dict[str, torch.Tensor]]:
    test = examples.split("test")
    fitted = fit(examples, seed)
    return test, {
        "router": predict(fitted, test)[0],
        "population": fitted.model.population.at(test.temperatures)[0],
        "shuffled": predict(fit(examples, seed, shuffle=True), test)[0],
    }


@pytest.mark.parametrize("seed", [0, 1])
def test_where_topics_decide_the_router_beats_the_population_and_its_control(seed):
    test, predictions = methods(make_examples(seed, informative=True), seed)
    result = compare(predictions, test, 400, seed)
    gain = result["router_minus"]["population"]
    assert gain["nll"]["high"] < -0.03
    assert gain["acceptance_error"]["high"] < -0.03
    assert result["router_minus"]["shuffled"]["nll"]["high"] < -0.03
    assert result["methods"]["router"]["nll"] > result["hindsight_nll"]
    assert result["methods"]["router"]["calibration_error"] < 0.04
    control = result["methods"]["shuffled"]["nll"] - result["methods"]["population"]["nll"]
    assert abs(control) < 0.006  # its labels are wrong: it may be unlucky, not useful


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_where_nothing_can_be_learned_the_router_is_the_population(seed):
    test, predictions = methods(make_examples(seed, informative=False), seed)
    gain = compare(predictions, test, 400, seed)["router_minus"]["population"]["nll"]
    assert abs(gain["difference"]) < 0.002
    assert gain["high"] > 0  # no claim of a gain


def test_the_spread_it_reports_is_the_spread_there_is():
    examples = make_examples(3, informative=True)
    _, sd = predict(fit(examples), examples.split("test"))
    assert (
        (sd > 0.2) & (sd < 0.75)
    ).all()  # 0.35 was put in, and the topics are not known for sure


def test_far_from_all_training_prompts_it_is_less_sure():
    examples = make_examples(4, informative=True)
    fitted, test = fit(examples), examples.split("test")
    features, temperatures = example_features(test), test.temperatures
    _, near = fitted.model.predict(embed(test), features, temperatures)
    _, far = fitted.model.predict(-40 * embed(test), features, temperatures)
    assert (far.mean(0) > near.mean(0)).all()
    assert far.max() < 3  # unsure, not absurd


def test_equal_seeds_give_equal_weights():
    examples = make_examples(5, informative=True)
    first, second, other = fit(examples, 1), fit(examples, 1), fit(examples, 2)
    ours, theirs = first.model.head.state_dict(), second.model.head.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(first.model.sd, second.model.sd)
    assert not torch.equal(ours["first.weight"], other.model.head.state_dict()["first.weight"])


def test_the_step_that_validated_best_is_the_one_kept():
    examples = make_examples(8, informative=False)
    fitted = fit(examples)
    losses = [row["validation_nll"] for row in fitted.trained.history]
    assert losses[fitted.trained.step] == min(losses)
    validation = examples.split("validation")
    base, _, _ = fitted.model.population.at(validation.temperatures)
    inputs = fitted.model.standardiser(embed(validation), example_features(validation))
    batch = Batch(inputs, base, validation.successes, validation.trials)
    kept = float(mean_nll(base + fitted.model.head(inputs), batch))
    assert kept == pytest.approx(min(losses), abs=1e-9)


def test_a_prompt_without_a_proposal_has_no_say():
    base = torch.zeros(3, 2, dtype=torch.float64)
    trials = torch.tensor([[10.0, 0], [20, 0], [0, 0]], dtype=torch.float64)
    batch = Batch(base, base, trials / 2, trials)
    changed = torch.tensor([[0.0, 9], [0, 9], [9, 9]], dtype=torch.float64)
    assert mean_nll(base, batch) == mean_nll(changed, batch)
    assert torch.isfinite(mean_nll(base, batch))


def overconfident(seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    correction = torch.randn(150, 3, generator=generator, dtype=torch.float64)
    base = torch.full_like(correction, 0.4)
    trials = torch.full_like(correction, 80.0)
    successes = torch.binomial(trials, torch.sigmoid(base + 0.5 * correction + 0.2), generator)
    return base, 4 * correction, successes, trials


def test_calibration_mends_an_overconfident_network():
    base, correction, *counts = overconfident(0)
    calibration = fit_calibration(base, correction, *counts)
    assert calibration.slope.tolist() == pytest.approx([0.125] * 3, abs=0.03)
    held_base, held_correction, *held = overconfident(1)
    before, after = held_base + held_correction, calibration(held_base, held_correction)
    assert (
        expected_calibration_error(after, *held) < 0.02 < expected_calibration_error(before, *held)
    )
    assert token_nll(after, *held) < token_nll(before, *held)
    assert brier(after, *held) < brier(before, *held)


def test_calibration_never_turns_a_correction_round():
    base, correction, *counts = overconfident(2)
    calibration = fit_calibration(base, -correction, *counts)
    assert calibration.slope.tolist() == [0, 0, 0]


def test_without_evidence_calibration_is_the_population():
    base, correction, *_ = overconfident(3)
    nothing = torch.zeros_like(base)
    calibration = fit_calibration(base, correction, nothing, nothing)
    assert calibration == Calibration(calibration.slope, calibration.bias)
    assert torch.equal(calibration(base, correction), base)


def test_measures_of_a_case_done_by_hand():
    log_odds = torch.logit(torch.tensor([[0.25, 0.75], [0.25, 0.75]], dtype=torch.float64))
    trials = torch.tensor([[4.0, 8.0], [4.0, 0.0]], dtype=torch.float64)
    successes = torch.tensor([[1.0, 4.0], [3.0, 0.0]], dtype=torch.float64)
    counts = successes, trials
    assert acceptance_error(log_odds, *counts) == pytest.approx((0 + 2 + 2) / 16)
    assert expected_calibration_error(log_odds, *counts) == pytest.approx((2 + 2) / 16)
    squares = 1 * 0.75**2 + 3 * 0.25**2 + 3 * 0.75**2 + 1 * 0.25**2 + 4 * 0.25**2 + 4 * 0.75**2
    assert brier(log_odds, *counts) == pytest.approx(squares / 16)
    rows = reliability(log_odds, *counts)
    assert [row["tokens"] for row in rows] == [8, 8]
    assert [row["counted"] for row in rows] == pytest.approx([0.5, 0.5])


def test_neighbours_look_at_their_own_law_only():
    examples = make_examples(6, informative=True)
    train, validation = examples.split("router_train"), examples.split("validation")
    population = fit(examples).model.population
    nearest = Neighbours(unit(embed(train)), train, population, 1, 0.0)
    for place in (0, 1, 7):  # its own nearest neighbour is the prompt itself, under the same law
        one = train.take(np.array([place]))
        rate = torch.sigmoid(nearest.log_odds(embed(one), one.temperatures))
        twins = (train.texts == train.texts[place]) & (
            train.temperatures == one.temperatures
        ).numpy()
        assert twins.sum() == 1
        expected = one.successes / one.trials
        assert rate[0].tolist() == pytest.approx(expected[0].tolist(), abs=0.01)
    tuned = fit_neighbours(
        train, embed(train), validation, embed(validation), population, [1, 5, 500]
    )
    test = examples.split("test")
    counts = test.successes, test.trials
    ours = token_nll(tuned.log_odds(embed(test), test.temperatures), *counts)
    assert ours < token_nll(population.at(test.temperatures)[0], *counts) - 0.03


def test_equal_methods_differ_by_nothing_and_intervals_are_paired():
    examples = make_examples(7, informative=True).split("test")
    flat = torch.zeros_like(examples.trials)
    result = compare(
        {"router": flat + 0.1, "same": flat + 0.1, "worse": flat + 1.0}, examples, 200, 0
    )
    same = result["router_minus"]["same"]["nll"]
    assert (same["difference"], same["low"], same["high"]) == (0, 0, 0)
    worse = result["router_minus"]["worse"]
    for name, values in worse.items():
        assert values["low"] <= values["difference"] <= values["high"], name
    gap = result["methods"]["router"]["nll"] - result["methods"]["worse"]["nll"]
    assert worse["nll"]["difference"] == pytest.approx(gap)
    gap = (
        result["methods"]["router"]["calibration_error"]
        - result["methods"]["worse"]["calibration_error"]
    )
    assert worse["calibration_error"]["difference"] == pytest.approx(gap)

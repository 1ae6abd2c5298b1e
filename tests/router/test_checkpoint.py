"""Would catch: numbers that change on the way through the disk, a router used with another encoder,
pool or version, the wrong drafter's belief under a name, a temperature that is ignored, a prior
whose mean is not on the scale its sd is meant for.

Tensors are read back bit for bit; what is computed from them depends on where they lie in memory
(1e-12).
"""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_learning import fit
from world import HashEncoder, make_examples

from decode.types import Router, Sampling
from router.checkpoint import CONFIG, WEIGHTS, load_population, load_router, save_router
from router.features import feature_matrix

TEXTS = ["def return loop", "dinner with a friend", "", "sum of 3 apples? " * 200]
GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.8)


@pytest.fixture(scope="module")
def model():
    return fit(make_examples(0, informative=True)).model


@pytest.fixture
def folder(model, tmp_path):
    save_router(
        tmp_path, model, ("lookup", "small"), {"name_or_path": "some/encoder"}, "hash-encoder"
    )
    return tmp_path


def test_tensors_come_back_bit_for_bit(model, folder):
    again = load_router(folder, HashEncoder()).model
    assert torch.equal(again.covariance, model.covariance)
    assert torch.equal(again.sd, model.sd)
    for name in ("population", "standardiser", "calibration"):
        ours, theirs = vars(getattr(model, name)), vars(getattr(again, name))
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    weights = again.head.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in model.head.state_dict().items())


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, Sampling(temperature=0.3)])
@pytest.mark.parametrize("text", TEXTS)
def test_a_saved_router_says_the_same(model, folder, text, sampling):
    encoder = HashEncoder()
    router = load_router(folder, encoder)
    assert isinstance(router, Router)
    prior = router.prior(text, 11, sampling)
    temperature = torch.tensor([sampling.temperature], dtype=torch.float64)
    features = feature_matrix([text], [11], [sampling.temperature])
    log_odds, sd = model.predict(encoder.encode([text]), features, temperature)
    assert list(prior.sd.values()) == pytest.approx(sd[0].tolist(), rel=1e-12)
    for name, value, spread in zip(
        ("lookup", "small"), log_odds[0].tolist(), sd[0].tolist(), strict=True
    ):
        assert prior.mean[name] == pytest.approx(value * math.sqrt(1 + math.pi / 8 * spread**2))
    assert prior.source == "router"
    _, _, offsets = model.population.at(temperature)
    known = dict(zip(("lookup", "small"), offsets[0].tolist(), strict=True))
    assert known["lookup"] != known["small"]
    assert {name: list(row) for name, row in prior.depth_offsets.items()} == known
    matching = model.population.match_chance_at(temperature)[0].tolist()
    assert list(prior.match_chance.values()) == matching
    assert 0.5 < prior.match_chance["lookup"] < 0.7  # of world.py: 0.6
    assert prior.match_chance["small"] > 0.98
    assert (
        set(prior.mean)
        == set(prior.population_sd)
        == set(prior.depth_offsets)
        == {"lookup", "small"}
    )
    assert all(offsets[0] == 0 and len(offsets) == 4 for offsets in prior.depth_offsets.values())
    assert all(type(value) is float for value in prior.mean.values())


def test_the_mean_acceptance_of_a_prior_is_the_predicted_one(folder):
    router = load_router(folder, HashEncoder())
    prior = router.prior(TEXTS[0], 11, GREEDY)
    draws = torch.randn(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for name in prior.mean:
        rate = torch.sigmoid(prior.mean[name] + prior.sd[name] * draws).mean()
        log_odds = prior.mean[name] / math.sqrt(1 + math.pi / 8 * prior.sd[name] ** 2)
        assert float(rate) == pytest.approx(1 / (1 + math.exp(-log_odds)), abs=0.005)


def test_a_prompt_of_code_is_told_from_a_chat(folder):
    router = load_router(folder, HashEncoder())
    code = router.prior("def return class import loop", 30, GREEDY)
    chat = router.prior("friend holiday letter music story", 30, GREEDY)
    assert code.mean["lookup"] > code.population_mean["lookup"] > chat.mean["lookup"]
    assert code.population_mean == chat.population_mean


def test_the_population_needs_no_encoder_and_ignores_the_text(folder):
    population = load_population(folder)
    prior = population.prior("anything", 3, SAMPLED)
    assert prior == population.prior("else", 99, SAMPLED)
    assert prior.source == "population"
    assert prior.mean == prior.population_mean
    assert prior.sd == prior.population_sd
    learned = load_router(folder, HashEncoder()).prior("anything", 3, SAMPLED)
    assert learned.population_mean == prior.mean
    assert population.prior("", 1, GREEDY).mean["small"] > prior.mean["small"]


def test_another_encoder_is_refused(folder):
    with pytest.raises(
        ValueError, match=r"some/encoder \(digest hash-encoder\).*given has digest other;"
    ):
        load_router(folder, HashEncoder(digest="other"))


def test_another_pool_is_refused_and_another_order_is_not(folder):
    assert load_router(folder, HashEncoder(), ("small", "lookup")).drafters == ("lookup", "small")
    for names in (("lookup",), ("lookup", "small", "new")):
        with pytest.raises(
            ValueError, match="knows the drafters lookup, small, but the pool holds"
        ):
            load_router(folder, HashEncoder(), names)


@pytest.mark.parametrize("key", ["schema_version", "feature_version"])
def test_another_version_is_refused(folder, key):
    config = json.loads((folder / CONFIG).read_text())
    ours = config[key]
    (folder / CONFIG).write_text(json.dumps({**config, key: 99}))
    with pytest.raises(
        ValueError, match=f"has {key}=99, this version reads {ours}; run stage=train_router"
    ):
        load_router(folder, HashEncoder())


def test_damaged_files_end_in_one_sentence(folder):
    tensors = load_file(folder / WEIGHTS)
    extra = {**tensors, "head.other": torch.zeros(2)}
    short = {name: value for name, value in tensors.items() if name != "sd"}
    for wrong in (extra, short):
        save_file(wrong, folder / WEIGHTS)
        with pytest.raises(
            ValueError, match=r"model.safetensors holds other tensors than a router"
        ):
            load_router(folder, HashEncoder())
    (folder / WEIGHTS).write_bytes(b"\x00" * 40)
    with pytest.raises(ValueError, match="cannot be read"):
        load_router(folder, HashEncoder())
    (folder / CONFIG).unlink()
    with pytest.raises(
        ValueError, match=r"is not a router: it has no config.json; run stage=train_router"
    ):
        load_router(folder, HashEncoder())

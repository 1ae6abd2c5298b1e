"""Would catch: prompts given to the drafter that accepts them worst, or one prompt to two; a member
that starves; prompts shared out by the luck of one text, or measured on what a member has learned
from; shares drawn anew when a killed run goes on; a later round that starts from the first one's
weights; a member that gets more training than it was promised, or the others' weights; a portfolio
that other stages cannot read.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_train_drafter import (
    COMMON,
    CUT,
    LEARNED,
    VIRTUAL,
    KilledError,
    World,
    history,
    same_weights,
    world,
)
from workspace import RUNTIME, tiny_config, workspace

from drafters.training import validation_acceptance
from pipeline import trainer
from pipeline.answers import Answers
from pipeline.build import build_drafters, load_target, portfolio_members, trained_need
from pipeline.config import Pool, PoolEntry
from pipeline.member import Member
from pipeline.portfolio import Portfolio
from pipeline.sharing import (
    by_label,
    by_passes,
    by_topic,
    comparative,
    expected_passes,
    takers,
    text_features,
    unseen,
)

__all__ = ["world"]  # a fixture


def pool(**overrides: Any) -> Pool:
    def entry(*domains: str) -> PoolEntry:
        return PoolEntry(
            drafter=CUT,
            trained_by="portfolio",
            domains=list(domains),
            init_from=None,
            overrides=overrides,
        )

    return Pool(entries={"left": entry("code"), "right": entry("chat")})


def portfolio(**changes: Any) -> Portfolio:
    rounds = {"num_rounds": 2, "smallest_share": 0.5, "unseen_share": 0.3, "num_steps": 8}
    return Portfolio(**{**COMMON, **LEARNED, **rounds, "begin_with": "topics", **changes})


def train(stage: Portfolio, world: World, out: Path) -> dict[str, Any]:
    groups = {"target": tiny_config(world.target), "members": portfolio_members(pool())}
    inputs = {"answers": world.answers, "prompts": world.prompts}
    return stage.run(workspace(groups, inputs, out, runtime=VIRTUAL))


def history_of(folder: Path) -> list[dict[str, float]]:
    return [line for line in history(folder) if "learning_rate" in line]


def test_the_fewest_passes_decide_and_nobody_starves() -> None:
    passes = np.array([[1.0, 2.0, 3.0, 4.0], [2.0, 1.0, 3.0, 8.0]])
    assert by_passes(passes, 0).tolist() == [0, 1, 0, 0]
    # The second member is given what costs the least: the tie, not the prompt at twice the price.
    assert by_passes(passes, 2).tolist() == [0, 1, 1, 0]
    alike = np.ones((3, 9))
    assert np.bincount(by_passes(alike, 3)).tolist() == [3, 3, 3]
    assert np.bincount(by_passes(alike, 0), minlength=3).tolist() == [9, 0, 0]


def test_labels_decide_first_and_the_rest_is_dealt() -> None:
    ids = [f"p{n}" for n in range(400)]
    domains = ["code", "chat", "law", "code"] * 100
    shares = by_label(ids, takers(domains, [["code"], ["chat"], []]))
    chosen = {d: np.bincount(shares[[x == d for x in domains]], minlength=3) for d in domains}
    assert chosen["code"][1] == 0
    assert chosen["chat"][0] == 0
    assert chosen["law"].tolist() == [0, 0, 100]
    assert min(chosen["code"][[0, 2]]) > 60  # who wants all has its part of each
    choices = takers(domains, [["code"], ["chat"]])
    nobody = by_label(ids, choices)
    law = nobody[[domain == "law" for domain in domains]]
    assert min(np.bincount(law, minlength=2)) > 30
    assert by_label(ids[::-1], choices[::-1]).tolist() == nobody[::-1].tolist()


def test_members_of_one_domain_begin_with_its_topics() -> None:
    """Two topics in each of two domains; features that say nothing, and domains of unlike size."""
    random = np.random.default_rng(3)
    topic = random.integers(0, 2, 600)
    domains = ["code" if n % 3 else "chat" for n in range(600)]
    features = random.normal(size=(600, 6))
    features[:, 2] += 9 * topic
    choices = takers(domains, [["code"], ["code"], ["chat"], ["chat"], ["sums"]])
    shares = by_topic(features, choices, 0.5)
    for domain, members in (("code", (0, 1)), ("chat", (2, 3))):
        mine = np.array([name == domain for name in domains])
        assert {*shares[mine]} == {*members}
        kinds = [topic[mine & (shares == member)].mean() for member in members]
        assert abs(kinds[0] - kinds[1]) > 0.9
    lone = np.vstack([np.zeros((20, 2)), [[9.0, 9.0]]])
    even = by_topic(lone, takers(["code"] * 21, [[], []]), 1)
    assert sorted(np.bincount(even)) == [10, 11]  # nobody starves for want of a topic


def test_luck_does_not_move_a_prompt_but_its_kind_does() -> None:
    """Two kinds of text, each 3% cheaper for one member; one text's passes vary by 10%."""
    random = np.random.default_rng(0)
    kind = random.integers(0, 2, 2000)
    features = random.normal(size=(2000, 8))
    features[:, 3] += 4 * kind
    passes = 100 * np.exp(random.normal(0, 0.1, (2, 2000)))
    passes[0, kind == 1] *= 1.03
    passes[1, kind == 0] *= 1.03
    rows = np.arange(0, 2000, 2)
    lucky = (by_passes(passes, 0) == kind).mean()
    found = by_passes(expected_passes(features, rows, passes[:, rows]), 0)
    unmeasured = np.arange(1, 2000, 2)
    assert lucky < 0.65
    assert (found == kind)[unmeasured].mean() > 0.8


def test_expected_passes_are_relative_to_the_mean_member() -> None:
    """One that needs a tenth fewer everywhere, whatever the texts are like."""
    passes = np.tile([[90.0], [100.0]], 40) * np.linspace(1, 5, 40)
    features = np.random.default_rng(1).normal(size=(50, 3))
    expected = expected_passes(features, np.arange(40), passes)
    np.testing.assert_allclose(expected, np.tile([[0.9**0.5], [0.9**-0.5]], 50), rtol=1e-9)


def test_a_member_that_is_better_everywhere_takes_no_more_for_it() -> None:
    """Three quarters of one kind, a member 5% ahead in all, and 2% between member and kind."""
    kind = (np.arange(40) % 4 == 0).astype(int)
    passes = np.where(kind == np.array([[0], [1]]), 0.98, 1.0) * [[0.95], [1.0]]
    assert by_passes(passes, 0).tolist() == [0] * 40
    for shares in (kind, (kind + (np.arange(40) % 5 == 0)) % 2):  # a fifth of them wrong
        assert by_passes(comparative(passes, shares), 0).tolist() == kind.tolist()


def test_features_are_the_mean_row_of_all_tokens_and_the_temperature(world: World) -> None:
    one = next(Answers(world.answers).rows(split="drafter_train"))
    hot = dataclasses.replace(one.sampling, temperature=0.8)
    first = dataclasses.replace(one, token_ids=torch.tensor([1, 1, 2]), sampling=hot)
    second = dataclasses.replace(
        one,
        token_ids=torch.tensor([0, 2]),
        sampling=dataclasses.replace(hot, temperature=0.0),
    )
    table = torch.tensor([[5.0, 0.0], [1.5, 2.0], [3.0, -1.0]], dtype=torch.bfloat16)
    features = text_features([first, second], table)
    assert features.tolist() == [[2.0, 1.0, 0.8], [4.0, -0.5, 0.0]]


def test_members_are_measured_on_prompts_that_they_have_not_learned_from(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned: list[set[str]] = []
    gather = Portfolio.gather

    def spying(self: Any, answers: Any, name: str) -> Any:
        learned.append({answer.id for answer in answers})
        return gather(self, answers, name)

    monkeypatch.setattr(Portfolio, "gather", spying)
    train(portfolio(), world, tmp_path / "portfolio")
    everything = {a.id for a in Answers(world.answers).rows(split="drafter_train")}
    kept = {name for name in everything if unseen(name, 0.3)}
    first, last = learned[0] | learned[1], learned[2] | learned[3]
    assert 0 < len(kept) < len(everything) / 2
    assert first == everything - kept
    assert last == everything
    assert abs(sum(unseen(f"prompt {n}", 0.2) for n in range(2000)) - 400) < 80
    learned.clear()
    train(portfolio(rehearsal_share=0.4, num_rounds=1), world, tmp_path / "rehearsing")
    code, chat = learned
    assert len(code) > 8 < len(chat)  # its own eight, and some of the other's
    assert code | chat == everything != code & chat
    with pytest.raises(ValueError, match=r"unseen_share=0\.01 of \d+ answers is none"):
        train(portfolio(unseen_share=0.01), world, tmp_path / "none")


def test_members_are_read_by_the_stages_that_read_drafters(world: World, tmp_path: Path) -> None:
    metrics = train(portfolio(), world, tmp_path / "portfolio")
    rounds = json.loads((tmp_path / "portfolio" / "rounds.json").read_text())["rounds"]
    counts = [{name: sum(of.values()) for name, of in one["answers"].items()} for one in rounds]
    assert [sum(count.values()) for count in counts] == [16, 16]  # each answer once
    assert rounds[0]["answers"] == {"left": {"code": 8}, "right": {"chat": 8}}
    assert min(counts[1].values()) >= 4
    need = trained_need(pool(), "left")
    assert need.stage == "member"
    rates = [line["learning_rate"] for line in history_of(tmp_path / "portfolio" / "left")]
    assert rates[1:] == sorted(rates[1:], reverse=True)  # one curve through both rounds
    assert rates[-1] < 0.2 * max(rates)
    inputs = {}
    for name in ("left", "right"):
        groups = {"entry": portfolio_members(pool())[name]}
        space = workspace(groups, {"portfolio": tmp_path / "portfolio"}, tmp_path / name)
        found = Member().run(space)
        assert found["num_steps"] == 8  # of both rounds together
        assert [line["step"] for line in history(tmp_path / name)] == list(range(9))
        inputs[f"drafter:{name}"] = tmp_path / name
    assert not same_weights(tmp_path / "left", tmp_path / "right")
    drafters: Any = build_drafters(pool(), load_target(tiny_config(world.target), RUNTIME), inputs)
    answers = list(Answers(world.answers).rows(split="validation"))[:8]
    for name, drafter in drafters.items():
        tokens, passes = validation_acceptance(drafter, answers, 3).sum(0).tolist()
        assert tokens / passes == pytest.approx(metrics[f"acceptance_length_{name}"], rel=1e-6)
    each = [metrics[f"acceptance_length_{name}"] for name in drafters]
    assert metrics["acceptance_length_best_of"] >= max(each)


@pytest.mark.parametrize("fatal", [3, 7, 10, 15])
def test_a_killed_portfolio_ends_with_the_weights_of_an_undisturbed_one(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fatal: int,
) -> None:
    """Killed in the first or second round, in the first or second member."""
    train(portfolio(), world, tmp_path / "whole")
    steps, step = 0, trainer.Trainer._step

    def dying(self: Any, *args: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == fatal:
            raise KilledError
        return step(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "_step", dying)
        with pytest.raises(KilledError):
            train(portfolio(), world, tmp_path / "killed")
    train(portfolio(), world, tmp_path / "killed")
    for name in ("left", "right"):
        assert same_weights(tmp_path / "whole" / name, tmp_path / "killed" / name)
    whole, killed = (
        json.loads((tmp_path / name / "rounds.json").read_text())["rounds"]
        for name in ("whole", "killed")
    )
    assert whole == killed


def test_members_that_would_be_trained_otherwise_are_refused() -> None:
    groups = {"members": portfolio_members(pool(num_steps=9))}
    with pytest.raises(ValueError, match=r"pool.entries.left.overrides: members of a portfolio"):
        portfolio().for_groups(groups)
    with pytest.raises(ValueError, match="begin_with=chance is not known; use topics or labels"):
        portfolio(begin_with="chance")
    with pytest.raises(ValueError, match="num_rounds=0 must be at least 1"):
        portfolio(num_rounds=0)
    with pytest.raises(ValueError, match=r"unseen_share=0 must lie between 0\.01 and 0\.9"):
        portfolio(unseen_share=0)
    assert dataclasses.asdict(portfolio().of_round())["num_steps"] == 4

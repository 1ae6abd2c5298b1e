"""Would catch: a loss on prompt or padding tokens; logits that predict the wrong token; a stored
law read one row off; normalisation by rows; acceptance averaged instead of summed, counted
without the token that the target adds, or estimated where it can be counted.

Tolerances: 1e-5, float32 sums in another order; 1e-12 on chances, float64.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tiny_drafters import CUT, VOCAB_SIZE, Answer, answered, make_drafter, sampler

from decode.types import Drafter, Sampling
from drafters.base import BuildContext, TargetParts
from drafters.losses import LOSSES
from drafters.training import (
    collate,
    expected_passes,
    to_device,
    training_loss,
    validation_acceptance,
)

PROMPTS = [[5, 6, 7], [9, 11, 3, 80, 4, 4], [2]]


@pytest.fixture(scope="module")
def answers(target: TargetParts) -> list[Answer]:
    laws = [Sampling(), Sampling(temperature=0.9, seed=1), Sampling()]
    return [
        answered(target, prompt, 5 + 4 * i, law)
        for i, (prompt, law) in enumerate(zip(PROMPTS, laws, strict=True))
    ]


def test_a_batch_predicts_answer_tokens_and_nothing_else(answers: list[Answer]) -> None:
    batch = collate(answers, VOCAB_SIZE, max_tokens=12)
    rows = batch.token_ids.tolist()
    found = []
    for row, kept in zip(range(3), batch.keep.tolist(), strict=True):
        found += [rows[row][i + 1] for i, flag in enumerate(kept) if flag]
    wanted = [t for a in answers for t in a.token_ids[a.num_prompt_tokens : 12].tolist()]
    assert found == batch.next_ids.tolist() == wanted
    assert batch.num_tokens == len(wanted) == 5 + 6 + 11
    assert batch.attention_mask.sum(1).tolist() == [8, 12, 12]
    lse = torch.cat([a.lse[: 12 - a.num_prompt_tokens] for a in answers])
    assert torch.equal(batch.teacher.lse, lse)


def test_an_empty_prompt_or_an_answer_cut_away_predicts_what_is_left(
    answers: list[Answer],
) -> None:
    alone = replace(
        answers[1], num_prompt_tokens=0, token_ids=answers[1].token_ids[6:], sampling=Sampling()
    )
    batch = collate([alone, answers[1]], VOCAB_SIZE, max_tokens=6)
    assert batch.next_ids.tolist() == alone.token_ids[1:6].tolist()
    assert torch.equal(batch.teacher.lse, alone.lse[1:6])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("size", [0, 70])
def test_batches_add_up_to_the_loss_per_token(
    answers: list[Answer], target: TargetParts, loss: str, size: int
) -> None:
    network = replace(CUT, num_draft_vocab=size).build(BuildContext(target)).trainable
    together = training_loss(network, collate(answers, VOCAB_SIZE, 99), loss, VOCAB_SIZE)
    apart = [
        training_loss(network, to_device(collate([a], VOCAB_SIZE, 99), "cpu"), loss, VOCAB_SIZE)
        for a in answers
    ]
    assert together.num_tokens == sum(part.num_tokens for part in apart) == 27
    total = sum(part.total for part in apart)
    torch.testing.assert_close(together.total, total, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(together.mean, total / 27)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_few_steps_lower_every_loss_and_touch_no_target(
    answers: list[Answer], target: TargetParts, loss: str
) -> None:
    """The same batch again and again: a sign error or a misplaced row would not learn it."""
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    drafter = replace(CUT, layers=[0, -1], num_draft_vocab=120, train_head=True)
    network = drafter.build(BuildContext(target)).trainable
    batch = collate(answers, VOCAB_SIZE, 99)
    optimiser = torch.optim.AdamW(network.parameters(), lr=3e-3)
    values = []
    for _ in range(30):
        step = training_loss(network, batch, loss, VOCAB_SIZE)
        optimiser.zero_grad()
        step.mean.backward()
        optimiser.step()
        values.append(step.mean.item())
    assert values[-1] < 0.6 * values[0]
    assert all(torch.equal(before[n], t) for n, t in target.model.state_dict().items())


def test_an_unknown_loss_and_a_missing_teacher_are_refused(
    answers: list[Answer], target: TargetParts
) -> None:
    network = CUT.build(BuildContext(target)).trainable
    batch = collate(answers, VOCAB_SIZE, 99, with_teacher=False)
    with pytest.raises(ValueError, match="loss=kl is not known"):
        training_loss(network, batch, "kl", VOCAB_SIZE)
    with pytest.raises(ValueError, match="forward_kl needs the target's recorded logits"):
        training_loss(network, batch, "forward_kl", VOCAB_SIZE)
    assert training_loss(network, batch, "cross_entropy", VOCAB_SIZE).num_tokens == 27


def decoded_passes(drafter: Drafter, tokens: Sequence[int], start: int, num_drafts: int) -> int:
    """Decode a greedy answer for real: propose, keep what agrees, add one token of the target."""
    session, here, passes = drafter.open(), start, 0
    while here < len(tokens):
        drafts = session.propose(list(tokens[:here]), num_drafts, sampler(Sampling())).token_ids
        pairs = zip(drafts, tokens[here:], strict=False)
        here += len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))) + 1
        passes += 1
    return passes


@pytest.mark.parametrize("name", ["ngram", "lm", "composite"])
@pytest.mark.parametrize("num_drafts", [1, 3, 5])
def test_greedy_acceptance_is_that_of_decoding(
    target: TargetParts, name: str, num_drafts: int
) -> None:
    drafter = make_drafter(name, target)
    answers = [answered(target, prompt, 20, Sampling()) for prompt in PROMPTS]
    found = validation_acceptance(drafter, answers, num_drafts)
    wanted = [
        [20, decoded_passes(drafter, a.token_ids.tolist(), a.num_prompt_tokens, num_drafts)]
        for a in answers
    ]
    assert found.tolist() == wanted


def test_expected_passes_enumerates_chance() -> None:
    """Against every outcome of every draft, by recursion."""
    chance = random.Random(0)
    for size, depth in [(1, 1), (2, 3), (5, 2), (6, 4)]:
        table = [[chance.random() for _ in range(depth)] for _ in range(size)]
        table[-1][0] = float("nan")

        def passes(start: int, rows: list[list[float]] = table) -> float:
            if start >= len(rows):
                return 0.0
            total, alive = 1.0, 1.0
            for run in range(len(rows[start]) + 1):
                chances = rows[start][run] if run < len(rows[start]) else 0.0
                chances = 0.0 if chances != chances else chances
                total += alive * (1 - chances) * passes(start + run + 1)
                alive *= chances
            return total

        found = expected_passes(torch.tensor(table, dtype=torch.float64))
        assert found == pytest.approx(passes(0), abs=1e-12)


@pytest.mark.parametrize(
    ("table", "wanted"),
    [
        (torch.ones(6, 2), 2),  # runs of two and one more token each
        (torch.zeros(6, 2), 6),
        (torch.full((6, 2), torch.nan), 6),
        (torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]), 2),
        (torch.zeros(0, 2), 0),
    ],
)
def test_expected_passes_of_certain_runs(table: torch.Tensor, wanted: int) -> None:
    assert expected_passes(table) == wanted


def test_no_answers_give_no_rows(target: TargetParts) -> None:
    assert validation_acceptance(make_drafter("ngram", target), [], 3).shape == (0, 2)

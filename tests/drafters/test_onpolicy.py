"""Would catch: text that does not follow the drafter's law, or follows it with another row's
prefix, a shifted position or padding that is read; a uniform spent twice or by a neighbour; a loss
on tokens that the drafter did not write, or that come after the end of a text; a weight that holds
the token's own acceptance, or another row's; the law of a temperature that was not asked for.

Tolerances: chi-square at 1e-4 of chance, seeds fixed; 1e-4 on log-probabilities, which a float32
logit is a part of.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from tiny_drafters import (
    CUT,
    EOS,
    NUM_REAL_IDS,
    VOCAB_SIZE,
    Answer,
    answered,
    objective,
    tiny_model,
)
from torch import Tensor

from decode.sampling import law_of
from decode.types import Sampling
from drafters.base import BuildContext, TargetParts
from drafters.batches import Batch, collate
from drafters.losses import Teacher
from drafters.networks import DraftNetwork, WholeNetwork
from drafters.onpolicy import (
    alive_weights,
    continue_with_drafter,
    cut_places,
    judged,
    token_logprobs,
)
from drafters.training import LossModule, teacher_of
from drafters.vocabulary import widen
from kernels.reference import inverse_cdf, processed_probs

PROMPTS = [[5, 6, 7], [9, 11, 3, 80, 4, 4, 17, 20, 31], [2]]


@pytest.fixture(scope="module")
def batch(target: TargetParts) -> Batch:
    answers: list[Answer] = [
        answered(target, prompt, 6 + 3 * i, Sampling(temperature=1.0, seed=i))
        for i, prompt in enumerate(PROMPTS)
    ]
    return collate(answers, VOCAB_SIZE, 99)


def network_of(kind: str, target: TargetParts) -> DraftNetwork:
    if kind == "whole":
        return WholeNetwork(tiny_model(seed=5))
    cut = replace(CUT, num_draft_vocab=70 if kind == "cut" else 0)
    return cut.build(BuildContext(target)).trainable


def uniforms(rows: int, size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, size, generator=generator, dtype=torch.float64)


def written(
    network: DraftNetwork, batch: Batch, cuts: list[int], draws: Tensor, **how: Any
) -> Batch:
    settings: dict[str, Any] = {
        "temperature": 0.9,
        "vocab_size": VOCAB_SIZE,
        "num_real_ids": NUM_REAL_IDS,
    }
    return continue_with_drafter(
        network, batch, cuts=torch.tensor(cuts), uniforms=draws, **(settings | how)
    )


@torch.no_grad()
def by_hand(
    network: DraftNetwork, prefix: list[int], draws: list[float], temperature: float
) -> tuple[list[int], list[float]]:
    """Token after token, all of it read again each time."""
    tokens, logprobs = list(prefix), []
    for draw in draws:
        logits = network(torch.tensor([tokens]))[:, -1]
        full = widen(logits, VOCAB_SIZE, network.draft_ids, NUM_REAL_IDS)
        probs = processed_probs(full, *law_of((Sampling(temperature=temperature),)), None)
        tokens.append(int(inverse_cdf(probs, torch.tensor([draw]))))
        logprobs.append(math.log(float(probs[0, tokens[-1]])))
    return tokens[len(prefix) :], logprobs


@pytest.mark.parametrize("kind", ["cut", "whole vocabulary", "whole"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_rows_are_what_each_alone_would_be(
    batch: Batch, target: TargetParts, kind: str, temperature: float
) -> None:
    network, cuts, draws = network_of(kind, target), [4, 11, 1], uniforms(3, 5)
    found = written(network, batch, cuts, draws, temperature=temperature)
    texts, logprobs = found.next_ids.view(3, 5), found.draft_logprobs.view(3, 5)
    for row, cut in enumerate(cuts):
        prefix = batch.token_ids[row, :cut].tolist()
        tokens, chances = by_hand(network, prefix, draws[row].tolist(), temperature)
        assert texts[row].tolist() == tokens
        torch.testing.assert_close(logprobs[row], torch.tensor(chances), atol=1e-4, rtol=0)
        assert found.token_ids[row].tolist() == prefix + tokens + [0] * (11 - cut)
        assert found.attention_mask[row].tolist() == [1] * (cut + 5) + [0] * (11 - cut)
        assert found.keep[row].nonzero()[:, 0].tolist() == list(range(cut - 1, cut + 4))
        alone = replace(
            batch,
            **{
                n: getattr(batch, n)[row : row + 1] for n in ("token_ids", "attention_mask", "keep")
            },
        )
        single = written(network, alone, [cut], draws[row : row + 1], temperature=temperature)
        assert single.next_ids.tolist() == tokens
    assert (found.token_ids.roll(-1, 1)[found.keep] == found.next_ids).all()
    assert found.teacher is None


def test_text_follows_the_drafters_law(target: TargetParts) -> None:
    """Pairs of tokens, from 4,000 rows of two prefixes: the second given the first."""
    draft_ids = torch.tensor([3, 8, 20, 77])
    network = replace(CUT, num_draft_vocab=4).build(BuildContext(target))
    network.set_draft_vocab(draft_ids)
    rows, cuts = 4000, [3, 2]
    prefixes = torch.tensor([[5, 6, 7], [9, 1, 0]])
    both = Batch(
        prefixes.repeat(rows // 2, 1),
        torch.ones(rows, 3).long(),
        torch.zeros(rows, 3).bool(),
        torch.zeros(0).long(),
        None,
    )
    found = written(network.trainable, both, cuts * (rows // 2), uniforms(rows, 2, seed=4))
    pairs = torch.searchsorted(draft_ids, found.next_ids).view(rows, 2)
    for row, cut in enumerate(cuts):
        counts = torch.bincount(pairs[row::2] @ torch.tensor([4, 1]), minlength=16)
        first = law_after(network.trainable, prefixes[row, :cut].tolist())
        law = torch.cat(
            [
                first[i] * law_after(network.trainable, [*prefixes[row, :cut].tolist(), int(token)])
                for i, token in enumerate(draft_ids)
            ]
        )
        assert chisquare(counts.numpy(), (law * counts.sum()).numpy()).pvalue > 1e-4
        # The test would notice: the other prefix has another law.
        assert chisquare(counts.numpy(), (law.flip(0) * counts.sum()).numpy()).pvalue < 1e-9


@torch.no_grad()
def law_after(network: DraftNetwork, tokens: list[int]) -> Tensor:
    return (network(torch.tensor([tokens]))[0, -1].double() / 0.9).softmax(-1)


def test_nothing_is_written_after_an_end(batch: Batch, target: TargetParts) -> None:
    network = network_of("whole vocabulary", target)
    free = written(network, batch, [4, 11, 2], uniforms(3, 6))
    texts = free.next_ids.view(3, 6)
    stops = [int(texts[0, 2]), int(texts[1, 0])]
    found = written(network, batch, [4, 11, 2], uniforms(3, 6), stop_ids=stops)
    ends = [
        next((i + 1 for i, token in enumerate(row) if token in stops), 6) for row in texts.tolist()
    ]
    assert ends[0] <= 3
    assert ends[1] == 1
    assert found.keep.sum(1).tolist() == ends
    wanted = [token for row, end in zip(texts.tolist(), ends, strict=True) for token in row[:end]]
    assert found.next_ids.tolist() == wanted
    assert found.attention_mask.sum(1).tolist() == [4 + ends[0], 11 + ends[1], 2 + ends[2]]
    assert (found.token_ids[found.attention_mask == 0] == 0).all()
    assert len(found.draft_logprobs) == len(wanted)


def test_columns_that_are_no_token_are_never_drawn(batch: Batch) -> None:
    model = tiny_model(seed=5)
    with torch.no_grad():  # its likeliest column is one of the padding
        model.lm_head.weight[NUM_REAL_IDS:] *= 50
    for temperature in (0.0, 1.0):
        found = written(
            WholeNetwork(model), batch, [4, 11, 1], uniforms(3, 8), temperature=temperature
        )
        assert (found.next_ids < NUM_REAL_IDS).all()


def test_cuts_lie_within_the_answer(batch: Batch) -> None:
    prompts, ends = torch.tensor([3, 9, 1]), torch.tensor([9, 18, 13])
    assert torch.equal(cut_places(batch, torch.zeros(3)), prompts)
    assert torch.equal(cut_places(batch, torch.full((3,), 1 - 1e-6)), ends - 1)
    many = torch.stack([cut_places(batch, row) for row in uniforms(200, 3)])
    assert all(len(many[:, i].unique()) == n for i, n in enumerate((6, 9, 12)))
    nothing = replace(batch, keep=torch.zeros_like(batch.keep))
    assert torch.equal(cut_places(nothing, torch.zeros(3)), ends)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("lazy", [True, False])
def test_weights_are_the_chance_to_be_verified(
    batch: Batch, target: TargetParts, temperature: float, lazy: bool
) -> None:
    network = network_of("cut", target)
    # A drafter that the target nearly agrees with, so that chances are neither 0 nor 1 throughout.
    network = WholeNetwork(tiny_model()) if temperature == 0 else network
    texts = written(network, batch, [4, 11, 2], uniforms(3, 6), temperature=1.0, stop_ids=[EOS])
    teacher = teacher_of(target.model, texts)
    if not lazy:
        teacher = Teacher.full(teacher.rows(0, 999).logits)
    found = judged(texts, teacher, temperature, chunk_tokens=4)
    assert found.teacher is teacher
    wanted, place = [], 0
    for row, size in enumerate(texts.keep.sum(1).tolist()):
        tokens = texts.token_ids[row, : int(texts.attention_mask[row].sum())]
        alive = 1.0
        with torch.no_grad():
            logits = target.model(tokens[None]).logits[0]
        for depth in range(size):
            wanted.append(alive)
            token = int(texts.next_ids[place])
            at = logits[len(tokens) - size + depth - 1 :][:1]
            p = processed_probs(at, *law_of((Sampling(temperature=temperature),)), None)[0, token]
            q = texts.draft_logprobs[place].double().exp()
            alive *= min(1.0, float(p / q))
            place += 1
    torch.testing.assert_close(found.weights, torch.tensor(wanted), atol=1e-4, rtol=1e-3)
    assert (found.weights[texts.next_ids.new_tensor([0])] == 1).all()
    assert (found.weights < 0.999).any()
    assert ((found.weights > 1e-3) & (found.weights < 0.999)).any() or temperature == 0


def test_what_lies_behind_a_sure_rejection_counts_nothing(
    batch: Batch, target: TargetParts
) -> None:
    texts = written(network_of("cut", target), batch, [4, 11, 2], uniforms(3, 4))
    logprobs = texts.draft_logprobs.clone()
    logprobs[5] = -torch.inf  # the second token of the second row
    assert alive_weights(texts, logprobs).tolist() == [1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1]


def test_a_truncated_teacher_cannot_judge(batch: Batch) -> None:
    with pytest.raises(AssertionError, match="truncated"):
        token_logprobs(batch.teacher, batch.next_ids, 1.0, 8)


def test_learning_from_its_own_text_raises_acceptance(batch: Batch, target: TargetParts) -> None:
    """A sign error, or weights that blot out everything, would not."""
    network = network_of("whole vocabulary", target)
    module = LossModule(network, objective(forward_kl=0.5, tv=0.5), VOCAB_SIZE, 8)
    optimiser = torch.optim.AdamW(network.parameters(), lr=5e-3)
    rejected = LossModule(network, objective("tv"), VOCAB_SIZE, 8)
    values = []
    for seed in range(40):
        texts = written(network, batch, [4, 11, 2], uniforms(3, 6, seed % 2), temperature=1.0)
        texts = judged(texts, teacher_of(target.model, texts), 1.0, 8)
        values.append(rejected(texts).item() / texts.num_tokens)
        optimiser.zero_grad()
        (module(texts) / texts.num_tokens).backward()
        optimiser.step()
    assert sum(values[-4:]) < 0.8 * sum(values[:4])

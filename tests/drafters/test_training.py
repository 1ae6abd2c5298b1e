"""Would catch: a loss on prompt or padding tokens; logits that predict the wrong token; a stored
law read one row off; normalisation by rows; a chunk that is dropped, counted twice or given another
chunk's teacher; gradients that differ from those of all logits at once, or that are lost in
bfloat16; a frozen head that learns; checkpointing that changes gradients, drops a cache or does
nothing; acceptance averaged instead of summed, counted without the token that the target adds, or
estimated where it can be counted.

Tolerances: 1e-5, float32 sums in another order; 1e-10 and 1e-12, float64; bfloat16 has 8 bits, so
its gradients may be off by some percent, in all.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_drafters import (
    CUT,
    NUM_REAL_IDS,
    VOCAB_SIZE,
    Answer,
    answered,
    make_drafter,
    objective,
    sampler,
    tiny_model,
)
from torch import Tensor
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from decode.types import Drafter, Sampling
from drafters.base import BuildContext, TargetParts
from drafters.batches import Batch, to_device
from drafters.chunked import chunked_loss
from drafters.inner import plain_head
from drafters.losses import DIVERGENCES, LOSSES, Teacher
from drafters.networks import DraftNetwork, WholeNetwork
from drafters.training import (
    LossModule,
    collate,
    expected_passes,
    teacher_of,
    validation_acceptance,
)
from drafters.vocabulary import columns_of

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


def loss_of(network: DraftNetwork, batch: Batch, name: str, chunk: int = 5, **how: Any) -> Tensor:
    """The sum over the batch's tokens of one loss."""
    return LossModule(network, objective(name, **how), VOCAB_SIZE, chunk)(batch)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("size", [0, 70])
def test_batches_add_up_to_the_loss_per_token(
    answers: list[Answer], target: TargetParts, loss: str, size: int
) -> None:
    network = replace(CUT, num_draft_vocab=size).build(BuildContext(target)).trainable
    batch = collate(answers, VOCAB_SIZE, 99)
    apart = [to_device(collate([a], VOCAB_SIZE, 99), "cpu") for a in answers]
    assert batch.num_tokens == sum(part.num_tokens for part in apart) == 27
    together = loss_of(network, batch, loss)
    assert together.dtype == torch.float32
    total = sum(loss_of(network, part, loss) for part in apart)
    torch.testing.assert_close(together, total, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("weights", ["uniform", "decay", "reach", "gain"])
def test_a_few_steps_lower_every_loss_and_touch_no_target(
    answers: list[Answer], target: TargetParts, loss: str, weights: str
) -> None:
    """The same batch again and again: a sign error or a misplaced row would not learn it."""
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    drafter = replace(CUT, layers=[0, -1], num_draft_vocab=120, train_head=True)
    network = drafter.build(BuildContext(target)).trainable
    batch = collate(answers, VOCAB_SIZE, 99)
    optimiser = torch.optim.AdamW(network.parameters(), lr=3e-3)
    values = []
    for _ in range(30):
        value = loss_of(network, batch, loss, position_weights=weights) / batch.num_tokens
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
        values.append(value.item())
    assert values[-1] < 0.6 * values[0]
    assert all(torch.equal(before[n], t) for n, t in target.model.state_dict().items())


def test_a_missing_teacher_and_a_drafter_that_learns_its_own_text_are_refused(
    answers: list[Answer], target: TargetParts
) -> None:
    network = CUT.build(BuildContext(target)).trainable
    batch = collate(answers, VOCAB_SIZE, 99, with_teacher=False)
    with pytest.raises(ValueError, match="needs the target's law"):
        loss_of(network, batch, "forward_kl")
    with pytest.raises(ValueError, match="position_weights=reach needs the target's law"):
        loss_of(network, batch, "cross_entropy", position_weights="reach")
    own = replace(batch, draft_logprobs=torch.zeros(27))
    with pytest.raises(ValueError, match="its own text"):
        loss_of(network, own, "cross_entropy")
    with pytest.raises(ValueError, match="chunk_tokens=0 must be"):
        loss_of(network, batch, "cross_entropy", chunk=0)
    assert loss_of(network, batch, "cross_entropy") > 0


# ------------------------------------------------------------------------------------------- chunks


def random_case(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(states [13, 6], head [17, 6], token weights [13])."""
    generator = torch.Generator().manual_seed(1)
    make = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)  # noqa: E731
    return make(13, 6), make(17, 6), make(13).abs()


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("chunk", [1, 4, 13, 100])
@pytest.mark.parametrize("kind", ["full", "top", "lazy"])
@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True)])
def test_chunks_give_the_value_and_gradients_of_all_logits_at_once(
    name: str, chunk: int, kind: str, trained: tuple[bool, bool]
) -> None:
    """In float64, with a vocabulary of 30 ids of which the drafter has 17."""
    states, head, token_weights = random_case(torch.float64)
    columns = columns_of(torch.arange(0, 30)[5:22], 30, torch.device("cpu"))
    inner, outer = torch.randn(13, 4).double(), torch.randn(30, 4).double()
    full = inner @ outer.T
    laws = {
        "full": Teacher.full(full),
        "top": Teacher.top(full, 8),
        "lazy": Teacher.lazy(inner, outer, 30),
    }[kind]
    losses = objective(name)

    def of(logits: Tensor, low: int) -> Tensor:
        part = laws.rows(low, low + len(logits))
        return losses.per_token(logits, torch.zeros(len(logits)).long(), part, columns)

    leaves = [
        t.clone().requires_grad_(flag) for t, flag in zip((states, head), trained, strict=True)
    ]
    found = chunked_loss(*leaves, of, token_weights, chunk)
    (3 * found).backward()
    copies = [
        t.clone().requires_grad_(flag) for t, flag in zip((states, head), trained, strict=True)
    ]
    wanted = (of(copies[0] @ copies[1].T, 0) * token_weights).sum()
    (3 * wanted).backward()
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=0)
    for leaf, copy, flag in zip(leaves, copies, trained, strict=True):
        assert (leaf.grad is not None) == flag
        if flag:
            torch.testing.assert_close(leaf.grad, copy.grad, atol=1e-10, rtol=0)


def test_at_most_a_chunk_of_logits_is_ever_seen() -> None:
    states, head, token_weights = random_case(torch.float32)
    seen = []

    def of(logits: Tensor, low: int) -> Tensor:
        seen.append((low, *logits.shape))
        return logits.logsumexp(-1)

    chunked_loss(states.requires_grad_(), head, of, token_weights, 5)
    assert seen == [(0, 5, 17), (5, 5, 17), (10, 3, 17)]


def test_gradients_are_those_of_small_differences() -> None:
    """tv and its like have kinks, so losses that are smooth; tvpp has a gradient of its own."""
    states, head, token_weights = random_case(torch.float64)
    columns = torch.arange(17)
    full = torch.randn(13, 17, generator=torch.Generator().manual_seed(3)).double()
    for name in ("forward_kl", "reverse_kl", "jsd"):
        losses = objective(name)

        def value(states: Tensor, head: Tensor, losses: Any = losses) -> Tensor:
            def of(logits: Tensor, low: int) -> Tensor:
                part = Teacher.full(full).rows(low, low + len(logits))
                return losses.per_token(logits, torch.zeros(len(logits)).long(), part, columns)

            return chunked_loss(states, head, of, token_weights, 5)

        leaves = (states.clone().requires_grad_(), head.clone().requires_grad_())
        assert torch.autograd.gradcheck(value, leaves)


def gradients(network: DraftNetwork, loss: Tensor) -> dict[str, Tensor]:
    learned = {n: p for n, p in network.named_parameters() if p.requires_grad}
    return dict(zip(learned, torch.autograd.grad(loss, list(learned.values())), strict=True))


def networks(target: TargetParts) -> dict[str, Callable[[], DraftNetwork]]:
    cut = lambda **how: replace(CUT, **how).build(BuildContext(target)).trainable  # noqa: E731
    gpt2 = GPT2Config(vocab_size=VOCAB_SIZE, n_positions=96, n_embd=32, n_layer=2, n_head=2)
    return {
        "frozen head": lambda: cut(),
        "gathered head": lambda: cut(num_draft_vocab=70),
        "trained head": lambda: cut(num_draft_vocab=70, train_head=True),
        "whole, tied": lambda: WholeNetwork(tiny_model(seed=3)),
        "whole, longer": lambda: WholeNetwork(tiny_model(VOCAB_SIZE + 8, seed=3)),
        "whole, shorter": lambda: WholeNetwork(tiny_model(NUM_REAL_IDS, seed=3)),
        "another family": lambda: WholeNetwork(GPT2LMHeadModel(gpt2).eval()),
    }


NETWORKS = [
    "frozen head",
    "gathered head",
    "trained head",
    "whole, tied",
    "whole, longer",
    "whole, shorter",
    "another family",
]


class Unsplit(LossModule):
    """The same loss over all logits, as a network that does not split computes it."""

    def forward(self, batch: Batch) -> Tensor:
        logits = self.network(batch.token_ids, batch.mask, batch.keep, batch.position_ids)
        weights = self._weights(batch, lambda values_of: values_of(logits.detach(), 0))
        return (self._losses_of(batch)(logits, 0) * weights).sum()


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("chunk", [4, 1000])
@pytest.mark.parametrize("weighed", [True, False])
def test_a_split_network_learns_what_an_unsplit_one_does(
    answers: list[Answer], target: TargetParts, kind: str, chunk: int, weighed: bool
) -> None:
    network = networks(target)[kind]()
    batch = collate(answers, VOCAB_SIZE, 99)
    batch = replace(batch, weights=torch.rand(27) if weighed else None)
    mix = objective(forward_kl=0.5, tvpp=0.3, cross_entropy=0.2, position_weights="gain")
    assert network.splits
    found = LossModule(network, mix, VOCAB_SIZE, chunk)(batch)
    wanted = Unsplit(network, mix, VOCAB_SIZE, 1)(batch)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    left, right = gradients(network, found), gradients(network, wanted)
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=2e-5, rtol=1e-4, msg=name)


def test_weights_that_a_batch_brings_along_are_those_that_count(
    answers: list[Answer], target: TargetParts
) -> None:
    network = networks(target)["frozen head"]()
    batch = collate(answers, VOCAB_SIZE, 99)
    weights = torch.arange(27).float()
    each = []
    for i in range(27):
        alone = replace(batch, weights=(torch.arange(27) == i).float())
        each.append(loss_of(network, alone, "jsd") / 27)
    wanted = 27 * (torch.stack(each) * weights).sum() / weights.sum()
    for kind in ("uniform", "gain"):
        found = loss_of(network, replace(batch, weights=weights), "jsd", position_weights=kind)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_a_network_whose_head_does_more_is_not_split(answers: list[Answer]) -> None:
    model = tiny_model(seed=3)
    batch = collate(answers, VOCAB_SIZE, 99)
    plain = WholeNetwork(model)
    found = LossModule(plain, objective("jsd"), VOCAB_SIZE, 4)(batch)
    model.config.final_logit_softcapping = 30.0
    assert not plain.splits
    wanted = LossModule(plain, objective("jsd"), VOCAB_SIZE, 4)(batch)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    model.config.final_logit_softcapping = None
    model.lm_head = torch.nn.Linear(32, VOCAB_SIZE, bias=True)
    assert not plain_head(model)
    assert LossModule(plain, objective("jsd"), VOCAB_SIZE, 4)(batch).isfinite()


@pytest.mark.parametrize("kind", ["trained head", "whole, tied", "frozen head"])
def test_bfloat16_products_change_little_and_sums_stay_float32(
    answers: list[Answer], target: TargetParts, kind: str
) -> None:
    network = networks(target)[kind]()
    batch = collate(answers, VOCAB_SIZE, 99)
    exact = LossModule(network, objective("forward_kl"), VOCAB_SIZE, 4)(batch)
    right = gradients(network, exact)
    with torch.autocast("cpu", torch.bfloat16):
        rough = LossModule(network, objective("forward_kl"), VOCAB_SIZE, 4)(batch)
        unsplit = Unsplit(network, objective("forward_kl"), VOCAB_SIZE, 1)(batch)
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough, unsplit, atol=0, rtol=0.01)
    torch.testing.assert_close(rough, exact, atol=0, rtol=0.03)
    left = gradients(network, rough)
    for name, wanted in right.items():
        assert left[name].dtype == wanted.dtype
        cosine = torch.cosine_similarity(left[name].flatten(), wanted.flatten(), dim=0)
        assert cosine > 0.98, name


def test_nothing_is_computed_for_gradients_that_nobody_wants(
    answers: list[Answer], target: TargetParts
) -> None:
    network = networks(target)["trained head"]()
    batch = collate(answers, VOCAB_SIZE, 99)
    with torch.no_grad():
        quiet = loss_of(network, batch, "tv")
    assert not quiet.requires_grad
    torch.testing.assert_close(quiet, loss_of(network, batch, "tv").detach())


# ------------------------------------------------------------------------------------------ teacher


@pytest.mark.parametrize("plain", [True, False])
def test_the_target_in_the_loop_thinks_what_it_says(
    answers: list[Answer], target: TargetParts, plain: bool
) -> None:
    model = tiny_model()
    if not plain:
        model.config.logit_scale = 2.0  # something that states and head alone do not tell
    batch = collate(answers, VOCAB_SIZE, 99)
    teacher = teacher_of(model, batch)
    assert isinstance(teacher, Teacher) != plain
    with torch.no_grad():
        logits = model(batch.token_ids, attention_mask=batch.attention_mask).logits[batch.keep]
    for low, high in [(0, 27), (5, 9), (26, 27)]:
        found = teacher.rows(low, high)
        torch.testing.assert_close(found.logits, logits[low:high], atol=1e-5, rtol=0)
        torch.testing.assert_close(found.lse, batch.teacher.lse[low:high], atol=1e-4, rtol=0)


# ------------------------------------------------------------------------------------ checkpointing


@pytest.mark.parametrize("kind", ["trained head", "whole, tied", "another family"])
def test_checkpointed_layers_give_the_same_gradients_and_keep_less(
    answers: list[Answer], target: TargetParts, kind: str
) -> None:
    network = networks(target)[kind]()
    batch = collate(answers, VOCAB_SIZE, 99)
    kept: list[list[int]] = []
    results = []
    modes = [module.training for module in network.modules()]
    for enabled in (False, True, False):
        network.checkpoint_layers(enabled)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: (sizes.append(t.numel()), t)[1], lambda t: t
        ):
            loss = loss_of(network, batch, "forward_kl")
        kept.append(sizes)
        results.append(gradients(network, loss))
        assert [module.training for module in network.modules()] == modes
    assert sum(kept[1]) < 0.5 * sum(kept[0])
    assert sum(kept[2]) == sum(kept[0])
    for name, wanted in results[0].items():
        torch.testing.assert_close(results[1][name], wanted, atol=1e-6, rtol=1e-5, msg=name)


def test_checkpointed_layers_still_read_into_a_cache(target: TargetParts) -> None:
    network = networks(target)["frozen head"]()
    tokens = torch.tensor([[5, 6, 7, 8, 9]])
    wanted = network(tokens)[0, -1]
    network.checkpoint_layers(True)
    cache = DynamicCache()
    network.next_logits(tokens[:, :3], cache)
    found = network.next_logits(tokens[:, 3:], cache)
    assert cache.get_seq_length() == 5
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


# --------------------------------------------------------------------------------------- acceptance


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

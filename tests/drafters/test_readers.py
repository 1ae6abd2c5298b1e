"""Bugs these tests would catch: a drafter's law that is another one on our own forward than on its
modules (a layer, bias, window or norm left out; a head of other rows; an embedding in the wrong
type); logits after another token than the last; a roll-back or a long prompt that leaves the cache
wrong; rows that mix; weights of yesterday after training; a target's weights copied for a drafter;
modules that drafting has emptied; copies that drafters on one base do not share; a network that our
forward does not know computed by it.

Tolerance, relative to the largest logit: 1e-4 in float32 (seen: 1e-6). In bfloat16 roundings fall
elsewhere: twice the distance that the modules have from float32 (seen: 0.9 times).
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from native_models import FAMILIES, VOCAB_SIZE, build, family, ids, relative
from tiny_drafters import sampler, tiny_tokenizer
from torch import Tensor

from decode.native.products import blocked_is_possible
from decode.native.target import PREFILL_CHUNK, NativeTarget
from decode.types import MAX_DRAFT_TOKENS, Sampling
from drafters.base import BuildContext, TargetParts, target_parts
from drafters.lm import LmConfig, LmDrafter
from drafters.lora import LoraConfig
from drafters.networks import CutNetwork
from drafters.readers import make_reader

pytestmark = pytest.mark.skipif(
    not blocked_is_possible(torch.device("cpu"), torch.float32), reason="PyTorch without oneDNN"
)
TOLERANCE = 1e-4
HEADS = {"whole": (0, False), "gathered": (20, False), "trained": (20, True)}
DRAFT_IDS = torch.arange(1, 41, 2)
UNTIED = "llama, biases, untied, no groups"


def parts_of(model: Any) -> TargetParts:
    return TargetParts(model, tiny_tokenizer(), VOCAB_SIZE, "small")


def cut(
    model: Any,
    head: str = "trained",
    *,
    layers: tuple[int, ...] = (0, -1),
    dtype: str = "float32",
    shared: bool = True,
    parts: TargetParts | None = None,
) -> LmDrafter:
    """A cut whose trained head, where it has one, is not its model's."""
    size, train_head = HEADS[head]
    config = LmConfig(
        source=None, layers=list(layers), num_draft_vocab=size, train_head=train_head, dtype=dtype
    )
    kind = getattr(torch, dtype)
    network = CutNetwork(model, list(layers), train_head=train_head, dtype=kind, shared=shared)
    drafter = LmDrafter(config, network, parts or parts_of(model))
    if size:
        drafter.set_draft_vocab(DRAFT_IDS)
    if network.head is not None:
        with torch.no_grad():
            network.head.add_(0.1 * torch.randn(network.head.shape))
    return drafter


def read_in_pieces(drafter: LmDrafter, backend: str, text: list[int]) -> Tensor:  # [4, C]
    """A prompt, one token, three tokens (a step of which all was kept), one after forgetting."""
    reader = make_reader(drafter.trainable, drafter.parts, backend)
    assert reader.name == ("native" if backend == "auto" else backend)
    row, n = reader.open(), len(text) - 5
    with torch.no_grad():
        rows = [row.next_logits(text[:n]), row.next_logits(text[n : n + 1])]
        rows.append(row.next_logits(text[n + 1 : n + 4]))
        row.forget(2)
        rows.append(row.next_logits([text[-1]]))
    return torch.stack(rows).float()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_the_law_of_its_modules(name: str, head: str, shared: bool) -> None:
    drafter = cut(family(name), head, shared=shared)
    found, wanted = (read_in_pieces(drafter, kind, ids(31)) for kind in ("auto", "transformers"))
    assert found.shape == (4, HEADS[head][0] or VOCAB_SIZE)
    assert relative(found, wanted) < TOLERANCE
    gaps = wanted.diff(dim=0).abs().amax(-1) / wanted.abs().max()
    assert gaps.min() > 100 * TOLERANCE  # every piece has a law of its own


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("head", HEADS)
def test_a_drafter_has_a_type_of_its_own(head: str, dtypes: tuple[str, str]) -> None:
    target, own = dtypes
    drafter = cut(family("llama, even", getattr(torch, target)), head, dtype=own)
    found, theirs = (read_in_pieces(drafter, kind, ids(31)) for kind in ("auto", "transformers"))
    drafter.trainable = copy.deepcopy(drafter.trainable).float()
    exact = read_in_pieces(drafter, "transformers", ids(31))
    slack = 2**-8 if head == "whole" else TOLERANCE  # a target's bfloat16 head rounds once more
    assert relative(found, exact) < 2 * relative(theirs, exact) + slack


def test_a_prompt_of_several_chunks_is_read_whole() -> None:
    drafter = cut(family("llama"))
    for length in (PREFILL_CHUNK, PREFILL_CHUNK + 1, PREFILL_CHUNK + 130):
        text = ids(length + 5)
        found = read_in_pieces(drafter, "auto", text)
        assert relative(found, read_in_pieces(drafter, "transformers", text)) < TOLERANCE


@pytest.mark.parametrize("asked", [1, 2, MAX_DRAFT_TOKENS])
def test_rows_do_not_mix_and_any_length_is_drafted(asked: int) -> None:
    """Two rows in turn, in and out of inference mode (the loop is in it), against modules alone."""
    drafter, plain = cut(family("qwen3")), cut(family("qwen3"))
    with torch.no_grad():
        plain.trainable.head.copy_(drafter.trainable.head)
    plain.backend = "transformers"
    texts = [ids(9, seed=1), ids(14, seed=2)]
    with torch.inference_mode():
        sessions = [drafter.open() for _ in texts]
    for turn in range(3):
        for place, text in enumerate(texts):
            spy, wanted = sampler(Sampling()), sampler(Sampling())
            with torch.inference_mode((place + turn) % 2 == 1):
                tokens = sessions[place].propose(text, asked, spy).token_ids
            plain.open().propose(text, asked, wanted)
            assert tokens == wanted.drawn
            assert len(tokens) == asked
            found, expected = (torch.stack(s.rows)[:, DRAFT_IDS] for s in (spy, wanted))
            assert relative(found, expected) < TOLERANCE
            text += [*tokens[: asked // 2], 3]
    assert drafter.reader().name == "native"


def step_of_training(drafter: LmDrafter) -> None:
    optimizer = torch.optim.AdamW(drafter.trainable.parameters(), lr=0.1, foreach=True)
    drafter.trainable(torch.tensor([ids(9)])).logsumexp(-1).sum().backward()
    optimizer.step()


def change_in_place(drafter: LmDrafter) -> None:
    with torch.inference_mode():
        drafter.trainable.trunk.layers[0].mlp.up_proj.weight.mul_(-1.0)


CHANGES = {
    "an optimizer's step": step_of_training,
    "in place": change_in_place,
    "other draft ids": lambda drafter: drafter.set_draft_vocab(DRAFT_IDS + 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_open_session_follows_weights_that_change(change: str) -> None:
    drafter, text = cut(family("llama")), ids(12)
    session, before = drafter.open(), sampler(Sampling())
    session.propose(text, 3, before)
    CHANGES[change](drafter)
    after, fresh = sampler(Sampling()), sampler(Sampling())
    session.propose(text, 3, after)
    with torch.no_grad():
        columns = drafter.trainable(torch.tensor([text + after.drawn[:2]]))[0, -3:]
    wanted = drafter.widen(columns)
    known = wanted.isfinite()
    assert torch.equal(torch.stack(after.rows).isfinite(), known)
    assert relative(torch.stack(after.rows)[known], wanted[known]) < TOLERANCE
    drafter.open().propose(text, 3, fresh)
    assert torch.equal(fresh.rows[0], after.rows[0])
    assert not torch.equal(before.rows[0], after.rows[0])


def test_training_in_float32_goes_on_where_bfloat16_has_drafted(tmp_path: Path) -> None:
    drafter, text = cut(family("llama, even"), dtype="bfloat16"), ids(12)
    whole = copy.deepcopy(drafter.trainable.own_tensors())
    session = drafter.open()
    assert drafter._reader is None  # nothing is copied for a row that never drafts
    session.propose(text, 2, sampler(Sampling()))
    own = drafter.trainable.own_tensors()
    assert all(torch.equal(own[name], tensor) for name, tensor in whole.items())
    drafter.save(tmp_path)
    drafter.prepare_training()
    spy = sampler(Sampling())
    session.propose(text, 1, spy)
    with torch.no_grad():
        wanted = drafter.widen(drafter.trainable(torch.tensor([text])))[0, -1]
    assert relative(spy.rows[0][DRAFT_IDS], wanted[DRAFT_IDS]) < TOLERANCE
    drafter.load(tmp_path)


@pytest.mark.parametrize("name", ["llama", UNTIED])
@pytest.mark.parametrize("head", HEADS)
def test_what_is_shared_with_the_target_is_not_copied(name: str, head: str) -> None:
    """By bytes and by storage; a native target's head serves as it is laid out there."""
    target = NativeTarget(family(name), tiny_tokenizer(), take=True, exactness="law")
    model, held = target.model, target.weight_bytes
    parts = target_parts(target)
    drafter = cut(model, head, parts=parts)
    reader: Any = drafter.reader()
    layers = drafter.trainable.trunk.layers
    matrices = [p for p in layers.parameters() if p.ndim == 2]
    rows = [] if head == "whole" else [drafter.trainable.head_weight()]
    copied = sum(4 * tensor.numel() for tensor in [*matrices, *rows])
    assert reader.copied_bytes == copied
    weights = reader._forward.weights
    assert weights.embedding.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert (weights.head is target.head) == (head == "whole")
    assert target.weight_bytes == held
    found, wanted = (read_in_pieces(drafter, kind, ids(31)) for kind in ("auto", "transformers"))
    assert relative(found, wanted) < TOLERANCE


def test_a_whole_head_of_a_target_through_transformers_stays_where_it_is() -> None:
    model = family(UNTIED)
    reader: Any = cut(model, "whole").reader()
    assert reader._forward.weights.head.weight.data_ptr() == model.lm_head.weight.data_ptr()


@pytest.mark.parametrize("merged", [True, False])
def test_merged_adapters_draft_through_it_and_others_through_modules(merged: bool) -> None:
    base: Any = cut(family("llama"))
    config = LoraConfig(
        base="base",
        rank=2,
        alpha=4.0,
        target_modules=["q_proj", "down_proj"],
        train_head=True,
        merged=merged,
        init_seed=0,
    )
    drafter: Any = config.build(BuildContext(base.parts, parts={"base": base}))
    with torch.no_grad():
        for tensor in drafter.adapted.own_tensors().values():
            tensor.add_(0.3)
    session, text = drafter.open(), ids(12)
    session.propose(text, 2, sampler(Sampling()))
    if merged:
        drafter.merge()
    assert drafter.reader().name == ("native" if merged else "transformers")
    if merged:
        ours, theirs = (d.reader()._forward.weights.layers[0] for d in (drafter, base))
        assert ours.up is theirs.up
        assert ours.down is not theirs.down
    with torch.no_grad():
        base.trainable.trunk.layers[0].mlp.up_proj.weight.mul_(0.5)  # it belongs to both
    spy = sampler(Sampling())
    session.propose(text, 2, spy)
    with torch.no_grad():
        wanted = drafter.adapted(torch.tensor([text + spy.drawn[:1]]))[0, -2:]
    assert relative(torch.stack(spy.rows)[:, DRAFT_IDS], wanted) < TOLERANCE
    law = drafter.adapted(torch.tensor([text])), base.trainable(torch.tensor([text]))
    assert relative(*(x.detach() for x in law)) > 100 * TOLERANCE


def test_what_it_does_not_know_goes_through_modules() -> None:
    half = cut(family("llama").to(torch.float16), dtype="float16")
    assert half.reader().name == "transformers"
    gelu = cut(build("Llama", hidden_act="gelu"))
    assert gelu.reader().name == "transformers"
    drafter = cut(family("llama"))
    assert drafter.reader().name == "native"
    drafter.backend = "transformers"
    assert drafter.reader().name == "transformers"
    drafter.backend = "fastest"
    with pytest.raises(ValueError, match="backend=fastest"):
        drafter.reader()

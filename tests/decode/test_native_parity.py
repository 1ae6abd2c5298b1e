"""Bugs these tests would catch in the native forward: a head size taken for hidden size / heads;
grouped heads in the wrong order; a bias or a q/k norm left out, or applied after RoPE; RoPE turned
the wrong way, or scaled at the wrong end; a mask off by one, a sliding window honoured in one layer
too many; a cache that loses tokens where it grows, keeps rolled back ones, or mixes rows of
unequal length; a chunk of a prompt that forgets the chunk before it.

Models are random, so the transformers forward is the reference. Both compute in float32 with other
orders of summation: 1e-4 of the largest logit is the bound, some 1e-6 is what is seen.
"""

import pytest
import torch
from native_models import FAMILIES, ROPES, build, family, ids, logits, relative

from decode.native import target as native_target
from decode.native.cache import FIRST_CAPACITY
from decode.native.target import NativeTarget
from decode.targets.transformers import TransformersTarget
from decode.types import Target

pytestmark = pytest.mark.usefixtures("one_thread")
TOLERANCE = 1e-4
EXACTNESS = ("law", "bitwise")


def pair(name: str, **settings: object) -> tuple[NativeTarget, TransformersTarget]:
    """The two backends over equal models."""
    return NativeTarget(family(name), None, **settings), TransformersTarget(family(name), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("exactness", EXACTNESS)
@pytest.mark.parametrize("take", [False, True], ids=["stacked", "blocked"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name: str, take: bool, exactness: str) -> None:
    ours, theirs = pair(name, take=take, exactness=exactness)
    assert isinstance(ours, Target)
    assert (ours.vocab_size, ours.max_context) == (theirs.vocab_size, theirs.max_context)
    assert ours.eos_token_ids == theirs.eos_token_ids
    for length, width in ((1, 1), (12, 12), (13, 1), (31, 3), (70, 7), (129, 2), (150, 17)):
        text = ids(length, seed=length)
        found, wanted = logits(ours, text, width), logits(theirs, text, width)
        assert found.shape == wanted.shape
        assert relative(found, wanted) < TOLERANCE, (length, width)


@pytest.mark.parametrize("take", [False, True], ids=["stacked", "blocked"])
@pytest.mark.parametrize("kind", ROPES)
def test_scaled_positions_are_those_of_transformers(kind: str, take: bool) -> None:
    settings = {"rope_parameters": {"rope_theta": 5000.0, **ROPES[kind]}}
    plain = logits(TransformersTarget(build("Llama"), None), ids(400), 5)
    theirs = logits(TransformersTarget(build("Llama", **settings), None), ids(400), 5)
    found = logits(NativeTarget(build("Llama", **settings), None, take=take), ids(400), 5)
    assert relative(found, theirs) < TOLERANCE
    assert relative(found, plain) > 100 * TOLERANCE  # the scaling does something here


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_in_chunks_is_the_prompt_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pair(name)
    whole = logits(ours, ids(200), 3)
    monkeypatch.setattr(native_target, "PREFILL_CHUNK", 37)
    chunked = logits(ours, ids(200), 3)
    row = ours.open()
    for token in ids(200)[:-3]:
        ours.prefill(row, [token])
    alone = ours.score([row], [ids(200)[-3:]])[0]
    wanted = logits(theirs, ids(200), 3)
    for found in (whole, chunked, alone):
        assert relative(found, wanted) < TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_after_a_rollback_a_row_is_as_if_it_had_never_read_more(name: str) -> None:
    ours, theirs = pair(name)
    row = ours.open()
    ours.prefill(row, ids(90))
    for kept, seed in ((83, 2), (64, 3), (63, 4), (1, 5), (0, 6)):
        ours.score([row], [ids(11, seed)])
        ours.rollback(row, kept)
        assert row.length == kept
        ours.rollback(row, kept + 5)  # nothing to forget
        assert row.length == kept
        found = ours.score([row], [ids(4, seed + 10)])[0]
        ours.rollback(row, kept)
        wanted = logits(theirs, ids(90)[:kept] + ids(4, seed + 10), 4)
        assert relative(found, wanted) < TOLERANCE


@pytest.mark.parametrize("take", [False, True], ids=["stacked", "blocked"])
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_a_batch_are_what_they_are_alone(name: str, take: bool) -> None:
    ours, theirs = pair(name, take=take)
    lengths, widths = (70, 3, 0, 126, 40), (1, 6, 2, 5, 1)
    rows = [ours.open() for _ in lengths]
    texts = [ids(n + w, seed=n) for n, w in zip(lengths, widths, strict=True)]
    for row, text, length in zip(rows, texts, lengths, strict=True):
        ours.prefill(row, text[:length])
    reads = [text[length:] for text, length in zip(texts, lengths, strict=True)]
    out = ours.score(rows, reads)
    assert out.shape == (5, 6, ours.vocab_size)
    for b, (text, width) in enumerate(zip(texts, widths, strict=True)):
        assert rows[b].length == len(text)
        assert relative(out[b, :width], logits(theirs, text, width)) < TOLERANCE
        assert not out[b, width:].any()
    again = ours.score(rows, [[7]] * 5)  # and they go on by themselves
    for b, text in enumerate(texts):
        assert relative(again[b], logits(theirs, [*text, 7], 1)) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "mistral, window", "qwen3"])
def test_a_row_outgrows_its_first_cache(name: str) -> None:
    ours, theirs = pair(name)
    text, row = ids(700), ours.open()
    assert row.capacity == FIRST_CAPACITY < len(text)
    ours.prefill(row, text[:250])
    for first in range(250, 700, 50):
        found = ours.score([row], [text[first : first + 50]])[0]
    assert relative(found, logits(theirs, text, 50)) < TOLERANCE
    assert row.length == 700 <= row.capacity


def test_a_row_ends_where_the_context_does() -> None:
    ours = NativeTarget(family("llama"), None)
    row = ours.open()
    ours.prefill(row, ids(699))
    ours.score([row], [[1]])
    with pytest.raises(ValueError, match="the context holds 700; cut the prompt"):
        ours.score([row], [[1]])
    assert row.length == 700


@pytest.mark.parametrize("take", [False, True], ids=["stacked", "blocked"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(take: bool) -> None:
    exact = logits(TransformersTarget(family("qwen3"), None), ids(100), 9)
    theirs = logits(TransformersTarget(family("qwen3", torch.bfloat16), None), ids(100), 9)
    ours = logits(NativeTarget(family("qwen3", torch.bfloat16), None, take=take), ids(100), 9)
    assert ours.dtype == torch.bfloat16
    # Both round at every step, in other places: of one size, though not equal.
    assert relative(ours, exact) < 2 * relative(theirs, exact)


@pytest.mark.parametrize("take", [False, True], ids=["stacked", "blocked"])
def test_float32_is_computed_in_float32(take: bool) -> None:
    exact = logits(TransformersTarget(family("llama").double(), None), ids(60), 6)
    ours = logits(NativeTarget(family("llama"), None, take=take), ids(60), 6)
    # Three layers of sums over 44 terms: 1e-6. Products rounded to bfloat16 would give 1e-2.
    assert relative(ours, exact) < 1e-5

"""Bugs these tests would catch: a family computed with another's norms, biases, windows or angles;
padding that is kept, or that writes over another row; logits given to the wrong row where widths
differ, or written over by the next pass; bits that depend on the tokens or rows read beside; a
cache that forgets when it grows, hands a slot out twice or never again; a pass that is captured and
reads where the cache was; greedy text that is not the target's own, or goes on after EOS.

float32 against transformers: the two sum in other orders, 1e-4 of the largest logit. Bits: equal.
In the interpreter a launch takes milliseconds a program, so texts are as short as they can be.
"""

import gc
import logging
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from native_models import FAMILIES, ROPES, build, family, ids, logits, relative

from decode import SpeculativeDecoder
from decode.native import exactness, kernel_forward, static_cache
from decode.native import target as native_target
from decode.native.exactness import width_dependence
from decode.native.greedy import write_greedily
from decode.native.kernel_forward import KernelForward
from decode.native.target import NativeTarget
from decode.policies.fixed import FixedConfig
from decode.targets.backends import make_target
from decode.targets.transformers import TransformersTarget
from drafters.base import BuildContext, target_parts
from drafters.ngram import NgramConfig

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk of keys, so that no program runs for nothing."""
    monkeypatch.setattr(static_cache, "FIRST_CAPACITY", 128)


def target(model: Any, exactness: str = "law") -> NativeTarget:
    return NativeTarget(model.to(DEVICE), None, "m", exactness=exactness, kernels=True)


def forward(ours: NativeTarget) -> KernelForward:
    assert isinstance(ours._forward, KernelForward)
    return ours._forward


def agrees(model: Any, text: list[int], width: int) -> None:
    ours, theirs = target(model), TransformersTarget(model.to(DEVICE), None)
    assert relative(logits(ours, text, width), logits(theirs, text, width)) < 1e-4


def some_slow(names: Iterable[str], *kept: str) -> list[Any]:
    """All names, most of them only where there is time."""
    return [name if name in kept else pytest.param(name, marks=pytest.mark.slow) for name in names]


KEPT = ("llama", "mistral, window", "qwen2", "qwen3, biases, untied")


@pytest.mark.parametrize("name", some_slow(FAMILIES, *KEPT))
def test_a_family_is_transformers(name: str) -> None:
    agrees(family(name), ids(13), 3)


@pytest.mark.parametrize("rope", some_slow(ROPES, "llama3"))
def test_angles_are_scaled_as_the_config_says(rope: str) -> None:
    agrees(build("Llama", rope_parameters={"rope_theta": 500.0, **ROPES[rope]}, **SMALL), ids(7), 2)


def test_rows_of_unlike_widths_and_lengths() -> None:
    model = build("Qwen3", **SMALL)
    ours, theirs = target(model), TransformersTarget(model, None)
    texts = [ids(9, 1), ids(2, 2), ids(6, 3)]
    widths = [3, 2, 1]  # three rows in a bucket of four, three tokens in one of three
    rows = [ours.open() for _ in texts]
    for row, text, width in zip(rows, texts, widths, strict=True):
        ours.prefill(row, text[:-width])
    news = [text[-width:] for text, width in zip(texts, widths, strict=True)]
    for _ in range(2):  # the second time after a rollback
        found = ours.score(rows, news)
        assert [row.length for row in rows] == [9, 2, 6]
        for b, (text, width) in enumerate(zip(texts, widths, strict=True)):
            assert relative(found[b, :width], logits(theirs, text, width)) < 1e-4
            assert not bool(found[b, width:].any())
            ours.rollback(rows[b], len(text) - width)


def test_long_passes_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Llama", **SMALL)
    wanted = logits(TransformersTarget(model, None), ids(11), 7)
    monkeypatch.setattr(kernel_forward, "WIDTHS", (1, 3))
    monkeypatch.setattr(kernel_forward, "ROW_BLOCKS", (1, 3))  # what is compiled beforehand
    monkeypatch.setattr(kernel_forward, "BATCHES", (1, 2))
    ours = target(model)
    assert relative(logits(ours, ids(11), 7), wanted) < 1e-4
    rows = [ours.open() for _ in range(3)]
    ours.prefill(rows[1], ids(4))
    found = ours.score(rows, [ids(2), ids(11)[4:], ids(1)])
    assert relative(found[1], wanted) < 1e-4


class OnePlace:
    """Captured passes at their worst: what one leaves is written over by the next."""

    def __init__(self) -> None:
        self.left: list[torch.Tensor] = []

    def run(self, key: Any, compute: Any, changes: Any = ()) -> Any:
        for tensor in self.left:
            tensor.fill_(torch.nan)
        out = compute()
        self.left = [] if out is None else [out]
        return out

    def clear(self) -> None:
        self.left.clear()


def test_what_a_pass_returns_outlives_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Llama", **SMALL)
    ours = target(model)
    text, row = ids(4), ours.open()
    wanted = logits(TransformersTarget(model, None), text, 4)
    monkeypatch.setattr(kernel_forward, "WIDTHS", (1, 2))
    monkeypatch.setattr(forward(ours), "graphs", OnePlace())
    found = ours.score([row], [text])[0]
    ours.rollback(row, 0)
    again = [ours.score([row], [[token]])[0] for token in text]
    assert relative(found, wanted) < 1e-4
    assert relative(torch.cat(again), wanted) < 1e-4


@pytest.mark.parametrize("name", ["qwen3", "mistral, window"])
def test_bits_do_not_depend_on_what_is_read_beside(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_target, "width_dependence", lambda _: None)  # minutes, here
    kind, changes = FAMILIES[name]
    shape = {**changes, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    ours = target(build(kind, dtype=torch.bfloat16, **shape), "bitwise")
    text = ids(20)
    row, beside = ours.open(), ours.open()
    ours.prefill(beside, ids(5, 3))
    ours.prefill(row, text[:4])
    alone = torch.cat([ours.score([row], [[token]])[0] for token in text[4:9]])
    for width in (2, 5):
        ours.rollback(row, 4)
        assert torch.equal(ours.score([row], [text[4 : 4 + width]])[0], alone[:width])
    ours.rollback(row, 4)
    found = ours.score([beside, row], [ids(6, 5), text[4:8]])[1]
    assert torch.equal(found[:4], alone[:4])
    ours.rollback(row, 0)  # the prompt in other pieces
    for piece in (text[:1], text[1:4]):
        ours.prefill(row, piece)
    assert torch.equal(ours.score([row], [text[4:6]])[0], alone[:2])


def test_a_cache_that_grows_forgets_nothing() -> None:
    ours = target(build("Llama", **SMALL))
    cache = forward(ours).cache
    row = ours.open()
    ours.prefill(row, ids(5))
    wanted = ours.score([row], [ids(2, 4)])
    version = cache.version
    others = [ours.open() for _ in range(4)]  # more rows than there are
    assert len({other.slot for other in others} | {row.slot}) == 5  # type: ignore[union-attr]
    cache.reserve(num_tokens=200)  # more tokens than fit
    assert cache.version > version
    assert cache.capacity >= 200
    ours.rollback(row, 5)
    assert torch.equal(ours.score([row], [ids(2, 4)]), wanted)


def test_slots_are_handed_out_again() -> None:
    ours = target(build("Llama", **SMALL))
    for _ in range(9):
        row = ours.open()
        assert row.length == 0
        del row
        gc.collect()
    assert forward(ours).cache.num_rows == 1


def test_the_context_ends() -> None:
    ours = target(build("Llama", max_position_embeddings=4, **SMALL))
    row = ours.open()
    ours.prefill(row, ids(3))
    with pytest.raises(ValueError, match="cannot take 2 more"):
        ours.score([row], [ids(2)])
    assert ours.score([row], [ids(1)]).shape == (1, 1, 53)


def test_greedy_text_is_the_targets_own() -> None:
    model = build("Qwen2", head_dim=18, hidden_size=36, **SMALL)
    ours, theirs = target(model), TransformersTarget(model, None)
    prompts = [ids(5), ids(1, 2), ids(3, 3)]
    wanted = []
    for prompt in prompts:
        row, text = theirs.open(), []
        token = prompt
        for _ in range(5):
            token = [int(theirs.score([row], [token])[0, -1].argmax())]
            text += token
        wanted.append(text)
    noted: list[int] = []
    found = write_greedily(forward(ours), prompts, 5, note=lambda: noted.append(1))
    assert found == wanted
    assert len(noted) == 5
    eos = wanted[0][1]
    ended = [text[: text.index(eos) + 1] if eos in text else text for text in wanted]
    assert write_greedily(forward(ours), prompts, 5, {eos}) == ended
    assert write_greedily(forward(ours), prompts[:1], 5, {eos}) == ended[:1]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_passes_on_a_gpu(dtype: torch.dtype) -> None:
    shape = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512}
    model = build("Qwen2", dtype=dtype, num_attention_heads=4, **shape).to(DEVICE)
    ours = make_target(model, None, backend="native", exactness="bitwise", take=False)
    assert isinstance(ours, NativeTarget)
    assert ours.width_dependence is None
    assert width_dependence(ours) is None  # every graph a second time
    assert forward(ours).graphs.report()["count"] > 5


def test_a_planted_product_that_depends_on_the_rows_is_found_at_load(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in (("WIDTHS", (3,)), ("NUM_READ", 2), ("NUM_ALONE", 2)):
        monkeypatch.setattr(exactness, name, value)
    model = build("Llama", **SMALL)  # float32, in which so small a model shows it
    with caplog.at_level(logging.WARNING):
        assert target(model, "bitwise").width_dependence is None
    assert not caplog.messages
    whole = kernel_forward.product_parts

    def planted(x: torch.Tensor, weight: torch.Tensor, **rest: Any) -> torch.Tensor:
        if len(x) < 3:
            return whole(x, weight)
        left = x.clone()
        left[:, x.shape[1] // 2 :] = 0
        return whole(left, weight) + whole(x - left, weight)

    monkeypatch.setattr(kernel_forward, "product_parts", planted)
    with caplog.at_level(logging.WARNING):
        found = target(model, "bitwise").width_dependence
    assert found is not None
    assert "when 3 tokens are read at once" in found
    assert found in caplog.messages[0]


def test_speculative_text_is_plain_text_to_the_bit() -> None:
    shape = {**SMALL, "num_hidden_layers": 1}
    ours = target(build("Llama", dtype=torch.bfloat16, **shape))
    ngram = NgramConfig(min_ngram=1, max_ngram=2, max_offer=4).build(
        BuildContext(target_parts(ours))
    )
    fixed = FixedConfig(drafter="ngram", num_draft_tokens=4).build(None, ["ngram"], 0)
    prompts = [[5, 6, 7, 5, 6], [3]]
    plain = SpeculativeDecoder(ours).generate(prompts, 9)
    assert {metrics.backend for metrics in plain.metrics} == {"native"}
    assert plain.token_ids == write_greedily(forward(ours), prompts, 9)
    result = SpeculativeDecoder(ours, {"ngram": ngram}, fixed).generate(prompts, 9)
    assert result.token_ids == plain.token_ids
    steps = [step for records in result.records for step in records]
    assert sum(step.num_accepted for step in steps) > 0
    assert sum(step.num_drafted - step.num_accepted for step in steps) > 0

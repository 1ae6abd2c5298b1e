"""Bugs these tests would catch: logits that depend on how many tokens are read at once, on the rows
beside them, or on how a row came to be, where bitwise exactness is said to hold; a check that finds
nothing because it compares nothing; one that is silent where a kernel depends on its width.

Bits depend on the processor's kernels. So the check is trusted only as far as it speaks: where it
finds nothing, nothing may differ in any of the trials here; where it finds something, it must warn.
The planted kernels below must make it speak on every machine.
"""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from native_models import family, ids
from torch import Tensor

from decode.native import target as native_target
from decode.native.attention import RowAttention
from decode.native.exactness import width_dependence
from decode.native.products import Stacked, blocked_is_possible
from decode.native.target import NativeTarget
from decode.native.weights import Weights, take_weights

pytestmark = pytest.mark.usefixtures("one_thread")
DTYPES = (torch.float32, torch.bfloat16)
needs_blocked = pytest.mark.skipif(
    not blocked_is_possible(torch.device("cpu"), torch.float32), reason="PyTorch without oneDNN"
)


def trials(target: NativeTarget, draws: torch.Generator) -> list[tuple[int, int]]:
    """(position, width) of tokens whose logits are not those they had alone, over many shapes."""
    found = []
    text = ids(330)
    row, beside = target.open(), target.open()
    target.prefill(beside, ids(100, 3))
    for start in (1, 60, 63, 64, 127, 200, 300):
        target.rollback(row, 0)
        target.prefill(row, text[:start])
        alone = [target.score([row], [[token]])[0, 0] for token in text[start : start + 18]]
        for width in range(2, 18):
            target.rollback(row, start)
            out = target.score([row], [text[start : start + width]])[0]
            found += [(start + i, width) for i in range(width) if not torch.equal(out[i], alone[i])]
        for _ in range(4):  # beside another row, after part of the text
            read, width, other = (int(torch.randint(1, 9, (), generator=draws)) for _ in range(3))
            target.rollback(row, start)
            target.score([row], [text[start : start + read]])
            target.rollback(beside, 100)
            new = text[start + read : start + read + width]
            out = target.score([beside, row], [ids(other, 5), new])[1]
            found += [
                (start + read + i, -other)
                for i in range(width)
                if not torch.equal(out[i], alone[read + i])
            ]
    return found


@needs_blocked
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama, even", "mistral, window", "qwen2, windows", "qwen3"])
def test_where_the_check_finds_nothing_nothing_differs(
    name: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        target = NativeTarget(family(name, dtype), None, "a-model", take=True)
    if target.width_dependence is None:
        assert trials(target, torch.Generator().manual_seed(0)) == []
        assert not caplog.messages
    else:
        (told,) = caplog.messages
        assert "exactness=bitwise does not hold for a-model" in told
        assert target.width_dependence in told


class WidthDependent:
    """A product that sums in another order when it gets more rows, as tuned kernels do."""

    def __init__(self, product: Any, rows: int) -> None:
        self.product, self.rows, self.weight = product, rows, product.weight

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) < self.rows:
            return self.product(x)
        halves = x.shape[1] // 2
        left = x.clone()
        left[:, halves:] = 0
        return self.product(left).add_(self.product(x - left))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.product, name)


@pytest.mark.parametrize("rows", [3, 9, 17])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_planted_product_that_depends_on_its_width_is_found(
    dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    take = blocked_is_possible(torch.device("cpu"), dtype)
    sound = NativeTarget(family("llama, even", dtype), None, take=take)
    if sound.width_dependence is not None:
        pytest.skip("this machine's own products depend on the width")

    def planted(*given: Any) -> Weights:
        weights = take_weights(*given)
        return replace(weights, head=WidthDependent(weights.head, rows))  # type: ignore[arg-type]

    monkeypatch.setattr(native_target, "take_weights", planted)
    with caplog.at_level(logging.WARNING):
        target = NativeTarget(family("llama, even", dtype), None, "planted", take=take)
    assert target.width_dependence is not None
    assert f"when {rows} tokens are read at once" in target.width_dependence
    assert "does not hold for planted" in caplog.messages[0]


def test_attention_that_depends_on_the_row_beside_it_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = NativeTarget(family("llama"), None, exactness="law")
    whole = RowAttention.__call__

    def leaking(self: RowAttention, layer: int, heads: Tensor) -> Tensor:
        out = whole(self, layer, heads)
        return out + 1e-3 if heads.storage_offset() else out  # any but the batch's first row

    monkeypatch.setattr(RowAttention, "__call__", leaking)
    assert width_dependence(target) is not None


def test_law_asks_for_nothing_and_pads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    whole = Stacked.silu

    def counted(self: Stacked, x: Tensor) -> Tensor:
        sizes.append(len(x))
        return whole(self, x)

    monkeypatch.setattr(Stacked, "silu", counted)
    law = NativeTarget(family("llama"), None, exactness="law")
    assert law.width_dependence is None
    assert not sizes
    law.score([law.open()], [[1]])
    assert set(sizes) == {1}
    sizes.clear()
    bitwise = NativeTarget(family("llama"), None)
    sizes.clear()
    bitwise.score([bitwise.open()], [[1]])
    assert set(sizes) == {2}

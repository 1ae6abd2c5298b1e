# mypy: disallow-untyped-defs=False
"""What every verification kernel reads: the rows in use of one call, and their penalised logits.

Rows are numbered 0..2K within a batch row b: 0..K are the target's, K + 1 + i is the drafter's at
position i. A vocabulary is cut into S = ceil(V / BLOCK) splits; BLOCK depends on V only, so that
what a row yields never depends on the batch. All offsets into logits are 64-bit.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels.matrix import INTERPRETED

ANY = tl.constexpr(2147483647)  # more than any token


@dataclass(frozen=True, slots=True)
class Call:
    """What the host passes to every kernel of one verification."""

    # target, draft and counts, each with its strides; ids, lengths, one-hot, temperature, penalty
    row_args: tuple[Any, ...]
    sizes: tuple[int, int, int]  # V, K, S
    grid: tuple[int, int, int]  # S, rows of a sequence, B
    greedy: bool  # the host knows every row to be greedy
    blocks: dict[str, Any]  # compile-time sizes and launch options of launch 1

    @property
    def rows(self) -> int:
        return self.grid[1]


@dataclass(frozen=True, slots=True)
class Rules:
    """Truncation rules of one call, on the device; None where the host knows that no row asks."""

    top_k: Tensor | None  # [B]
    top_p: Tensor | None  # [B]
    min_p: Tensor | None  # [B]

    def tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.top_k, self.top_p, self.min_p

    def any(self) -> bool:
        return any(rule is not None for rule in self.tensors())


@triton.jit
def draft_length(ids_ptr, lengths_ptr, b, K, POSITIONS: tl.constexpr):
    """Drafts of row b in use: within num_draft_tokens and before the first -1."""
    i = tl.arange(0, POSITIONS)
    ids = tl.load(ids_ptr + b * K + i, mask=i < K, other=-1)
    length = tl.min(tl.where((ids == -1) | (i >= K), tl.minimum(i, K), K), axis=0)
    if lengths_ptr is not None:
        asked = tl.load(lengths_ptr + b).to(tl.int32)
        length = tl.minimum(length, tl.maximum(asked, 0))
    return length


@triton.jit
def row_position(ids_ptr, lengths_ptr, one_hot_ptr, b, row, K, POSITIONS: tl.constexpr):
    """Position that a row number stands for, or -1 where the row is not in use."""
    length = draft_length(ids_ptr, lengths_ptr, b, K, POSITIONS)
    position = tl.where(row <= K, row, row - K - 1)
    used = tl.where(row <= K, position <= length, position < length)
    if one_hot_ptr is not None:
        one_hot = tl.load(one_hot_ptr + b).to(tl.int32) != 0
        used = used & ((row <= K) | (one_hot == 0))
    return tl.where(used, position, -1)


@triton.jit
def rules_of(top_k_ptr, top_p_ptr, min_p_ptr, b, V):
    """top-k (0: off), top-p (1: off) and min-p (0: off) of row b."""
    top_k = tl.full((), 0, tl.int64)
    top_p = tl.full((), 1.0, tl.float64)
    min_p = tl.full((), 0.0, tl.float64)
    if top_k_ptr is not None:
        top_k = tl.load(top_k_ptr + b).to(tl.int64)
        top_k = tl.where((top_k > 0) & (top_k < V), top_k, 0)
    if top_p_ptr is not None:
        top_p = tl.load(top_p_ptr + b).to(tl.float64)
    if min_p_ptr is not None:
        min_p = tl.load(min_p_ptr + b).to(tl.float64)
    return top_k, top_p, min_p


@triton.jit
def inverse_of(penalty):
    """float32 nearest to one over a penalty, for `penalise_by`."""
    return (1.0 / penalty.to(tl.float64)).to(tl.float32)


@triton.jit
def penalise_by(x, seen, penalty, inverse):
    """Seen logits divided by the penalty where positive, else multiplied; IEEE float32.

    A quotient: that by the reciprocal, corrected by what it leaves of x, which one fused product
    yields exactly. With the reciprocal rounded once this rounds as a division does (Markstein
    1990), where nothing is below 2^-102; what overflows is NaN, as good an error as infinity. No
    branch for every logit, and no float64, whose conversions would bound the launch, but for the
    reciprocal: no quotient of two float32 lies within 2^-49 of itself of where rounding turns.
    """
    if INTERPRETED:  # whose fused product is rounded twice
        quotient = (x.to(tl.float64) * (1.0 / penalty.to(tl.float64))).to(tl.float32)
    else:
        near = x * inverse
        left = tl.fma(-near, penalty, x)
        quotient = tl.fma(left, inverse, near)
    return tl.where(seen, tl.where(x > 0, quotient, x * penalty), x)


@triton.jit
def penalise(x, seen, penalty):
    return penalise_by(x, seen, penalty, inverse_of(penalty))


@triton.jit
def raw_logits(base_ptr, base_b, base_k, base_v, b, position, offsets, V):
    """One model's row at a position as it is stored, -inf past the vocabulary."""
    base_ptr += b.to(tl.int64) * base_b + position.to(tl.int64) * base_k
    return tl.load(base_ptr + offsets.to(tl.int64) * base_v, mask=offsets < V, other=-float("inf"))


@triton.jit
def penalised(
    x, counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, position, offsets, V, K, low, high
):
    """float32 of the row's stored logits x at `offsets`, those of tokens seen penalised.

    No offset lies outside [low, high): most drafts are no token of a part of the vocabulary, and
    then none of it is compared with them.
    """
    x = x.to(tl.float32)
    if penalty_ptr is not None:
        inside = offsets < V
        penalty = tl.load(penalty_ptr + b).to(tl.float32)
        if penalty != 1.0:
            seen = offsets < 0
            if counts_ptr is not None:
                at = b.to(tl.int64) * counts_b + offsets.to(tl.int64) * counts_v
                seen = tl.load(counts_ptr + at, mask=inside, other=0) > 0
            for j in range(0, position):  # counts grow along the draft prefix
                token = tl.load(ids_ptr + b * K + j).to(tl.int32)
                # A loop, since the compiler would turn a branch into work for every logit.
                for _ in range(0, ((token >= low) & (token < high)).to(tl.int32)):
                    seen = seen | (offsets == token)
            x = penalise(x, seen, penalty)
    return x


@triton.jit
def position_logits(
    base_ptr, base_b, base_k, base_v, counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr,
    b, position, offsets, V, K, low=0, high=ANY,
):  # fmt: skip
    """Penalised logits of one model's row at a position."""
    x = raw_logits(base_ptr, base_b, base_k, base_v, b, position, offsets, V)
    return penalised(
        x, counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, position, offsets, V, K,
        low, high,
    )  # fmt: skip


@triton.jit
def row_logits(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, row, position, offsets, V, K,
    low=0, high=ANY,
):  # fmt: skip
    """Penalised logits of a numbered row, the target's or the drafter's."""
    if draft_ptr is None:
        x = position_logits(
            target_ptr, target_b, target_k, target_v, counts_ptr, counts_b, counts_v,
            ids_ptr, penalty_ptr, b, position, offsets, V, K, low, high,
        )  # fmt: skip
    elif target_ptr.dtype == draft_ptr.dtype:
        # One copy of the code for both; strides of 1 are known to the compiler and stay so.
        drafter = (row > K).to(tl.int64)
        x = position_logits(
            tl.where(row > K, draft_ptr, target_ptr),
            target_b + drafter * (draft_b - target_b), target_k + drafter * (draft_k - target_k),
            target_v + drafter * (draft_v - target_v), counts_ptr, counts_b, counts_v,
            ids_ptr, penalty_ptr, b, position, offsets, V, K, low, high,
        )  # fmt: skip
    elif row <= K:
        x = position_logits(
            target_ptr, target_b, target_k, target_v, counts_ptr, counts_b, counts_v,
            ids_ptr, penalty_ptr, b, position, offsets, V, K, low, high,
        )  # fmt: skip
    else:
        x = position_logits(
            draft_ptr, draft_b, draft_k, draft_v, counts_ptr, counts_b, counts_v,
            ids_ptr, penalty_ptr, b, position, offsets, V, K, low, high,
        )  # fmt: skip
    return x


@triton.jit
def logit_at(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, row, position, token, V, K,
):  # fmt: skip
    """Penalised logit of one token; -inf where there is no such token."""
    return row_logits(
        target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
        counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, row, position,
        tl.where((token >= 0) & (token < V), token.to(tl.int64), V), V, K,
    )  # fmt: skip


@triton.jit
def order_key(x):
    """int32 of the order of the float32 values, both zeros alike; NaN is anywhere."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def key_value(key):
    """The float32 whose order_key this int32 is."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def row_peak(max_ptr, cell, S, SPLITS: tl.constexpr):
    """Largest logit of a numbered row, from its splits."""
    s = tl.arange(0, SPLITS)
    peaks = tl.load(max_ptr + cell.to(tl.int64) * S + s, mask=s < S, other=-float("inf"))
    return tl.max(peaks, axis=0)

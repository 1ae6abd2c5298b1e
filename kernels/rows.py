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


@dataclass(frozen=True, slots=True)
class Call:
    """What the host passes to every kernel of one verification."""

    # target, draft and counts, each with its strides; ids, lengths, one-hot, temperature, penalty
    row_args: tuple[Any, ...]
    sizes: tuple[int, int, int]  # V, K, S
    grid: tuple[int, int, int]  # S, rows of a sequence, B
    greedy: bool  # the host knows every row to be greedy
    passes: int  # digits of four bits that tell two logits apart
    blocks: dict[str, int]  # compile-time sizes and the number of warps

    @property
    def rows(self) -> int:
        return self.grid[1]


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
def penalise(x, seen, penalty):
    """Seen logits divided by the penalty where positive, else multiplied; IEEE float32."""
    return tl.where(seen, tl.where(x > 0, tl.div_rn(x, penalty), x * penalty), x)


@triton.jit
def split_logits(
    base_ptr, stride_v, offsets, V, counts_ptr, counts_v, ids_ptr, penalty_ptr, b, K, position
):
    """Penalised float32 logits of one row at `offsets`, -inf past the vocabulary."""
    inside = offsets < V
    at = offsets.to(tl.int64)
    x = tl.load(base_ptr + at * stride_v, mask=inside, other=-float("inf")).to(tl.float32)
    if penalty_ptr is not None:
        penalty = tl.load(penalty_ptr + b).to(tl.float32)
        if penalty != 1.0:
            seen = offsets < 0
            if counts_ptr is not None:
                seen = tl.load(counts_ptr + at * counts_v, mask=inside, other=0) > 0
            for j in range(0, position):  # counts grow along the draft prefix
                seen = seen | (offsets == tl.load(ids_ptr + b * K + j))
            x = penalise(x, seen, penalty)
    return x


@triton.jit
def row_logits(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, row, position, offsets, V, K,
):  # fmt: skip
    """Penalised logits of a numbered row, the target's or the drafter's."""
    wide, at = b.to(tl.int64), position.to(tl.int64)
    if counts_ptr is not None:
        counts_ptr += wide * counts_b
    if draft_ptr is None or row <= K:
        x = split_logits(
            target_ptr + wide * target_b + at * target_k, target_v, offsets, V,
            counts_ptr, counts_v, ids_ptr, penalty_ptr, b, K, position,
        )  # fmt: skip
    else:
        x = split_logits(
            draft_ptr + wide * draft_b + at * draft_k, draft_v, offsets, V,
            counts_ptr, counts_v, ids_ptr, penalty_ptr, b, K, position,
        )  # fmt: skip
    return x


@triton.jit
def logits_at_drafts(
    base_ptr, stride_k, stride_v, ids, drafted, counts_ptr, counts_v, ids_ptr, penalty_ptr,
    b, K, POSITIONS: tl.constexpr,
):  # fmt: skip
    """Penalised logit of each position's own draft [POSITIONS]; -inf where nothing was drafted."""
    i = tl.arange(0, POSITIONS).to(tl.int64)
    at = ids.to(tl.int64)
    x = tl.load(base_ptr + i * stride_k + at * stride_v, mask=drafted, other=-float("inf"))
    x = x.to(tl.float32)
    if penalty_ptr is not None:
        penalty = tl.load(penalty_ptr + b).to(tl.float32)
        seen = drafted & (i < 0)
        if counts_ptr is not None:
            seen = tl.load(counts_ptr + at * counts_v, mask=drafted, other=0) > 0
        for j in range(0, K):
            seen = seen | ((j < i) & (ids == tl.load(ids_ptr + b * K + j)))
        x = tl.where(penalty != 1.0, penalise(x, seen & drafted, penalty), x)
    return x


@triton.jit
def order_key(x):
    """int64 in [0, 2^32) with the order of the float32 values, both zeros alike."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, -1 - bits, bits + 2147483648)


@triton.jit
def key_value(key):
    """The float32 whose order_key this is."""
    bits = tl.where(key >= 2147483648, key - 2147483648, -1 - key)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def weight(x, peak, temperature):
    """exp((x - peak) / T) in float64, 0 for a logit of -inf."""
    return tl.exp((x.to(tl.float64) - peak.to(tl.float64)) / temperature)


@triton.jit
def row_peak(max_ptr, cell, S, SPLITS: tl.constexpr):
    """Largest logit of a numbered row, from its splits."""
    s = tl.arange(0, SPLITS)
    peaks = tl.load(max_ptr + cell.to(tl.int64) * S + s, mask=s < S, other=-float("inf"))
    return tl.max(peaks, axis=0)

# mypy: disallow-untyped-defs=False
"""Launch 1 of kernels/verify.py where logits are used as they are stored: no penalty, no groups.

What bounds this launch is how many instructions a token takes and how many bytes are under way. A
split is read in PARTS parts of one load a thread each, all asked for before anything is looked at.
A thread keeps them as they came, two bfloat16 in a register; their maxima are taken two at a time,
and only then, by the split's own maximum, is one weight after the other worked out.
"""

import triton
import triton.language as tl

from kernels.matrix import INTERPRETED
from kernels.rows import row_logits, row_position
from kernels.weights import lowest_of, powers_of, weights

LN_2 = tl.constexpr(0.6931471805599453)
# Powers of two of logits: what is above TOP (or not finite) is summed exactly instead, and FLOOR is
# far enough below that for no weight.
TOP, FLOOR = tl.constexpr(16384.0), tl.constexpr(-65536.0)


@triton.jit
def larger(a, b):
    """The larger of each, NaN if one is; two 16-bit floats for one instruction."""
    if INTERPRETED:
        return tl.maximum(a.to(tl.float32), b.to(tl.float32), propagate_nan=tl.PropagateNan.ALL)
    elif a.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif a.dtype == tl.float16:
        return tl.inline_asm_elementwise(
            "max.NaN.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def wide(x):
    """float32 of logits; of two bfloat16 in a register one is shifted up, the other masked."""
    if INTERPRETED or x.dtype != tl.bfloat16:
        return x.to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )


@triton.jit
def row_start(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    b, row, position, K,
):  # fmt: skip
    """Pointer to the first logit of a numbered row, and the distance between two of them."""
    base, of_b, of_k, of_v = target_ptr, target_b, target_k, target_v
    if draft_ptr is not None:
        drafter = (row > K).to(tl.int64)
        base = tl.where(row > K, draft_ptr, target_ptr)
        of_b = target_b + drafter * (draft_b - target_b)
        of_k = target_k + drafter * (draft_k - target_k)
        of_v = target_v + drafter * (draft_v - target_v)
    return base + b.to(tl.int64) * of_b + position.to(tl.int64) * of_k, of_v


@triton.jit
def parts_from(start, stride, left, PART: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr):
    """PARTS tensors [PART] of logits from a pointer on; unless WHOLE, -inf where none is left."""
    parts = ()
    offsets = tl.arange(0, PART)
    for i in tl.static_range(PARTS):
        at = start + (i * PART + offsets).to(tl.int64) * stride
        if WHOLE:
            x = tl.load(at)
        else:
            x = tl.load(at, mask=i * PART + offsets < left, other=-float("inf"))
        parts = parts + (x,)  # type: ignore[assignment] # noqa: RUF005 (no unpacking here)
    return parts


@triton.jit
def split_parts(start, stride, first, V, PART: tl.constexpr, PARTS: tl.constexpr):
    """PARTS tensors [PART] of a row's logits from token `first` on, -inf past the vocabulary."""
    start += first.to(tl.int64) * stride
    if first + PART * PARTS <= V:  # all but the last split: no mask, nothing to fill in
        parts = parts_from(start, stride, V, PART, PARTS, True)
    else:
        parts = parts_from(start, stride, V - first, PART, PARTS, False)
    return parts


@triton.jit
def largest(parts, PARTS: tl.constexpr):
    """The largest logit; +inf where one is NaN."""
    most = parts[0]
    for i in tl.static_range(1, PARTS):
        most = larger(most, parts[i])
    most = most.to(tl.float32)
    return tl.max(tl.where(most == most, most, float("inf")), axis=0)


@triton.jit
def lowest_id(parts, peak, first, V, PART: tl.constexpr, PARTS: tl.constexpr):
    """Lowest id of the largest logit; V where there is none."""
    best = tl.full((PART,), 2147483647, tl.int32)
    offsets = first + tl.arange(0, PART)
    for i in tl.static_range(PARTS):
        best = tl.minimum(best, tl.where(wide(parts[i]) == peak, offsets + i * PART, V))
    return tl.min(best, axis=0)


@triton.jit
def sum_by_peak(
    parts, peak, temperature, PART: tl.constexpr, PARTS: tl.constexpr, LANE: tl.constexpr
):
    """Sum of weights by the largest logit, relative error some 1e-7; may it be used?

    A weight is 2^(x c - m) with m the rounded product of the peak: one fused product, one power,
    one sum. What m is off by weighs on all weights alike. What float32 lacks of c weighs on those
    of a thread as on what its sum amounts to: no token is far from that and has weight.
    """
    scale = powers_of(temperature)
    high = scale.to(tl.float32)
    top = tl.maximum(peak * high, FLOOR)
    fine = tl.abs(peak * high) <= TOP
    sums = tl.exp2(tl.fma(wide(parts[0]), high, -top))
    for i in tl.static_range(1, PARTS):
        sums += tl.exp2(tl.fma(wide(parts[i]), high, -top))
    own = tl.sum(tl.reshape(sums, (PART // LANE, LANE)), axis=1)
    lacking = ((scale - high.to(tl.float64)) * (temperature * (LN_2 * LN_2))).to(tl.float32)
    # Of equal tokens the sum lies as many powers above one, as they are; half of that at most is
    # what this is off by.
    middle = tl.log2(own) - 3.0
    own += tl.where(own > 0, own * middle * lacking, 0.0)
    total = tl.sum(own, axis=0).to(tl.float64)
    off = tl.where(
        fine, (top.to(tl.float64) - peak.to(tl.float64) * high.to(tl.float64)) * LN_2, 0.0
    )
    return total * (1.0 + off * (1.0 + 0.5 * off)), fine


@triton.jit
def exact_sum(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, row, position, first, V, K,
    peak, temperature, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sum of weights of a split in float64; NaN where a logit is.

    Logits are read again, from the cache, so that few registers hold float64 at a time.
    """
    scale = powers_of(temperature)
    lowest = lowest_of(peak, temperature, -float("inf"))
    sums = tl.zeros((CHUNK,), tl.float64)
    for start in range(0, BLOCK, CHUNK):
        x = row_logits(
            target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
            counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, row, position,
            first + start + tl.arange(0, CHUNK), V, K, first + start, first + start + CHUNK,
        )  # fmt: skip
        sums += tl.where(x == x, weights(x, peak, lowest, scale), float("nan"))
    return tl.sum(sums, axis=0)


@triton.jit
def plain_split(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    ids_ptr, lengths_ptr, one_hot_ptr, temperature_ptr, max_ptr, best_ptr, sum_ptr, drafted_ptr,
    b, row, split, cell, at, V, K, POSITIONS: tl.constexpr, BLOCK: tl.constexpr,
    LANE: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, EAGER: tl.constexpr,
):  # fmt: skip
    """What stats_kernel does where logits are used as they are stored (kernels/plain_stats.py)."""
    PART: tl.constexpr = BLOCK // PARTS
    first = split * BLOCK
    temperature = tl.load(temperature_ptr + b).to(tl.float64)
    position = row_position(ids_ptr, lengths_ptr, one_hot_ptr, b, row, K, POSITIONS)
    if (position >= 0) | EAGER:
        place = tl.where(row <= K, row, row - K - 1)
        start, stride = row_start(
            target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
            b, row, place, K,
        )  # fmt: skip
        parts = split_parts(start, stride, first, V, PART, PARTS)
        # Threads meet here, so that nothing of this can wait until the row is known to be in use.
        peak = largest(parts, PARTS)
        if position >= 0:
            if split == 0:
                token = tl.load(ids_ptr + b * K + place, mask=place < K, other=-1).to(tl.int64)
                known = (token >= 0) & (token < V)
                own = tl.load(start + token * stride, mask=known, other=-float("inf"))
                tl.store(drafted_ptr + cell, own.to(tl.float32))
            if sum_ptr is None or temperature == 0:
                tl.store(max_ptr + at, peak)
                tl.store(best_ptr + at, lowest_id(parts, peak, first, V, PART, PARTS))
            else:
                total, fine = sum_by_peak(parts, peak, temperature, PART, PARTS, LANE)
                if (fine == 0) & (tl.abs(peak) < float("inf")):
                    total = exact_sum(
                        target_ptr, target_b, target_k, target_v,
                        draft_ptr, draft_b, draft_k, draft_v, None, 0, 0, ids_ptr, None,
                        b, row, position, first, V, K, peak, temperature, BLOCK, CHUNK,
                    )  # fmt: skip
                bad = (total != total) | (peak == float("inf"))
                tl.store(max_ptr + at, tl.where(bad, float("inf"), peak))
                tl.store(sum_ptr + at, tl.where(bad, float("nan"), total))

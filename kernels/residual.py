# mypy: disallow-untyped-defs=False
r"""What the target's law has beyond the drafter's at one position: max(p - q, 0), two ways.

In float32, which is what bounds launch 2 of kernels/verify.py: with M, P of the target's row (M', Q
of the drafter's; of launch 1) and c = log2(e) / T,

    a = 2^((x - M) c)    b = 2^((y - M') c)    r = max(a - (P / Q) b, 0)

is P max(p - q, 0). x - M of bfloat16 and float16 is exact where it matters, of float32 rounded by
2^-24 of itself, and no cancellation is left behind it: whatever the logits' size and temperature,
a power of t is off by some 2^-24 |t|. c is two float32 (c_h is cut off, so that the rest is above
0): -inf times both is -inf, and needs no look. A weight is off by a few 1e-7 of itself, r summed
over the row by as much of P at most, the law that is emitted too, since a rejection is as rare as
R = sum max(p - q, 0) is small. Only R itself is not known from this where it is little.

In float64, for R below LITTLE: P and Q first, without the error of launch 1's sums, then max(w / P
- w' / Q, 0), walked by one program. One step of so many positions asks for this at most as LITTLE
says, since R is also the chance of a rejection.
"""

import triton
import triton.language as tl

from kernels.accept import three_sums
from kernels.rows import penalised, raw_logits
from kernels.weights import weights

NO_RESIDUAL = tl.constexpr(1e-12)  # as in the reference
LITTLE = tl.constexpr(2.0**-12)  # R below which float32 is not asked
FEWEST, MOST, TINY = tl.constexpr(2.0**-100), tl.constexpr(2.0**120), tl.constexpr(2.0**-126)


@triton.jit
def final_logits(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    b, n, first, V, drawn, SIZE: tl.constexpr,
):  # fmt: skip
    """SIZE logits of both rows at position n as they are stored; the target's twice if alone."""
    offsets = first + tl.arange(0, SIZE)
    x = raw_logits(target_ptr, target_b, target_k, target_v, b, n, offsets, V)
    y = x
    if draft_ptr is not None:
        # No draft, no reading: the logits are -inf, and the weights 0. A branch instead would have
        # these asked for only when the target's have come.
        y = raw_logits(draft_ptr, draft_b, draft_k, draft_v, b, n, offsets, tl.where(drawn, V, 0))
    return x, y


@triton.jit
def final_penalised(
    x, y, draft_ptr, counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, n, first, V, K, drawn,
    SIZE: tl.constexpr,
):  # fmt: skip
    """float32 of the logits that `final_logits` gave, penalised."""
    offsets = first + tl.arange(0, SIZE)
    x = penalised(
        x, counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, n, offsets, V, K,
        first, first + SIZE,
    )  # fmt: skip
    if draft_ptr is not None:
        y = penalised(
            y, counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, n, offsets,
            tl.where(drawn, V, 0), K, first, first + SIZE,
        )  # fmt: skip
    return x, y


@triton.jit
def finite(peak):
    """Of a row that is none (nothing was drafted, or no law): 0, to keep NaN out of weights."""
    return tl.where(tl.abs(peak) < float("inf"), peak, 0.0)


@triton.jit
def two_parts(scale):
    """float32 that add up to the scale: its upper bits, and the rest of it, above 0."""
    scale = tl.minimum(tl.maximum(scale, FEWEST), MOST)
    bits = scale.to(tl.int64, bitcast=True)
    high = ((bits >> 29) << 29).to(tl.float64, bitcast=True)
    return high.to(tl.float32), tl.maximum((scale - high).to(tl.float32), TINY)


@triton.jit
def weights_near(x, peak, high, low):
    """2^((x - peak) scale) in float32 for x at most the peak, by the two parts of the scale."""
    behind = x - peak
    return tl.exp2(tl.fma(behind, low, behind * high))


@triton.jit
def residual_near(
    x, y, draft_ptr, one_hot_ptr, threshold_ptr, first, peak, draft_peak, threshold,
    draft_threshold, high, low, ratio, sure, SIZE: tl.constexpr,
):  # fmt: skip
    """r of SIZE penalised logits, in float32; `ratio` is P / Q, `sure` a draft made by no law."""
    if threshold_ptr is not None:
        x = tl.where(x >= threshold, x, -float("inf"))
    if draft_ptr is None or one_hot_ptr is not None:
        # A loop, since the compiler would turn a branch into work for every logit.
        for _ in range(0, ((sure >= first) & (sure < first + SIZE)).to(tl.int32)):
            x = tl.where(first + tl.arange(0, SIZE) == sure, -float("inf"), x)
    r = weights_near(x, peak, high, low)
    if draft_ptr is not None:
        if threshold_ptr is not None:
            y = tl.where(y >= draft_threshold, y, -float("inf"))
        r = tl.maximum(tl.fma(weights_near(y, draft_peak, high, low), -ratio, r), 0.0)
    return r


@triton.jit
def laws(
    x, y, draft_ptr, one_hot_ptr, first, peak, lowest, draft_peak, draft_lowest, scale, sure,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Both laws' weights of SIZE penalised logits, in float64; 0 where nothing was drafted."""
    offsets = first + tl.arange(0, SIZE)
    if draft_ptr is None:
        q = tl.where(offsets == sure, 1.0, 0.0).to(tl.float64)
    else:
        q = weights(y, draft_peak, draft_lowest, scale)
        if one_hot_ptr is not None:
            q = tl.where(offsets == sure, 1.0, q)
    return weights(x, peak, lowest, scale), q


@triton.jit
def exact_strips(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    counts_ptr, counts_b, counts_v, ids_ptr, one_hot_ptr, penalty_ptr, strips_ptr,
    b, n, V, K, scale, peak, lowest, draft_peak, draft_lowest, drawn, sure,
    TILE: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """P, Q and R in float64, and at `strips_ptr` what each strip of the row has of R.

    Where there is no residual, the law itself takes its place (the last sum is 1 then).
    """
    whole = tl.full((), 1.0, tl.float64)
    draft_whole = tl.full((), 1.0, tl.float64)
    total = tl.full((), 0.0, tl.float64)
    walk, walks = tl.full((), 0, tl.int32), tl.full((), 2, tl.int32)
    while walk < walks:  # for P and Q, for R, and where that is none for P's strips
        unit = 1.0 / whole
        draft_unit = tl.where(walk < 2, 1.0 / draft_whole, 0.0)
        sums = tl.zeros((TILE,), tl.float64)
        draft_sums, residuals = sums, sums
        for first in range(0, V, TILE):
            x, y = final_logits(
                target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
                b, n, first, V, drawn, TILE,
            )  # fmt: skip
            x, y = final_penalised(
                x, y, draft_ptr, counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr,
                b, n, first, V, K, drawn, TILE,
            )  # fmt: skip
            p, q = laws(
                x, y, draft_ptr, one_hot_ptr, first, peak, lowest, draft_peak, draft_lowest, scale,
                sure, TILE,
            )  # fmt: skip
            r = tl.maximum(p * unit - q * draft_unit, 0.0)
            strip = first // STRIP + tl.arange(0, TILE // STRIP)
            note = tl.sum(tl.reshape(r, (TILE // STRIP, STRIP)), axis=1)
            tl.store(strips_ptr + strip, note, mask=strip * STRIP < V)
            sums, draft_sums, residuals = sums + p, draft_sums + q, residuals + r
        all_of_p, all_of_q, total = three_sums(sums, draft_sums, residuals)
        if walk == 0:
            whole = all_of_p
            draft_whole = tl.where(all_of_q > 0, all_of_q, 1.0)
        if (walk == 1) & (total <= NO_RESIDUAL):
            walks += 1
        walk += 1
    tl.debug_barrier()  # the strips are there for every thread
    return whole, draft_whole, total, walks == 2

# mypy: disallow-untyped-defs=False
# ruff: noqa: SIM102 (what the compiler decides stays apart from what the device decides)
"""How far the drafts of one sequence are kept: what launch 2 of kernels/verify.py begins with.

Every program of a sequence decides anew, from a few thousand numbers in the cache, rather than wait
for one that does.
"""

import triton
import triton.language as tl

from kernels.matrix import INTERPRETED
from kernels.weights import exp2_double

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def log_or_minus_inf(p):
    return tl.where(p > 0, tl.log(tl.where(p > 0, p, 1.0)), -float("inf"))


@triton.jit
def _add_two(a, b, more_a, more_b):
    return a + more_a, b + more_b


@triton.jit
def _add_four(a, b, c, d, more_a, more_b, more_c, more_d):
    return a + more_a, b + more_b, c + more_c, d + more_d


@triton.jit
def _lower(i, a, b, other, more_a, more_b):
    return tl.minimum(i, other), tl.where(i < other, a, more_a), tl.where(i < other, b, more_b)


@triton.jit
def at_lowest(index, a, b):
    """The lowest index, and what both vectors hold there (anything where it is there twice)."""
    if INTERPRETED:
        least = tl.min(index, axis=0)
        here = index == least
        return least, *two_sums(tl.where(here, a, 0.0), tl.where(here, b, 0.0))
    return tl.reduce((index, a, b), 0, _lower)


@triton.jit
def two_sums(a, b):
    """Sums of two vectors, for the time of one: what takes time is that threads meet."""
    if INTERPRETED:  # which takes a reduction of several vectors element by element
        return tl.sum(a, axis=0), tl.sum(b, axis=0)
    return tl.reduce((a, b), 0, _add_two)


@triton.jit
def _add_three(a, b, c, more_a, more_b, more_c):
    return a + more_a, b + more_b, c + more_c


@triton.jit
def three_sums(a, b, c):
    """Sums of three vectors, for the time of one."""
    if INTERPRETED:
        return tl.sum(a, axis=0), tl.sum(b, axis=0), tl.sum(c, axis=0)
    return tl.reduce((a, b, c), 0, _add_three)


@triton.jit
def four_sums(a, b, c, d):
    """Sums of four vectors, for the time of one."""
    if INTERPRETED:
        return tl.sum(a, axis=0), tl.sum(b, axis=0), tl.sum(c, axis=0), tl.sum(d, axis=0)
    return tl.reduce((a, b, c, d), 0, _add_four)


@triton.jit
def gather_rows(
    max_ptr, sum_ptr, kept_ptr, cells, there, used, S, scale,
    ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Maximum and mass of ROWS rows, over their splits in order.

    `there` says which of `cells` exist: those are asked for before it is known which are `used`.
    """
    s = tl.arange(0, SPLITS)
    at = cells.to(tl.int64)[:, None] * S + s[None, :]
    mask = there[:, None] & (s < S)[None, :]
    maxima = tl.load(max_ptr + at, mask=mask, other=-float("inf"))
    total = tl.full((ROWS,), 1.0, tl.float64)
    if sum_ptr is not None:
        sums = tl.load(sum_ptr + at, mask=mask, other=0.0)
        if kept_ptr is not None:
            kept = tl.load(kept_ptr + cells, mask=there, other=-1.0)
    # What was never written may be anything, NaN too.
    maxima = tl.where(used[:, None], maxima, -float("inf"))
    peak = tl.max(maxima, axis=1)
    if sum_ptr is not None:
        alive = used[:, None] & (sums > 0) & (tl.abs(peak) < float("inf"))[:, None]
        behind = tl.where(alive, maxima, 0.0).to(tl.float64)
        behind -= tl.where(alive, peak[:, None], 0.0).to(tl.float64)
        factor = exp2_double(tl.maximum(behind * scale, -1000.0))
        total = tl.sum(tl.where(alive, sums * factor, 0.0), axis=1)
        if kept_ptr is not None:
            total = tl.where(used & (kept > 0), kept, total)
        total = tl.where(total > 0, total, 1.0)
    return peak, total


@triton.jit
def lowest_best(
    max_ptr, best_ptr, cell, used, peak, S, V, POSITIONS: tl.constexpr, SPLITS: tl.constexpr
):
    """Lowest id of each row's maximum [POSITIONS]."""
    i, s = tl.arange(0, POSITIONS), tl.arange(0, SPLITS)
    at = (cell + i).to(tl.int64)[:, None] * S + s[None, :]
    mask = used[:, None] & (s < S)[None, :]
    maxima = tl.load(max_ptr + at, mask=mask, other=-float("inf"))
    ids = tl.load(best_ptr + at, mask=mask, other=0)
    return tl.min(tl.where(mask & (maxima == peak[:, None]), ids, V), axis=1).to(tl.int64)


@triton.jit
def prob_at_drafts(x, threshold, drafted, peak, total, scale):
    """Probability of each row's draft, whose logit is x; 0 where nothing was drafted."""
    kept = drafted & (x > -float("inf")) & (tl.abs(peak) < float("inf")) & (x >= threshold)
    behind = tl.where(kept, x, 0.0).to(tl.float64) - tl.where(kept, peak, 0.0).to(tl.float64)
    return tl.where(kept, tl.exp(behind * (scale * LN_2)) / total, 0.0)


@triton.jit
def broken_parameters(
    lengths_ptr, one_hot_ptr, temperature_ptr, penalty_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    b, K, length, DRAFTED: tl.constexpr,
):  # fmt: skip
    """True where a parameter of row b breaks the contract."""
    given = tl.load(temperature_ptr + b).to(tl.float64)
    broken = (given < 0) | (given == float("inf")) | (given != given)
    if lengths_ptr is not None:
        asked = tl.load(lengths_ptr + b)
        broken = broken | (asked < 0) | (asked > K)
    if not DRAFTED:
        if one_hot_ptr is not None:
            broken = broken | ((tl.load(one_hot_ptr + b) == 0) & (length > 0))
    if top_k_ptr is not None:
        broken = broken | (tl.load(top_k_ptr + b) < 0)
    if top_p_ptr is not None:
        top_p = tl.load(top_p_ptr + b)
        broken = broken | (top_p <= 0) | (top_p > 1) | (top_p != top_p)
    if min_p_ptr is not None:
        min_p = tl.load(min_p_ptr + b)
        broken = broken | (min_p < 0) | (min_p > 1) | (min_p != min_p)
    if penalty_ptr is not None:
        penalty = tl.load(penalty_ptr + b)
        broken = broken | (penalty <= 0) | (penalty == float("inf")) | (penalty != penalty)
    return broken

# mypy: disallow-untyped-defs=False
"""The rules of truncation among the few candidates that kernels/truncate.py packed.

A candidate knows what the candidates above it amount to, and so whether it is kept:

    top-k   fewer than k lie above it
    top-p   what lies above it does not reach top_p of what top-k kept
    min-p   its own weight reaches min_p

That takes one comparison of all with all, and threads meet twice: for what top-k keeps in all, and
for the least that all rules keep.
"""

import triton
import triton.language as tl

from kernels.matrix import INTERPRETED
from kernels.rows import key_value


@triton.jit
def exact_weights(x, peak, temperature):
    """exp((x - peak) / T) as the specification has it, for the few that a rule compares."""
    return tl.exp((x.to(tl.float64) - peak.to(tl.float64)) / temperature)


@triton.jit
def pair_of(x, token):
    """int64 of a float32 and an id: one number to store for both."""
    high = x.to(tl.int32, bitcast=True).to(tl.int64) << 32
    return high | token.to(tl.int64)


@triton.jit
def logit_of(pair):
    return (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def store_where(pointers, values, mask):
    """tl.store of int32 or int64 by the threads that have the values.

    Triton would lay scattered stores out anew, one address a thread after the other: all values and
    addresses would pass through shared memory first.
    """
    wide: tl.constexpr = values.dtype.primitive_bitwidth == 64
    if INTERPRETED:
        tl.store(pointers, values, mask=mask)
    elif wide:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.b64 [$1], $3; mov.b32 $0, 0; }",
            "=r,l,r,l",
            [pointers.to(tl.int64), mask.to(tl.int32), values],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.b32 [$1], $3; mov.b32 $0, 0; }",
            "=r,l,r,r",
            [pointers.to(tl.int64), mask.to(tl.int32), values],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def store_pairs(pointers, x, tokens, value, after, most):
    """Pairs of x and tokens where x reaches a value and `after` is no more than `most`.

    Compared here: the compiler would keep a bit of every comparison from where it counts them.
    """
    if INTERPRETED:
        tl.store(pointers, pair_of(x, tokens), mask=(x >= value) & (after <= most))
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p, q; setp.ge.f32 p, $2, $4; setp.le.and.s32 q, $5, $6, p; "
            "@q st.global.v2.b32 [$1], {$3, $2}; mov.b32 $0, 0; }",
            "=r,l,f,r,f,r,r",
            [pointers.to(tl.int64), x, tokens, value, after, most],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _add_both(a, b, more_a, more_b):
    return a + more_a, b + more_b


@triton.jit
def counts_and_sums(those, values):
    """How many of each column are, and the sum of each column, for the time of one."""
    if INTERPRETED:
        return tl.sum(those.to(tl.int32), axis=0), tl.sum(values, axis=0)
    return tl.reduce((those.to(tl.int32), values), 0, _add_both)


@triton.jit
def _least_sum_any(x, mass, flag, more_x, more_mass, more_flag):
    return tl.minimum(x, more_x), mass + more_mass, flag | more_flag


@triton.jit
def least_sum_any(x, mass, flag):
    """Minimum, sum and maximum of three vectors, for the time of one."""
    if INTERPRETED:
        return tl.min(x, axis=0), tl.sum(mass, axis=0), tl.max(flag, axis=0)
    return tl.reduce((x, mass, flag), 0, _least_sum_any)


@triton.jit
def decide(
    pairs, packed_ptr, packed_ids_ptr, weight_ptr, count, whole, total, top_k, top_p, min_p,
    peak, temperature, edge, PACKED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Threshold and kept mass from the `count` logits at or above `edge`, and if that decides.

    `pairs` [PACKED] are theirs and anything after; their logits, ids and weights are written, with
    -inf and 0 after. `whole`: nothing of the row lies below the edge. An unknown mass is NaN.
    """
    d = tl.arange(0, PACKED)
    alive = d < count
    z = tl.where(alive, logit_of(pairs), -float("inf"))
    w = tl.where(alive, exact_weights(tl.where(alive, z, peak), peak, temperature), 0.0)
    tl.store(packed_ptr + d, z)
    tl.store(packed_ids_ptr + d, pairs.to(tl.int32))
    tl.store(weight_ptr + d, w)
    tl.debug_barrier()
    # Read at once, so that what follows finds them near.
    z = tl.load(packed_ptr + d)
    w = tl.load(weight_ptr + d)
    above = tl.zeros((PACKED,), tl.int32)
    over = tl.zeros((PACKED,), tl.float64)
    for start in range(0, tl.minimum(count, PACKED), CHUNK):
        j = start + tl.arange(0, CHUNK)
        other = tl.load(packed_ptr + j)
        theirs = tl.load(weight_ptr + j)
        more = other[:, None] > z[None, :]
        num, mass = counts_and_sums(more, tl.where(more, theirs[:, None], 0.0))
        above += num
        over += mass
    kept = alive
    decided = (count > 0) & (count <= PACKED)
    sure = whole  # nothing below the edge could be kept
    if top_k > 0:
        kept = kept & (above < top_k)
        sure = sure | (count >= top_k)
        decided = decided & sure
    if top_p < 1:
        mass = tl.sum(tl.where(kept, w, 0.0), axis=0)
        wanted = top_p * tl.where(sure, mass, total)
        # The largest is kept though nothing be wanted.
        kept = kept & ((over < wanted) | (above == 0))
        sure = sure | (mass >= wanted)
        decided = decided & sure
    heavy = kept & (w >= min_p)
    threshold, kept_mass, fewer = least_sum_any(
        tl.where(heavy, z, float("inf")), tl.where(heavy, w, 0.0), (kept & ~heavy).to(tl.int32)
    )
    if min_p > 0:
        # What is kept ends above the edge, or everything at the edge is kept so far.
        decided = decided & (sure | (fewer > 0))
    if not decided:  # what a search may begin with: too little lies at or above the edge
        threshold = tl.where(count <= PACKED, key_value(edge), float("inf"))
    return threshold, tl.where(decided, kept_mass, float("nan")), decided

# mypy: disallow-untyped-defs=False
"""The threshold of a row that kernels/truncate.py could not decide among a few candidates.

A flat law, a long top-k, many ties: the threshold is looked for by bisection over the keys of
float32, and each step walks the row.
"""

import triton
import triton.language as tl

from kernels.candidates import exact_weights
from kernels.rows import key_value, order_key, row_logits
from kernels.weights import LOWEST, lowest_of, powers_of, weights


@triton.jit
def reached_from(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, row, position, key, V, K,
    peak, temperature, WEIGHED: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """How many logits of a row (or the weight of those that) lie at or above a key; the least key
    of them, the largest key below.
    """
    amount = tl.zeros((STRIDE,), tl.float64 if WEIGHED else tl.int32)
    least = tl.full((STRIDE,), 2147483647, tl.int32)
    below = tl.full((STRIDE,), -2147483647, tl.int32)
    for start in range(0, V, STRIDE):
        x = row_logits(
            target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
            counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, row, position,
            start + tl.arange(0, STRIDE), V, K, start, start + STRIDE,
        )  # fmt: skip
        keys = order_key(x)
        reached = keys >= key
        if WEIGHED:
            lowest = lowest_of(peak, temperature, -float("inf"))
            amount += tl.where(reached, weights(x, peak, lowest, powers_of(temperature)), 0.0)
        else:
            amount += reached.to(tl.int32)
        least = tl.where(reached, tl.minimum(least, keys), least)
        below = tl.where(reached, below, tl.maximum(below, keys))
    return tl.sum(amount, axis=0), tl.min(least, axis=0), tl.max(below, axis=0)


@triton.jit
def searched(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, row, position, V, K,
    peak, temperature, top_k, top_p, min_p, begin, STRIDE: tl.constexpr,
):  # fmt: skip
    """Threshold and kept mass of a row; too little of it lies at or above `begin`.

    `low` is always a key that enough of the row reaches, `high` one that too little does; both
    follow the logits that there are.
    """
    bottom = tl.full((), -2139095040, tl.int64)
    low = bottom
    top = order_key(peak).to(tl.int64) + 1
    edge = tl.minimum(order_key(begin).to(tl.int64), top)
    high = edge
    if top_k > 0:
        while high - low > 1:
            middle = (low + high) // 2
            count, least, below = reached_from(
                target_ptr, target_b, target_k, target_v,
                draft_ptr, draft_b, draft_k, draft_v, counts_ptr, counts_b, counts_v,
                ids_ptr, penalty_ptr, b, row, position, middle.to(tl.int32), V, K,
                peak, temperature, False, STRIDE,
            )  # fmt: skip
            if count >= top_k:
                low = least.to(tl.int64)
            else:
                high = tl.maximum(below.to(tl.int64), low) + 1
    if top_p < 1:
        bottom = low
        total, least, below = reached_from(
            target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
            counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, row, position,
            bottom.to(tl.int32), V, K, peak, temperature, True, STRIDE,
        )  # fmt: skip
        low = least.to(tl.int64)
        high = tl.where(top_k > 0, top, edge)
        # Weights below this amount to less than half of what top-p leaves out.
        share = tl.maximum((1.0 - top_p) * total / (2.0 * V), 1e-300)
        needless = peak.to(tl.float64) + temperature * tl.log(share)
        needless -= 1e-6 * (1.0 + tl.abs(needless))
        needless = tl.maximum(needless, LOWEST).to(tl.float32)
        low = tl.maximum(low, tl.minimum(order_key(needless).to(tl.int64), high - 1))
        while high - low > 1:
            middle = (low + high) // 2
            mass, least, below = reached_from(
                target_ptr, target_b, target_k, target_v,
                draft_ptr, draft_b, draft_k, draft_v, counts_ptr, counts_b, counts_v,
                ids_ptr, penalty_ptr, b, row, position, middle.to(tl.int32), V, K,
                peak, temperature, True, STRIDE,
            )  # fmt: skip
            if mass >= top_p * total:
                low = least.to(tl.int64)
            else:
                high = tl.maximum(below.to(tl.int64), low) + 1
    if min_p > 0:
        bottom = low - 1
        high = top - 1
        # No logit is read: weights of keys themselves. `high` is always heavy enough.
        while high - bottom > 1:
            middle = (bottom + high) // 2
            if exact_weights(key_value(middle.to(tl.int32)), peak, temperature) >= min_p:
                high = middle
            else:
                bottom = middle
        low = tl.maximum(low, high)
    mass, least, below = reached_from(
        target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
        counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, row, position,
        low.to(tl.int32), V, K, peak, temperature, True, STRIDE,
    )  # fmt: skip
    return key_value(low.to(tl.int32)), mass

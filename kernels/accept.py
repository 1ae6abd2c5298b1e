# mypy: disallow-untyped-defs=False
# ruff: noqa: SIM102 (what the compiler decides stays apart from what the device decides)
"""Launches 1 and 2 of kernels/verify.py: statistics of the rows in use, which drafts are kept."""

import triton
import triton.language as tl

from kernels.rows import (
    draft_length,
    logits_at_drafts,
    order_key,
    row_logits,
    row_peak,
    row_position,
    weight,
)


@triton.jit
def stats_kernel(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    counts_ptr, counts_b, counts_v, ids_ptr, lengths_ptr, one_hot_ptr, temperature_ptr, penalty_ptr,
    max_ptr, best_ptr, sum_ptr, V, K, S,
    POSITIONS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Maximum, its lowest id and sum of exponentials of one (split, row); NaN turns into +inf."""
    split, row, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = row_position(ids_ptr, lengths_ptr, one_hot_ptr, b, row, K, POSITIONS)
    if position >= 0:
        offsets = split * BLOCK + tl.arange(0, BLOCK)
        x = row_logits(
            target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
            counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, row, position, offsets, V, K,
        )  # fmt: skip
        bad = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), axis=0) > 0
        peak = tl.max(tl.where(x == x, x, -float("inf")), axis=0)
        best = tl.min(tl.where(x == peak, offsets, V), axis=0)
        at = (b * tl.num_programs(1) + row).to(tl.int64) * S + split
        tl.store(max_ptr + at, tl.where(bad, float("inf"), peak))
        tl.store(best_ptr + at, best)
        if sum_ptr is not None:
            temperature = tl.maximum(tl.load(temperature_ptr + b).to(tl.float32), 1e-30)
            alive = x > -float("inf")
            w = tl.exp((tl.where(alive, x, peak) - peak) / temperature)
            tl.store(sum_ptr + at, tl.sum(tl.where(alive, w, 0.0), axis=0))


@triton.jit
def gather_rows(
    max_ptr, sum_ptr, best_ptr, cell, used, S, V, temperature,
    POSITIONS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Maximum, its lowest id and the mass of POSITIONS consecutive rows, over their splits."""
    i, s = tl.arange(0, POSITIONS), tl.arange(0, SPLITS)
    at = (cell + i).to(tl.int64)[:, None] * S + s[None, :]
    mask = used[:, None] & (s < S)[None, :]
    maxima = tl.load(max_ptr + at, mask=mask, other=-float("inf"))
    peak = tl.max(maxima, axis=1)
    ids = tl.load(best_ptr + at, mask=mask, other=0)
    best = tl.min(tl.where(mask & (maxima == peak[:, None]), ids, V), axis=1)
    total = tl.full((POSITIONS,), 1.0, tl.float64)
    if sum_ptr is not None:
        sums = tl.load(sum_ptr + at, mask=mask, other=0.0).to(tl.float64)
        alive = sums > 0
        behind = tl.where(alive, maxima, 0.0) - tl.where(alive, peak[:, None], 0.0)
        total = tl.sum(sums * tl.exp(behind.to(tl.float64) / temperature), axis=1)
    return peak, best, total


@triton.jit
def log_or_minus_inf(p):
    return tl.where(p > 0, tl.log(tl.where(p > 0, p, 1.0)), -float("inf"))


@triton.jit
def prob_at_drafts(
    base_ptr, stride_b, stride_k, stride_v, counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr,
    max_ptr, best_ptr, sum_ptr, threshold_ptr, cell, b, ids, drafted, used, S, V, K, temperature,
    greedy, POSITIONS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One law's probability of each draft [POSITIONS], and its rows' maxima and their ids."""
    wide = b.to(tl.int64)
    peak, best, total = gather_rows(
        max_ptr, sum_ptr, best_ptr, cell, used, S, V, temperature, POSITIONS, SPLITS
    )
    prob = ((best == ids) & drafted).to(tl.float64)
    if sum_ptr is not None:
        if counts_ptr is not None:
            counts_ptr += wide * counts_b
        x = logits_at_drafts(
            base_ptr + wide * stride_b, stride_k, stride_v, ids, drafted,
            counts_ptr, counts_v, ids_ptr, penalty_ptr, b, K, POSITIONS,
        )  # fmt: skip
        kept = drafted & (x > -float("inf"))
        if threshold_ptr is not None:
            i = tl.arange(0, POSITIONS)
            lowest = tl.load(threshold_ptr + cell + i, mask=drafted, other=0)
            kept = kept & (order_key(x) >= lowest)
        w = weight(tl.where(kept, x, 0.0), tl.where(kept, peak, 0.0), temperature)
        sampled = tl.where(kept, w / tl.where(kept, total, 1.0), 0.0)
        prob = tl.where(greedy, prob, sampled)
    return prob, peak, best


@triton.jit
def tile_weights(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, max_ptr, threshold_ptr,
    b, row, position, rows, offsets, V, K, S, temperature, SPLITS: tl.constexpr,
):  # fmt: skip
    """Weights in float64 of one row at `offsets`: 0 where truncation or the vocabulary ends."""
    x = row_logits(
        target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
        counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, row, position, offsets, V, K,
    )  # fmt: skip
    cell = b * rows + row
    w = weight(x, row_peak(max_ptr, cell, S, SPLITS), temperature)
    if threshold_ptr is not None:
        w = tl.where(order_key(x) >= tl.load(threshold_ptr + cell), w, 0.0)
    return w


@triton.jit
def accept_kernel(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    counts_ptr, counts_b, counts_v, ids_ptr, lengths_ptr, one_hot_ptr, temperature_ptr, penalty_ptr,
    max_ptr, best_ptr, sum_ptr, threshold_ptr, uniforms_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    mass_ptr, tokens_ptr, accepted_ptr, target_logprobs_ptr, draft_logprobs_ptr, errors_ptr,
    V, K, S,
    POSITIONS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Which drafts are kept; then this split's mass at the first position that is not.

    Every split decides anew (a few thousand loads) than wait; split 0 writes.
    """
    split, b = tl.program_id(0), tl.program_id(1)
    rows = K + 1
    if draft_ptr is not None:
        rows = 2 * K + 1
    i = tl.arange(0, POSITIONS)
    length = draft_length(ids_ptr, lengths_ptr, b, K, POSITIONS)
    ids = tl.load(ids_ptr + b * K + i, mask=i < length, other=-1)
    invalid = (i < length) & ((ids < 0) | (ids >= V))
    drafted = (i < length) & (ids >= 0) & (ids < V)
    used = i <= length
    given = tl.load(temperature_ptr + b).to(tl.float64)
    greedy = given == 0
    temperature = tl.where(greedy, 1.0, given)
    p, peak, best = prob_at_drafts(
        target_ptr, target_b, target_k, target_v, counts_ptr, counts_b, counts_v, ids_ptr,
        penalty_ptr, max_ptr, best_ptr, sum_ptr, threshold_ptr, b * rows, b, ids, drafted, used,
        S, V, K, temperature, greedy, POSITIONS, SPLITS,
    )  # fmt: skip
    bad = used & (tl.abs(peak) == float("inf"))
    one_hot = tl.minimum(length, 0)
    if one_hot_ptr is not None:
        one_hot = tl.load(one_hot_ptr + b).to(tl.int32)
    q = tl.where(drafted, 1.0, 0.0).to(tl.float64)
    proposed = ids
    if draft_ptr is not None:
        drawn = drafted & (i < tl.where(one_hot == 0, length, 0))
        q_drawn, draft_peak, draft_best = prob_at_drafts(
            draft_ptr, draft_b, draft_k, draft_v, counts_ptr, counts_b, counts_v, ids_ptr,
            penalty_ptr, max_ptr, best_ptr, sum_ptr, threshold_ptr, b * rows + K + 1, b, ids, drawn,
            drawn, S, V, K, temperature, greedy, POSITIONS, SPLITS,
        )  # fmt: skip
        q = tl.where(drawn, q_drawn, q)
        proposed = tl.where(drawn, draft_best, ids)
        bad = bad | (drawn & (tl.abs(draft_peak) == float("inf")))
    uniforms = tl.load(uniforms_ptr + b * (K + 1) + i, mask=i <= K, other=0.0).to(tl.float64)
    rejected = (i < length) & (uniforms * q >= p)
    n = tl.min(tl.where(rejected, i, length), axis=0)
    if split == 0:
        bad = bad | invalid | (uniforms < 0) | (uniforms >= 1) | (uniforms != uniforms)
        broken = tl.max(bad.to(tl.int32), axis=0) > 0
        broken = broken | (given < 0) | (given == float("inf")) | (given != given)
        if lengths_ptr is not None:
            asked = tl.load(lengths_ptr + b)
            broken = broken | (asked < 0) | (asked > K)
        if draft_ptr is None:
            if one_hot_ptr is not None:
                broken = broken | ((one_hot == 0) & (length > 0))
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
        tl.store(errors_ptr + b, broken.to(tl.int32))
        out = b * (K + 1) + i
        kept = i < n
        final = i == tl.where(greedy, n, -1)
        token = tl.where(kept, ids, tl.where(final, best, -1))
        log_q = tl.where(kept, log_or_minus_inf(q), 0.0)
        missed = final & (i < length) & (proposed != best)
        tl.store(tokens_ptr + out, token.to(tl.int64), mask=i <= K)
        tl.store(target_logprobs_ptr + out, tl.where(kept, log_or_minus_inf(p), 0.0), mask=i <= K)
        tl.store(draft_logprobs_ptr + out, tl.where(missed, -float("inf"), log_q), mask=i <= K)
        tl.store(accepted_ptr + b, n.to(tl.int64))
    if mass_ptr is not None:
        if given != 0:
            draft_row = K + 1 + n
            offsets = split * BLOCK + tl.arange(0, BLOCK)
            w = tile_weights(
                target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
                counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, max_ptr, threshold_ptr,
                b, n, n, rows, offsets, V, K, S, temperature, SPLITS,
            )  # fmt: skip
            at = b.to(tl.int64) * S + split
            tl.store(mass_ptr + at, tl.sum(w, axis=0))
            if draft_ptr is not None:
                if (n < length) & (one_hot == 0):
                    w = tile_weights(
                        target_ptr, target_b, target_k, target_v,
                        draft_ptr, draft_b, draft_k, draft_v, counts_ptr, counts_b, counts_v,
                        ids_ptr, penalty_ptr, max_ptr, threshold_ptr, b, draft_row, n, rows,
                        offsets, V, K, S, temperature, SPLITS,
                    )  # fmt: skip
                    tl.store(mass_ptr + tl.num_programs(1).to(tl.int64) * S + at, tl.sum(w, axis=0))

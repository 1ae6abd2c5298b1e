# mypy: disallow-untyped-defs=False
"""Launches 3 and 4 of kernels/verify.py: what the target has beyond the drafter, the last token."""

import triton
import triton.language as tl

from kernels.accept import log_or_minus_inf, tile_weights
from kernels.rows import draft_length

NO_RESIDUAL = tl.constexpr(1e-12)  # as in the reference


@triton.jit
def final_laws(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    counts_ptr, counts_b, counts_v, ids_ptr, one_hot_ptr, penalty_ptr, max_ptr, threshold_ptr,
    mass_ptr, b, batch, n, length, offsets, V, K, S, temperature, SPLITS: tl.constexpr,
):  # fmt: skip
    """Both laws at `offsets` where row b ends; the drafter's is 0 at a bonus token."""
    rows = K + 1
    if draft_ptr is not None:
        rows = 2 * K + 1
    s = tl.arange(0, SPLITS)
    at = b.to(tl.int64) * S + s
    p = tile_weights(
        target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
        counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, max_ptr, threshold_ptr,
        b, n, n, rows, offsets, V, K, S, temperature, SPLITS,
    )  # fmt: skip
    p = p / tl.sum(tl.load(mass_ptr + at, mask=s < S, other=0.0), axis=0)
    q = p * 0.0
    if n < length:
        one_hot = tl.minimum(length, 0)
        if draft_ptr is None:
            one_hot = one_hot + 1
        elif one_hot_ptr is not None:
            one_hot = tl.load(one_hot_ptr + b).to(tl.int32)
        if one_hot != 0:
            q = tl.where(offsets == tl.load(ids_ptr + b * K + n), 1.0, q)
        elif draft_ptr is not None:
            w = tile_weights(
                target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
                counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, max_ptr, threshold_ptr,
                b, K + 1 + n, n, rows, offsets, V, K, S, temperature, SPLITS,
            )  # fmt: skip
            at += batch.to(tl.int64) * S
            q = w / tl.sum(tl.load(mass_ptr + at, mask=s < S, other=0.0), axis=0)
    return p, q


@triton.jit
def residual_kernel(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    counts_ptr, counts_b, counts_v, ids_ptr, lengths_ptr, one_hot_ptr, temperature_ptr, penalty_ptr,
    max_ptr, threshold_ptr, mass_ptr, residual_ptr, accepted_ptr, V, K, S,
    POSITIONS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mass of max(p - q, 0) in one split of the position where a row ends."""
    split, b, batch = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    temperature = tl.load(temperature_ptr + b).to(tl.float64)
    length = draft_length(ids_ptr, lengths_ptr, b, K, POSITIONS)
    n = tl.load(accepted_ptr + b).to(tl.int32)
    if (temperature != 0) & (n < length):
        p, q = final_laws(
            target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
            counts_ptr, counts_b, counts_v, ids_ptr, one_hot_ptr, penalty_ptr, max_ptr,
            threshold_ptr, mass_ptr, b, batch, n, length, split * BLOCK + tl.arange(0, BLOCK),
            V, K, S, temperature, SPLITS,
        )  # fmt: skip
        tl.store(residual_ptr + b.to(tl.int64) * S + split, tl.sum(tl.maximum(p - q, 0.0), axis=0))


@triton.jit
def draw_kernel(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    counts_ptr, counts_b, counts_v, ids_ptr, lengths_ptr, one_hot_ptr, temperature_ptr, penalty_ptr,
    max_ptr, threshold_ptr, mass_ptr, residual_ptr, uniforms_ptr, tokens_ptr, accepted_ptr,
    target_logprobs_ptr, draft_logprobs_ptr, V, K, S,
    POSITIONS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The recovered or bonus token of one sequence: inverse CDF over the splits, then within one.

    An id without mass is never chosen: where rounding leaves the CDF short of the uniform, the last
    id (or split) that has mass stands in.
    """
    b, batch = tl.program_id(0), tl.num_programs(0)
    temperature = tl.load(temperature_ptr + b).to(tl.float64)
    if temperature != 0:
        length = draft_length(ids_ptr, lengths_ptr, b, K, POSITIONS)
        n = tl.load(accepted_ptr + b).to(tl.int32)
        s = tl.arange(0, SPLITS)
        at = b.to(tl.int64) * S + s
        whole = tl.load(mass_ptr + at, mask=s < S, other=0.0)
        mass = whole / tl.sum(whole, axis=0)
        from_residual = n < length
        if from_residual:
            beyond = tl.load(residual_ptr + at, mask=s < S, other=0.0)
            from_residual = tl.sum(beyond, axis=0) > NO_RESIDUAL
            mass = tl.where(from_residual, beyond, mass)
        u = tl.load(uniforms_ptr + b * (K + 1) + K).to(tl.float64)
        wanted = u * tl.sum(mass, axis=0)
        reached = (tl.cumsum(mass, axis=0) > wanted) & (mass > 0)
        first = tl.min(tl.where(reached, s, SPLITS), axis=0)
        split = tl.where(first < SPLITS, first, tl.max(tl.where(mass > 0, s, 0), axis=0))
        offsets = split * BLOCK + tl.arange(0, BLOCK)
        p, q = final_laws(
            target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
            counts_ptr, counts_b, counts_v, ids_ptr, one_hot_ptr, penalty_ptr, max_ptr,
            threshold_ptr, mass_ptr, b, batch, n, length, offsets, V, K, S, temperature, SPLITS,
        )  # fmt: skip
        r = tl.where(from_residual, tl.maximum(p - q, 0.0), p)
        before = tl.sum(tl.where(s < split, mass, 0.0), axis=0)
        reached = (before + tl.cumsum(r, axis=0) > wanted) & (r > 0)
        token = tl.min(tl.where(reached, offsets, V), axis=0)
        token = tl.where(token < V, token, tl.max(tl.where(r > 0, offsets, 0), axis=0))
        out = b * (K + 1) + n
        tl.store(tokens_ptr + out, token.to(tl.int64))
        drawn_p = tl.sum(tl.where(offsets == token, p, 0.0), axis=0)
        drawn_q = tl.sum(tl.where(offsets == token, q, 0.0), axis=0)
        drawn_q = tl.where(n < length, drawn_q, 1.0)  # no draft at a bonus token
        tl.store(target_logprobs_ptr + out, log_or_minus_inf(drawn_p))
        tl.store(draft_logprobs_ptr + out, log_or_minus_inf(drawn_q))

# mypy: disallow-untyped-defs=False
"""Losses between two laws over a vocabulary, with their gradient, from raw logits.

For one token: q = softmax(s) over the drafter's C columns; p_j the target's softmax over all its V
logits, taken at the id of column j (0 where it has none); m = sum p, p' = p / m, and

    alpha = sum min(p, q)             b = sum q [q < p]
    kl  = sum p (log p' - log q)      d kl  / ds_j = m q_j - p_j
    rkl = m sum q (log q - log p')    d rkl / ds_j = m q_j (log q_j - log p'_j - rkl / m)
    jsd = m/2 sum p' log p'/M + q log q/M, M = (p' + q) / 2
                                      d jsd / ds_j = m/2 q_j (log q_j/M_j - sum q log q/M)
    tv  = 1 - alpha                   d tv  / ds_j = -q_j ([q_j < p_j] - b)
    tvpp: the value of tv             -q_j ([q_j < p_j] - b) / sqrt(b (1 - b))
    lk_alpha = -log alpha             d tv / alpha
    lk_hybrid = l kl + (1 - l) tv, l = exp(-eta alpha) taken for a constant
    cross_entropy = -log q_next       q_j - [j = next]

`drafters.losses` says where these come from and is the slow form in PyTorch, of any gradient. Here
one program a token walks the row three times (four where p must be renormalised), in float32, and
writes the gradient over the drafter's logits: some 3 N C numbers pass through memory in all.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
TINY = tl.constexpr(1e-30)  # as in drafters.losses
LOG_TINY = tl.constexpr(-69.07755278982137)
FACTORS = (
    "cross_entropy",
    "forward_kl",
    "reverse_kl",
    "jsd",
    "tv",
    "tvpp",
    "lk_alpha",
    "lk_hybrid",
)


def divergences(
    logits: Tensor,  # [N, C] the drafter's; the gradient is written over them if `weights` is given
    teacher: Tensor | None,  # [N, V] the target's; None: cross-entropy only
    ids: Tensor | None,  # [C] int64 the id of each column, -1: none; None: column j is id j
    next_columns: Tensor,  # [N] int64 the column of the token that came, -1: none
    factors: Mapping[str, float],  # of FACTORS; a loss that is not named is left out
    eta: float,  # of lk_hybrid
    weights: Tensor | None,  # [N] of each token's loss in the sum; None: no gradient is wanted
) -> tuple[Tensor, Tensor]:  # [N] float32: the losses, not weighted; acceptance chances alpha
    """Losses of N tokens, and over `logits` the gradient of sum(weights * losses).

    Rows may have any stride, columns that of 1. Raises ValueError for an unknown loss.
    """
    if unknown := set(factors) - set(FACTORS):
        raise ValueError(f"losses {sorted(unknown)} are unknown; use {', '.join(FACTORS)}")
    num_rows, num_columns = logits.shape
    losses, chances = (
        torch.empty(num_rows, dtype=torch.float32, device=logits.device) for _ in range(2)
    )
    if not num_rows:
        return losses, chances
    known = logits if teacher is None else teacher
    if logits.stride(1) != 1 or known.stride(1) != 1:
        raise ValueError("columns of logits must lie next to each other; call contiguous()")
    wanted = {name for name, factor in factors.items() if factor}
    divergence_kernel[(num_rows,)](
        logits,
        known,
        next_columns if ids is None else ids,
        next_columns,
        losses if weights is None else weights,
        losses,
        chances,
        logits.stride(0),
        known.stride(0),
        num_columns,
        known.shape[1],
        *(float(factors.get(name, 0.0)) for name in FACTORS),
        eta,
        TAUGHT=teacher is not None,
        MAPPED=ids is not None,
        REVERSE="reverse_kl" in wanted,
        MIDDLE="jsd" in wanted,
        GRADIENT=weights is not None,
        BLOCK=min(BLOCK, max(16, triton.next_power_of_2(num_columns))),
        num_warps=8,
    )
    return losses, chances


@triton.jit
def log_sum_exp(row_ptr, num_columns, BLOCK: tl.constexpr):
    """Of one row of logits."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for low in range(0, num_columns, BLOCK):
        columns = low + tl.arange(0, BLOCK)
        inside = columns < num_columns
        values = tl.load(row_ptr + columns, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(best, values)
        # A lane that has seen nothing yet keeps 0; exp(-inf - -inf) is no number.
        kept = tl.where(best == float("-inf"), 0.0, total * tl.exp(best - higher))
        total = kept + tl.where(values == float("-inf"), 0.0, tl.exp(values - higher))
        best = higher
    highest = tl.max(best, 0)
    scaled = tl.where(best == float("-inf"), 0.0, total * tl.exp(best - highest))
    return highest + tl.log(tl.sum(scaled, 0))


@triton.jit
def target_log_probs(
    teacher_row, ids_ptr, columns, inside, lse, num_ids, TAUGHT: tl.constexpr, MAPPED: tl.constexpr
):
    """log p of a block of the drafter's columns, -inf where the target has no such id."""
    ids = columns.to(tl.int64)
    if MAPPED:
        ids = tl.load(ids_ptr + columns, mask=inside, other=-1)
    there = inside & (ids >= 0) & (ids < num_ids)
    if TAUGHT:
        values = tl.load(teacher_row + ids, mask=there, other=float("-inf")).to(tl.float32)
        return values - lse
    return tl.where(there, 0.0, 0.0) + float("-inf")


@triton.jit
def both_laws(
    draft_row,
    teacher_row,
    ids_ptr,
    columns,
    num_columns,
    num_ids,
    draft_lse,
    target_lse,
    log_mass,
    TAUGHT: tl.constexpr,
    MAPPED: tl.constexpr,
):
    """log q, q, log p' and p of a block of columns; p is not renormalised."""
    inside = columns < num_columns
    values = tl.load(draft_row + columns, mask=inside, other=float("-inf"))
    log_q = values.to(tl.float32) - draft_lse
    log_p = target_log_probs(
        teacher_row, ids_ptr, columns, inside, target_lse, num_ids, TAUGHT, MAPPED
    )
    return log_q, tl.exp(log_q), tl.maximum(log_p - log_mass, LOG_TINY), tl.exp(log_p)


@triton.jit
def divergence_kernel(
    logits_ptr,
    teacher_ptr,
    ids_ptr,
    next_ptr,
    weights_ptr,
    losses_ptr,
    chances_ptr,
    logits_stride,
    teacher_stride,
    num_columns,
    num_ids,
    cross_entropy,
    forward_kl,
    reverse_kl,
    jsd,
    tv,
    tvpp,
    lk_alpha,
    lk_hybrid,
    eta,
    TAUGHT: tl.constexpr,
    MAPPED: tl.constexpr,
    REVERSE: tl.constexpr,
    MIDDLE: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    draft_row = logits_ptr + row * logits_stride
    teacher_row = teacher_ptr + row * teacher_stride
    draft_lse = log_sum_exp(draft_row, num_columns, BLOCK)
    target_lse = 0.0
    mass = 1.0
    if TAUGHT:
        target_lse = log_sum_exp(teacher_row, num_ids, BLOCK)
        if MAPPED or num_columns < num_ids:
            sums = tl.zeros([BLOCK], tl.float32)
            for low in range(0, num_columns, BLOCK):
                columns = low + tl.arange(0, BLOCK)
                log_p = target_log_probs(
                    teacher_row,
                    ids_ptr,
                    columns,
                    columns < num_columns,
                    target_lse,
                    num_ids,
                    TAUGHT,
                    MAPPED,
                )
                sums += tl.exp(log_p)
            mass = tl.sum(sums, 0)
    log_mass = tl.log(tl.maximum(mass, TINY))
    alpha_sums = tl.zeros([BLOCK], tl.float32)
    below_sums = tl.zeros([BLOCK], tl.float32)
    kl_sums = tl.zeros([BLOCK], tl.float32)
    reverse_sums = tl.zeros([BLOCK], tl.float32)
    to_p_sums = tl.zeros([BLOCK], tl.float32)
    to_q_sums = tl.zeros([BLOCK], tl.float32)
    if TAUGHT:
        for low in range(0, num_columns, BLOCK):
            columns = low + tl.arange(0, BLOCK)
            log_q, q, log_p, p = both_laws(
                draft_row,
                teacher_row,
                ids_ptr,
                columns,
                num_columns,
                num_ids,
                draft_lse,
                target_lse,
                log_mass,
                TAUGHT,
                MAPPED,
            )
            alpha_sums += tl.minimum(p, q)
            below_sums += tl.where(q < p, q, 0.0)
            kl_sums += tl.where(p > 0, p * (log_p - log_q), 0.0)
            if REVERSE:
                reverse_sums += tl.where(q > 0, q * (log_q - log_p), 0.0)
            if MIDDLE:
                own = p / tl.maximum(mass, TINY)
                log_middle = tl.log(tl.maximum((own + q) / 2, TINY))
                to_p_sums += tl.where(own > 0, own * (log_p - log_middle), 0.0)
                to_q_sums += tl.where(q > 0, q * (log_q - log_middle), 0.0)
    alpha = tl.sum(alpha_sums, 0)
    below = tl.sum(below_sums, 0)
    kl = tl.sum(kl_sums, 0)
    reverse = tl.sum(reverse_sums, 0)
    to_q = tl.sum(to_q_sums, 0)
    middle = (tl.sum(to_p_sums, 0) + to_q) / 2
    share = tl.exp(-eta * alpha)
    follower = tl.load(next_ptr + row)
    came = (follower >= 0) & (follower < num_columns)
    followed = tl.load(draft_row + follower, mask=came, other=0.0).to(tl.float32)
    loss = cross_entropy * tl.where(came, draft_lse - followed, 0.0)
    if TAUGHT:
        loss += forward_kl * kl + (tv + tvpp) * (1 - alpha)
        loss += mass * (reverse_kl * reverse + jsd * middle)
        loss += -lk_alpha * tl.log(tl.maximum(alpha, TINY))
        loss += lk_hybrid * (share * kl + (1 - share) * (1 - alpha))
    tl.store(losses_ptr + row, loss)
    tl.store(chances_ptr + row, alpha)
    if GRADIENT:
        weight = tl.load(weights_ptr + row).to(tl.float32)
        of_kl = forward_kl + lk_hybrid * share
        of_tv = tv + lk_hybrid * (1 - share)
        of_tv += tl.where(alpha >= TINY, lk_alpha / tl.maximum(alpha, TINY), 0.0)
        of_tv += tvpp / tl.sqrt(tl.maximum(below * (1 - below), TINY))
        of_text = tl.where(came, cross_entropy, 0.0)
        for low in range(0, num_columns, BLOCK):
            columns = low + tl.arange(0, BLOCK)
            log_q, q, log_p, p = both_laws(
                draft_row,
                teacher_row,
                ids_ptr,
                columns,
                num_columns,
                num_ids,
                draft_lse,
                target_lse,
                log_mass,
                TAUGHT,
                MAPPED,
            )
            gradient = of_text * (q - tl.where(columns == follower, 1.0, 0.0))
            if TAUGHT:
                gradient += of_kl * (mass * q - p)
                gradient -= of_tv * q * (tl.where(q < p, 1.0, 0.0) - below)
                if REVERSE:
                    slope = tl.where(q > 0, q * (log_q - log_p - reverse), 0.0)
                    gradient += reverse_kl * mass * slope
                if MIDDLE:
                    own = p / tl.maximum(mass, TINY)
                    log_middle = tl.log(tl.maximum((own + q) / 2, TINY))
                    slope = tl.where(q > 0, q * (log_q - log_middle - to_q), 0.0)
                    gradient += jsd * mass / 2 * slope
            kind = logits_ptr.dtype.element_ty
            tl.store(draft_row + columns, (weight * gradient).to(kind), mask=columns < num_columns)

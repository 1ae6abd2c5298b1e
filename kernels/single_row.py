# mypy: disallow-untyped-defs=False
"""Launch 1 of kernels/verify.py under rules where few sequences leave most of a GPU idle.

As kernels/rule_stats.py, but a program has one row, and what bounds it is how long it waits:
everything is asked for first, and worked out while it is under way.
"""

import triton
import triton.language as tl

from kernels.matrix import INTERPRETED
from kernels.plain_stats import parts_from, row_start
from kernels.rows import inverse_of, penalise_by, row_logits, row_position, rules_of
from kernels.rule_stats import (
    count_parts,
    float_parts,
    penalised_parts,
    row_peak_and_groups,
    row_results,
    with_counts,
)
from kernels.weights import powers_of


@triton.jit
def stored_parts(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v, ids_ptr,
    b, row, position, first, V, K, PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """As `float_parts`, but as stored where models agree on a type: no thread waits for them."""
    if draft_ptr is not None and draft_ptr.dtype != target_ptr.dtype:
        return float_parts(
            target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
            ids_ptr, b, row, position, first, V, K, PART, PARTS,
        )  # fmt: skip
    else:
        start, stride = row_start(
            target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
            b, row, position, K,
        )  # fmt: skip
        start += first.to(tl.int64) * stride
        return parts_from(start, stride, V - first, PART, PARTS, False)


@triton.jit
def drafts_within(ids_ptr, b, place, first, K, POSITIONS: tl.constexpr, BLOCK: tl.constexpr):
    """Drafts [POSITIONS] less `first`; int64 whose bit j is set where j < place lies in a split."""
    j = tl.arange(0, POSITIONS)
    tokens = tl.load(ids_ptr + b * K + j, mask=j < K, other=-1).to(tl.int32) - first
    inside = (j < place) & (tokens >= 0) & (tokens < BLOCK)
    return tokens, tl.sum(inside.to(tl.int64) << j, axis=0)


@triton.jit
def with_drafts(bits, tokens, inside, PART: tl.constexpr, POSITIONS: tl.constexpr):
    """The bits with those of `drafts_within`; most splits have none."""
    while inside != 0:
        rest = inside & (inside - 1)
        here = (tl.full((), 1, tl.int64) << tl.arange(0, POSITIONS)) == (inside ^ rest)
        token = tl.sum(tl.where(here, tokens, 0), axis=0)
        bit = tl.full((), 1, tl.int32) << (token // PART)
        bits = bits | tl.where(tl.arange(0, PART) == token % PART, bit, 0)
        inside = rest
    return bits


@triton.jit
def early(x):
    """Has a float64 worked out by here, while loads are under way, though it be used later."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "mov.b32 $0, 0;", "=r,d", [x], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def own_draft(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    counts_ptr, counts_b, counts_v, ids_ptr, b, row, place, asked, V, K, POSITIONS: tl.constexpr,
):  # fmt: skip
    """A row's own draft, if asked for: its logit as stored (else -inf), and how often it was seen.

    Nothing here waits for more than the draft.
    """
    token = tl.load(ids_ptr + b * K + place, mask=asked & (place < K), other=-1)
    known = (token >= 0) & (token < V)
    at = tl.where(known, token.to(tl.int64), V)
    x = row_logits(
        target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
        None, 0, 0, ids_ptr, None, b, row, place, at, V, K,
    )  # fmt: skip
    j = tl.arange(0, POSITIONS)
    before = tl.load(ids_ptr + b * K + j, mask=j < K, other=-1)
    seen = tl.max(((before == token) & (j < place)).to(tl.int32), axis=0)
    count = seen
    if counts_ptr is not None:
        at = b.to(tl.int64) * counts_b + at * counts_v
        count = tl.load(counts_ptr + at, mask=known, other=0)
    return x, seen, count


@triton.jit
def single_row(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    counts_ptr, counts_b, counts_v, ids_ptr, lengths_ptr, one_hot_ptr, temperature_ptr, penalty_ptr,
    top_k_ptr, top_p_ptr, max_ptr, best_ptr, sum_ptr, drafted_ptr, groups_ptr,
    b, row, rows, split, V, K, S, POSITIONS: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, LANE: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A split of one row. What is bound by latency: everything is asked for before any wait."""
    PART: tl.constexpr = BLOCK // PARTS
    first = split * BLOCK
    place = tl.where(row <= K, row, row - K - 1)
    cell = (b * rows + row).to(tl.int64)
    temperature = tl.load(temperature_ptr + b).to(tl.float64)
    top_k, top_p, _ = rules_of(top_k_ptr, top_p_ptr, None, b, V)
    penalty = tl.full((), 1.0, tl.float32)
    if penalty_ptr is not None:
        penalty = tl.load(penalty_ptr + b).to(tl.float32)
    parts = stored_parts(
        target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
        ids_ptr, b, row, place, first, V, K, PART, PARTS,
    )  # fmt: skip
    counts = ()
    if penalty_ptr is not None and counts_ptr is not None:
        counts = count_parts(counts_ptr, counts_b, counts_v, b, first, V, PART, PARTS)
    # The compiler would have parameters looked at before all is asked for, but not across this.
    tl.debug_barrier()
    tokens, inside = drafts_within(ids_ptr, b, place, first, K, POSITIONS, BLOCK)
    position = row_position(ids_ptr, lengths_ptr, one_hot_ptr, b, row, K, POSITIONS)
    own, own_seen, own_count = own_draft(
        target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
        counts_ptr, counts_b, counts_v, ids_ptr, b, row, place, split == 0, V, K, POSITIONS,
    )  # fmt: skip
    inverse = inverse_of(penalty)
    if sum_ptr is not None:
        early(powers_of(temperature))
    if penalty_ptr is not None:
        seen = tl.zeros((PART,), tl.int32)
        if counts_ptr is not None:
            seen = with_counts(seen, counts, PARTS)
        seen = with_drafts(seen, tokens, inside, PART, POSITIONS)
        parts = penalised_parts(parts, seen, penalty, inverse, PARTS)
    peak = row_peak_and_groups(parts, groups_ptr, cell, split, S, PART, PARTS, BLOCK, LANE, GROUP)
    if position >= 0:
        if split == 0:
            if penalty_ptr is not None:
                own = penalise_by(own, (own_seen > 0) | (own_count > 0), penalty, inverse)
            tl.store(drafted_ptr + cell, own)
        row_results(
            target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
            counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, max_ptr, best_ptr, sum_ptr,
            groups_ptr, parts, temperature, (top_p < 1) & (top_k == 0), b, row, position,
            first, cell * S + split, V, K, peak, PART, BLOCK, LANE, CHUNK, PARTS,
        )  # fmt: skip

# mypy: disallow-untyped-defs=False
"""Launch 1 of kernels/verify.py where rows may be penalised or truncated.

What was seen before the draft is the same for all rows of a sequence: a program looks at it once,
keeps a bit a token, and takes several rows. The bits of PARTS tokens share a number, so that a
draft, which the penalty of later rows counts as seen, is one comparison for PARTS tokens.
"""

import triton
import triton.language as tl

from kernels.matrix import INTERPRETED
from kernels.plain_stats import (
    exact_sum,
    largest,
    lowest_id,
    parts_from,
    row_start,
    sum_by_peak,
    wide,
)
from kernels.rows import (
    inverse_of,
    logit_at,
    penalise_by,
    row_logits,
    row_position,
    rules_of,
)
from kernels.weights import powers_of


@triton.jit
def count_parts(
    counts_ptr, counts_b, counts_v, b, first, V, PART: tl.constexpr, PARTS: tl.constexpr
):
    """PARTS tensors [PART] of how often tokens were seen before the draft."""
    parts = ()
    for i in tl.static_range(PARTS):
        offsets = first + i * PART + tl.arange(0, PART)
        at = b.to(tl.int64) * counts_b + offsets.to(tl.int64) * counts_v
        count = tl.load(counts_ptr + at, mask=offsets < V, other=0)
        parts = parts + (count,)  # type: ignore[assignment] # noqa: RUF005
    return parts


@triton.jit
def with_counts(bits, counts, PARTS: tl.constexpr):
    """int32 [PART]; bit i of element j, too, where token i PART + j of a split was seen."""
    for i in tl.static_range(PARTS):
        bits = bits | ((counts[i] > 0).to(tl.int32) << i)
    return bits


@triton.jit
def drafts_seen(bits, ids_ptr, b, position, first, K, PART: tl.constexpr, PARTS: tl.constexpr):
    """The bits with those of the draft before a position."""
    for j in range(0, position):
        token = tl.load(ids_ptr + b * K + j).to(tl.int32) - first
        # A loop, since the compiler would turn a branch into work for every number.
        for _ in range(0, ((token >= 0) & (token < PART * PARTS)).to(tl.int32)):
            bit = tl.full((), 1, tl.int32) << (token // PART)
            bits = bits | tl.where(tl.arange(0, PART) == token % PART, bit, 0)
    return bits


@triton.jit
def float_parts(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v, ids_ptr,
    b, row, position, first, V, K, PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """PARTS tensors [PART] of a row's logits as stored, in float32; -inf past the vocabulary."""
    parts = ()
    for i in tl.static_range(PARTS):
        x = row_logits(
            target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
            None, 0, 0, ids_ptr, None, b, row, position,
            first + i * PART + tl.arange(0, PART), V, K,
        )  # fmt: skip
        parts = parts + (x,)  # type: ignore[assignment] # noqa: RUF005 (no unpacking here)
    return parts


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
def penalised_parts(parts, bits, penalty, inverse, PARTS: tl.constexpr):
    """The parts, penalised where their bit is set."""
    worse = ()
    for i in tl.static_range(PARTS):
        x = penalise_by(wide(parts[i]), (bits & (1 << i)) != 0, penalty, inverse)
        worse = worse + (x,)  # type: ignore[assignment] # noqa: RUF005
    return worse


@triton.jit
def peak_and_groups(
    parts, groups_ptr, PART: tl.constexpr, PARTS: tl.constexpr, LANE: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """The largest logit; notes that of every GROUP tokens. NaN may be passed over."""
    most = tl.full((PART // LANE,), -float("inf"), tl.float32)
    i = tl.arange(0, PARTS)[None, :]
    groups = tl.full((PART // GROUP, PARTS), -float("inf"), tl.float32)
    for part in tl.static_range(PARTS):
        tops = tl.max(tl.reshape(parts[part], (PART // LANE, LANE)), axis=1)
        most = tl.maximum(most, tops)
        if groups_ptr is not None:
            group = tl.max(tl.reshape(tops, (PART // GROUP, GROUP // LANE)), axis=1)
            groups = tl.where(i == part, group[:, None], groups)
    if groups_ptr is not None:  # all at once: to store them, threads must meet
        number = i * (PART // GROUP) + tl.arange(0, PART // GROUP)[:, None]
        tl.store(groups_ptr + number, groups)
    return tl.max(most, axis=0)


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
def row_results(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, max_ptr, best_ptr, sum_ptr, groups_ptr,
    parts, temperature, exactly, b, row, position, first, at, V, K,
    top, PART: tl.constexpr, BLOCK: tl.constexpr, LANE: tl.constexpr, CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Stores what a split amounts to, by the peak of its penalised parts."""
    if sum_ptr is None or temperature == 0:
        peak = largest(parts, PARTS)
        tl.store(max_ptr + at, peak)
        tl.store(best_ptr + at, lowest_id(parts, peak, first, V, PART, PARTS))
    else:
        total, fine = sum_by_peak(parts, top, temperature, PART, PARTS, LANE)
        exact = (fine == 0) & (tl.abs(top) < float("inf"))
        if groups_ptr is not None:
            exact = exact | exactly
        if exact:
            total = exact_sum(
                target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
                counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, row, position, first, V, K,
                top, temperature, BLOCK, CHUNK,
            )  # fmt: skip
        bad = (total != total) | (top == float("inf"))
        tl.store(max_ptr + at, tl.where(bad, float("inf"), top))
        tl.store(sum_ptr + at, tl.where(bad, float("nan"), total))


@triton.jit
def row_peak_and_groups(
    parts, groups_ptr, cell, split, S, PART: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr, LANE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    if groups_ptr is not None:
        at = groups_ptr + (cell * S + split) * (BLOCK // GROUP)
        return peak_and_groups(parts, at, PART, PARTS, LANE, GROUP)
    else:
        return peak_and_groups(parts, None, PART, PARTS, LANE, GROUP)


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


@triton.jit
def rule_split(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    counts_ptr, counts_b, counts_v, ids_ptr, lengths_ptr, one_hot_ptr, temperature_ptr, penalty_ptr,
    top_k_ptr, top_p_ptr, max_ptr, best_ptr, sum_ptr, drafted_ptr, groups_ptr,
    b, row, rows, step, split, V, K, S, POSITIONS: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, LANE: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
    EAGER: tl.constexpr,
):  # fmt: skip
    """What stats_kernel does with a split of every `step`-th row from `row` on."""
    PART: tl.constexpr = BLOCK // PARTS
    first = split * BLOCK
    temperature = tl.load(temperature_ptr + b).to(tl.float64)
    top_k, top_p, _ = rules_of(top_k_ptr, top_p_ptr, None, b, V)
    bits = tl.zeros((PART,), tl.int32)
    penalty = tl.full((), 1.0, tl.float32)
    if penalty_ptr is not None:
        penalty = tl.load(penalty_ptr + b).to(tl.float32)
    ready = tl.full((), 0, tl.int32)  # have the counts been looked at?
    for own_row in range(row, rows, step):
        place = tl.where(own_row <= K, own_row, own_row - K - 1)
        wanted = place >= 0
        if not EAGER:
            position = row_position(ids_ptr, lengths_ptr, one_hot_ptr, b, own_row, K, POSITIONS)
            wanted = position >= 0
        if wanted:
            cell = (b * rows + own_row).to(tl.int64)
            parts = float_parts(
                target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
                ids_ptr, b, own_row, place, first, V, K, PART, PARTS,
            )  # fmt: skip
            if penalty_ptr is not None:
                if counts_ptr is not None:  # noqa: SIM102 (the compiler decides this)
                    if (ready == 0) & (penalty != 1.0):  # the first row's logits are under way
                        counts = count_parts(
                            counts_ptr, counts_b, counts_v, b, first, V, PART, PARTS
                        )
                        bits = with_counts(bits, counts, PARTS)
                        ready += 1
                seen = drafts_seen(bits, ids_ptr, b, place, first, K, PART, PARTS)
                parts = penalised_parts(parts, seen, penalty, inverse_of(penalty), PARTS)
            if EAGER:
                position = row_position(ids_ptr, lengths_ptr, one_hot_ptr, b, own_row, K, POSITIONS)
            peak = row_peak_and_groups(
                parts, groups_ptr, cell, split, S, PART, PARTS, BLOCK, LANE, GROUP
            )
            if position >= 0:
                at = cell * S + split
                if split == 0:
                    token = tl.load(ids_ptr + b * K + position, mask=position < K, other=-1)
                    own = logit_at(
                        target_ptr, target_b, target_k, target_v,
                        draft_ptr, draft_b, draft_k, draft_v, counts_ptr, counts_b, counts_v,
                        ids_ptr, penalty_ptr, b, own_row, position, token, V, K,
                    )  # fmt: skip
                    tl.store(drafted_ptr + cell, own)
                row_results(
                    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
                    counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, max_ptr, best_ptr,
                    sum_ptr, groups_ptr, parts, temperature, (top_p < 1) & (top_k == 0),
                    b, own_row, position, first, at, V, K, peak, PART, BLOCK, LANE, CHUNK, PARTS,
                )  # fmt: skip

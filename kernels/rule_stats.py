# mypy: disallow-untyped-defs=False
"""Launch 1 of kernels/verify.py where rows may be penalised or truncated.

What was seen before the draft is the same for all rows of a sequence: a program looks at it once,
keeps a bit a token, and takes several rows. The bits of PARTS tokens share a number, so that a
draft, which the penalty of later rows counts as seen, is one comparison for PARTS tokens.
"""

import triton
import triton.language as tl

from kernels.plain_stats import (
    exact_sum,
    largest,
    lowest_id,
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

# mypy: disallow-untyped-defs=False
# ruff: noqa: SIM102 (what the compiler decides stays apart from what the device decides)
r"""Launch 2 of kernels/verify.py: which drafts are kept, and the token that comes after them.

A few programs share a sequence. Each decides where it ends (position n), then reads its tiles
there, the next one's logits already asked for, and sums strips of them that a warp has to itself:
warps need not meet. With a = w_p and q = w_q P' / Q', P' and Q' as good as launch 1 has them, and
A = {v: a(v) > q(v)}, a strip t notes, in float64,

    P_t = sum a    Q_t = sum q    over all of it;    p_t, q_t: the same over A.

Whoever is last has P = sum P_t and Q = sum Q_t without the error of P' and Q', and so the mass
R_t = p_t / P - q_t / Q of max(a / P - q / Q, 0), but for tokens whose side of A that error could
have changed: strips that have one within BAND say so, and are summed again where it matters. This
takes one pass over both rows where R would need P and Q first. A good drafter makes both laws
nearly equal: what is left of R then is far below the error of float32 sums.

The draw is the inverse CDF, first over the strips, then within one. An id without mass is never
chosen: where rounding leaves the CDF short of the uniform, the last id (or strip) that has mass
stands in. Everything else that is written has a program of its own, since whoever draws is late.

Where truncation packed all that a row may say, one program draws from these few tokens instead.
"""

import triton
import triton.language as tl

from kernels.accept import (
    at_lowest,
    broken_parameters,
    four_sums,
    four_sums_and_any,
    gather_rows,
    log_or_minus_inf,
    lowest_best,
    prob_at_drafts,
    two_sums,
)
from kernels.overlap import follow
from kernels.rows import draft_length, penalised, position_logits, raw_logits
from kernels.truncate import exact_weights
from kernels.weights import lowest_of, powers_of, weights_by

NO_RESIDUAL = tl.constexpr(1e-12)  # as in the reference
BAND = tl.constexpr(10)  # 2^-20 to 2^-21 of q each: 4e-6; no error of P' / Q' is larger
ROUNDING = tl.constexpr(2e-15)  # relative, of a sum over a strip
DOUBT = tl.constexpr(1e-7)  # share of R that may stand on the wrong side


@triton.jit
def high_word(x):
    """Upper half of a positive float64, which grows with it; integers, since float64 is scarce."""
    return (x.to(tl.int64, bitcast=True) >> 32).to(tl.int32)


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
def final_laws(
    x, y, draft_ptr, counts_ptr, counts_b, counts_v, ids_ptr, one_hot_ptr, penalty_ptr,
    b, n, first, V, K, scale, offset, lowest, draft_offset, draft_lowest, draft_unit, drawn, sure,
    SIZE: tl.constexpr,
):  # fmt: skip
    """a and q of the SIZE tokens whose logits these are; q is 0 where nothing was drafted."""
    offsets = first + tl.arange(0, SIZE)
    x = penalised(
        x, counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, n, offsets, V, K,
        first, first + SIZE,
    )  # fmt: skip
    if draft_ptr is None:
        q = tl.where(offsets == sure, draft_unit, 0.0)
    else:
        y = penalised(
            y, counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, n, offsets,
            tl.where(drawn, V, 0), K, first, first + SIZE,
        )  # fmt: skip
        q = weights_by(y, draft_offset, draft_lowest, scale) * draft_unit
        if one_hot_ptr is not None:
            q = tl.where(offsets == sure, draft_unit, q)
    return weights_by(x, offset, lowest, scale), q


@triton.jit
def crossing(mass, index, wanted, none):
    """First index whose cumulative mass exceeds `wanted`, and what of `wanted` is left there.

    Where none does: the last that has mass, and more than it has.
    """
    cdf = tl.cumsum(mass, axis=0)
    reached = (cdf > wanted) & (mass > 0)
    found, its_cdf, its_mass = at_lowest(tl.where(reached, index, none), cdf, mass)
    rest = its_mass - (its_cdf - wanted)
    if found == none:
        found = tl.max(tl.where(mass > 0, index, 0), axis=0)
        rest = rest * 0.0 + float("inf")
    return found, rest


@triton.jit
def crossing_values(mass, index, wanted, none, p, q):
    """As `crossing`, and what p and q hold there."""
    reached = (tl.cumsum(mass, axis=0) > wanted) & (mass > 0)
    found, its_p, its_q = at_lowest(tl.where(reached, index, none), p, q)
    if found == none:
        found = tl.max(tl.where(mass > 0, index, 0), axis=0)
        here = index == found
        its_p, its_q = two_sums(tl.where(here, p, 0.0), tl.where(here, q, 0.0))
    return found, its_p, its_q


@triton.jit
def strip_numbers(ptr, plane, b, batch, strips, STRIPS: tl.constexpr):
    """One number of every strip of a sequence, past any cache that other programs do not write."""
    t = tl.arange(0, STRIPS)
    at = (plane * batch + b).to(tl.int64) * strips + t
    return tl.load(ptr + at, mask=t < strips, other=0, cache_modifier=".cg")


@triton.jit
def note(pointers, sums, writes):
    """Store one number of each strip, which all threads of a strip have."""
    tl.store(pointers, tl.broadcast_to(sums[:, None], pointers.shape), mask=writes)


@triton.jit
def draw(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    counts_ptr, counts_b, counts_v, ids_ptr, one_hot_ptr, penalty_ptr, partial_ptr, close_ptr,
    b, batch, n, beyond, u, V, K, scale, offset, lowest,
    draft_offset, draft_lowest, draft_unit, drawn, sure,
    TILE: tl.constexpr, STRIP: tl.constexpr, STRIPS: tl.constexpr,
):  # fmt: skip
    """Id of the token at position n, and both laws' probabilities of it."""
    strips = tl.cdiv(V, STRIP)
    t, lane = tl.arange(0, STRIPS), tl.arange(0, STRIP)
    mass = strip_numbers(partial_ptr, 0, b, batch, strips, STRIPS)
    draft_whole = tl.full((), 1.0, tl.float64)
    from_residual = beyond
    if beyond:
        draft_mass = strip_numbers(partial_ptr, 1, b, batch, strips, STRIPS)
        above = strip_numbers(partial_ptr, 2, b, batch, strips, STRIPS)
        draft_above = strip_numbers(partial_ptr, 3, b, batch, strips, STRIPS)
        close = strip_numbers(close_ptr, 0, b, batch, strips, STRIPS)
        whole, draft_whole = two_sums(mass, draft_mass)
        draft_whole = tl.where(draft_whole > 0, draft_whole, 1.0)
        above *= 1.0 / whole
        residual = above - draft_above * (1.0 / draft_whole)
        residual = tl.where(residual > ROUNDING * above, residual, 0.0)
        total, in_doubt = two_sums(residual, tl.where(close > 0, draft_mass, 0.0))
        if tl.abs(draft_whole / whole - 1.0) * in_doubt > DOUBT * total:
            again_ptr = partial_ptr + (2 * batch + b).to(tl.int64) * strips
            for tile in range(0, tl.cdiv(V, TILE)):
                s = tile * (TILE // STRIP) + tl.arange(0, TILE // STRIP)
                near = tl.load(
                    close_ptr + b.to(tl.int64) * strips + s, mask=s < strips, other=0,
                    cache_modifier=".cg",
                )  # fmt: skip
                if tl.max(near, axis=0) > 0:
                    x, y = final_logits(
                        target_ptr, target_b, target_k, target_v,
                        draft_ptr, draft_b, draft_k, draft_v, b, n, tile * TILE, V, drawn, TILE,
                    )  # fmt: skip
                    a, q = final_laws(
                        x, y, draft_ptr, counts_ptr, counts_b, counts_v, ids_ptr, one_hot_ptr,
                        penalty_ptr, b, n, tile * TILE, V, K, scale, offset, lowest,
                        draft_offset, draft_lowest, draft_unit, drawn, sure, TILE,
                    )  # fmt: skip
                    r = tl.maximum(a * (1.0 / whole) - q * (1.0 / draft_whole), 0.0)
                    r = tl.sum(tl.reshape(r, (TILE // STRIP, STRIP)), axis=1)
                    tl.store(again_ptr + s, r, mask=near > 0)
            tl.debug_barrier()
            again = strip_numbers(partial_ptr, 2, b, batch, strips, STRIPS)
            residual = tl.where(close > 0, again, residual)
            total = tl.sum(residual, axis=0)
        from_residual = total > NO_RESIDUAL
        mass = tl.where(from_residual, residual, mass)
        wanted = u * tl.where(from_residual, total, whole)
    else:
        whole = tl.sum(mass, axis=0)
        wanted = u * whole
    chosen, rest = crossing(mass, t, wanted, STRIPS)
    first = chosen * STRIP
    x, y = final_logits(
        target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
        b, n, first, V, drawn, STRIP,
    )  # fmt: skip
    a, q = final_laws(
        x, y, draft_ptr, counts_ptr, counts_b, counts_v, ids_ptr, one_hot_ptr, penalty_ptr, b, n,
        first, V, K, scale, offset, lowest,
        draft_offset, draft_lowest, draft_unit, drawn, sure, STRIP,
    )  # fmt: skip
    p = a * (1.0 / whole)
    q = q * (1.0 / draft_whole)
    r = tl.where(from_residual, tl.maximum(p - q, 0.0), a)
    number, its_p, its_q = crossing_values(r, lane, rest, STRIP, p, q)
    its_q = tl.where(beyond, its_q, 1.0)  # no draft at a bonus token
    return (first + number).to(tl.int64), its_p, its_q


@triton.jit
def draw_among(
    draft_ptr, draft_b, draft_k, draft_v, counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr,
    logits_ptr, tokens_ptr, few, b, n, beyond, u, V, K, temperature, peak, lowest,
    draft_peak, draft_lowest, draft_total, drawn, sure, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """`draw` from the `few` tokens that truncation left in question, whose ids ascend.

    The drafter's mass `draft_total` is that of all it kept, of the same exponentials.
    """
    d = tl.arange(0, CANDIDATES)
    x = tl.load(logits_ptr + d, mask=d < few, other=-float("inf"))
    token = tl.load(tokens_ptr + d, mask=d < few, other=V)
    kept = x >= lowest
    a = tl.where(kept, exact_weights(tl.where(kept, x, peak), peak, temperature), 0.0)
    p = a * (1.0 / tl.sum(a, axis=0))
    q = tl.where(token == sure, 1.0, 0.0).to(tl.float64)
    if draft_ptr is not None:
        if drawn:
            y = position_logits(
                draft_ptr, draft_b, draft_k, draft_v, counts_ptr, counts_b, counts_v,
                ids_ptr, penalty_ptr, b, n, token, V, K,
            )  # fmt: skip
            proposed = y >= draft_lowest
            y = tl.where(proposed, y, draft_peak.to(tl.float32))
            q = tl.where(proposed, exact_weights(y, draft_peak, temperature), 0.0)
            q *= 1.0 / draft_total
    r = tl.maximum(p - q, 0.0)
    total, whole = two_sums(r, p)
    from_residual = beyond & (total > NO_RESIDUAL)
    mass = tl.where(from_residual, r, p)
    wanted = u * tl.where(from_residual, total, whole)
    number, its_p, its_q = crossing_values(mass, d, wanted, CANDIDATES, p, q)
    return tl.load(tokens_ptr + number).to(tl.int64), its_p, tl.where(beyond, its_q, 1.0)


@triton.jit
def resolve_kernel(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    counts_ptr, counts_b, counts_v, ids_ptr, lengths_ptr, one_hot_ptr, temperature_ptr, penalty_ptr,
    top_k_ptr, top_p_ptr, min_p_ptr, max_ptr, best_ptr, sum_ptr, drafted_ptr, threshold_ptr,
    kept_ptr, found_ptr, few_ptr, few_ids_ptr, uniforms_ptr, partial_ptr, close_ptr, arrived_ptr,
    tokens_ptr, accepted_ptr, target_logprobs_ptr, draft_logprobs_ptr, errors_ptr, V, K, S,
    POSITIONS: tl.constexpr, SPLITS: tl.constexpr, SIDES: tl.constexpr, TILE: tl.constexpr,
    STRIP: tl.constexpr, STRIPS: tl.constexpr, WIDTH: tl.constexpr, AHEAD: tl.constexpr,
    CANDIDATES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """All of one sequence's outputs."""
    if OVERLAP > 0:
        follow()
    part, parts, batch = tl.program_id(0), tl.num_programs(0), tl.num_programs(1)
    b = batch - 1 - tl.program_id(1)  # what launch 1 read last is in the cache
    rows = K + 1
    if draft_ptr is not None:
        rows = 2 * K + 1
    i = tl.arange(0, POSITIONS)
    # Rows of both models beside each other: each is asked for at once, in use or not.
    r = tl.arange(0, SIDES * POSITIONS)
    side, at = r % SIDES, r // SIDES
    cells = b * rows + tl.where(side == 0, at, K + 1 + at)
    there = at + side <= K
    length = draft_length(ids_ptr, lengths_ptr, b, K, POSITIONS)
    ids = tl.load(ids_ptr + b * K + i, mask=i < K, other=-1).to(tl.int64)
    drafts = tl.load(ids_ptr + b * K + at, mask=at < K, other=-1).to(tl.int64)
    given = tl.load(temperature_ptr + b).to(tl.float64)
    uniforms = tl.load(uniforms_ptr + b * (K + 1) + i, mask=i <= K, other=0.0).to(tl.float64)
    last_uniform = tl.load(uniforms_ptr + b * (K + 1) + K).to(tl.float64)
    logits = tl.load(drafted_ptr + cells, mask=there, other=-float("inf"))
    thresholds = tl.full((SIDES * POSITIONS,), -float("inf"), tl.float32)
    if threshold_ptr is not None:
        thresholds = tl.load(threshold_ptr + cells, mask=there, other=-float("inf"))
    one_hot = tl.minimum(length, 0)
    if draft_ptr is None:
        one_hot = one_hot + 1
    elif one_hot_ptr is not None:
        one_hot = tl.load(one_hot_ptr + b).to(tl.int32)
    ids = tl.where(i < length, ids, -1)
    drafted = (i < length) & (ids >= 0) & (ids < V)
    greedy = given == 0
    temperature = tl.where(greedy, 1.0, given)
    scale = powers_of(temperature)
    asked = (at < length) & (drafts >= 0) & (drafts < V)
    proposes = asked & (at < tl.where(one_hot == 0, length, 0))
    used = tl.where(side == 0, at <= length, proposes)
    peaks, totals = gather_rows(
        max_ptr, sum_ptr, kept_ptr, cells, there, used, S, scale, SIDES * POSITIONS, SPLITS
    )
    bad = (i < length) & ((ids < 0) | (ids >= V))
    bad = bad | (uniforms < 0) | (uniforms >= 1) | (uniforms != uniforms)
    probs = tl.where(asked, 1.0, 0.0).to(tl.float64)
    if sum_ptr is not None:
        known = prob_at_drafts(logits, thresholds, asked & used, peaks, totals, scale)
        probs = tl.where((side == 0) | used, known, probs)
    p, q = probs, tl.where(drafted, 1.0, 0.0).to(tl.float64)
    if SIDES == 2:
        p, q = tl.split(tl.reshape(probs, (POSITIONS, 2)))
    best = ids
    proposed = ids
    if sum_ptr is None or greedy:
        peak, draft_peak = peaks, peaks
        if SIDES == 2:
            peak, draft_peak = tl.split(tl.reshape(peaks, (POSITIONS, 2)))
        best = lowest_best(max_ptr, best_ptr, b * rows, i <= length, peak, S, V, POSITIONS, SPLITS)
        p = ((best == ids) & drafted).to(tl.float64)
        q = tl.where(drafted, 1.0, 0.0).to(tl.float64)
        if draft_ptr is not None:
            own = drafted & (i < tl.where(one_hot == 0, length, 0))
            draft_best = lowest_best(
                max_ptr, best_ptr, b * rows + K + 1, own, draft_peak, S, V, POSITIONS, SPLITS
            )
            proposed = tl.where(own, draft_best, ids)
            q = tl.where(own, ((draft_best == ids) & own).to(tl.float64), q)
    rejected = (i < length) & (uniforms * q >= p)
    n = tl.min(tl.where(rejected, i, length), axis=0)

    last = part == 0
    beyond = n < length
    drawn = beyond & (one_hot == 0)
    tiles = tl.cdiv(V, TILE)
    if sum_ptr is not None:
        # A row without drafts has no sure token: no offset is -1.
        sure = tl.where(
            beyond & (one_hot != 0), tl.load(ids_ptr + b * K + n, mask=beyond, other=-1), -1
        )
        threshold = tl.full((), -float("inf"), tl.float32)
        draft_threshold = threshold
        if threshold_ptr is not None:
            threshold = tl.load(threshold_ptr + b * rows + n)
            if draft_ptr is not None:
                draft_threshold = tl.load(
                    threshold_ptr + b * rows + K + 1 + n, mask=drawn, other=0.0
                )
        target_side = (side == 0) & (at == n)
        draft_side = (side == SIDES - 1) & (at == n)
        n_peak, n_total, draft_n_peak, draft_n_total = four_sums(
            tl.where(target_side, peaks, 0.0).to(tl.float64),
            tl.where(target_side, totals, 0.0),
            tl.where(draft_side, peaks, 0.0).to(tl.float64),
            tl.where(draft_side, totals, 0.0),
        )
        n_lowest = lowest_of(n_peak, temperature, threshold)
        draft_lowest = lowest_of(draft_n_peak, temperature, draft_threshold)
        draft_unit = tl.where(drawn, n_total / draft_n_total, n_total)
        # Logits times the scale, less these. What they are rounded by all weights share.
        offset, draft_offset = n_peak * scale, draft_n_peak * scale
        few = tl.full((), -1, tl.int32)  # any token may come
        if found_ptr is not None:
            few = tl.load(found_ptr + b * rows + n)
            if draft_ptr is not None:
                theirs = tl.load(found_ptr + b * rows + K + 1 + n, mask=drawn, other=0)
                few = tl.where(theirs < 0, -1, few)
        if (greedy == 0) & (few < 0):
            strips = tl.cdiv(V, STRIP)
            planes = batch.to(tl.int64) * strips
            x, y = final_logits(
                target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
                b, n, part * TILE, V, drawn, TILE,
            )  # fmt: skip
            for tile in range(part, tiles, parts):
                if AHEAD > 0:  # asked for before anything waits for this one
                    next_x, next_y = final_logits(
                        target_ptr, target_b, target_k, target_v,
                        draft_ptr, draft_b, draft_k, draft_v,
                        b, n, (tile + parts) * TILE, V, drawn, TILE,
                    )  # fmt: skip
                elif tile > part:
                    x, y = final_logits(
                        target_ptr, target_b, target_k, target_v,
                        draft_ptr, draft_b, draft_k, draft_v, b, n, tile * TILE, V, drawn, TILE,
                    )  # fmt: skip
                tile_a, tile_q = final_laws(
                    x, y, draft_ptr, counts_ptr, counts_b, counts_v, ids_ptr, one_hot_ptr,
                    penalty_ptr, b, n, tile * TILE, V, K, scale, offset, n_lowest,
                    draft_offset, draft_lowest, draft_unit, drawn, sure, TILE,
                )  # fmt: skip
                a = tl.reshape(tile_a, (TILE // STRIP, WIDTH, STRIP // WIDTH))
                strip = tile * (TILE // STRIP) + tl.arange(0, TILE // STRIP)
                # Each warp's first thread stores what its warp has: addresses laid out as the
                # threads are, since sums would pass through shared memory else.
                lane = tl.arange(0, WIDTH)[None, :]
                writes = (strip < strips)[:, None] & (lane == 0)
                to = b.to(tl.int64) * strips + strip[:, None] + lane
                if beyond:
                    other = tl.reshape(tile_q, (TILE // STRIP, WIDTH, STRIP // WIDTH))
                    above = a > other
                    draft_high = high_word(other)
                    apart = (high_word(a) - draft_high + BAND).to(tl.uint32, bitcast=True)
                    near = (apart <= 2 * BAND) & (draft_high > 0)
                    whole, draft_whole, over, draft_over, close = four_sums_and_any(
                        a, other, tl.where(above, a, 0.0), tl.where(above, other, 0.0),
                        near.to(tl.int32), 2,
                    )  # fmt: skip
                    whole, draft_whole, over, draft_over, close = four_sums_and_any(
                        whole, draft_whole, over, draft_over, close, 1
                    )
                    note(partial_ptr + to, whole, writes)
                    note(partial_ptr + planes + to, draft_whole, writes)
                    note(partial_ptr + 2 * planes + to, over, writes)
                    note(partial_ptr + 3 * planes + to, draft_over, writes)
                    note(close_ptr + to, close, writes)
                else:
                    note(partial_ptr + to, tl.sum(tl.sum(a, axis=2), axis=1), writes)
                if AHEAD > 0:
                    x, y = next_x, next_y
            tl.debug_barrier()  # all of this program's numbers are written
            last = tl.atomic_add(arrived_ptr + b, 1) == parts - 1
    out = b * (K + 1) + i
    if part == tl.minimum(parts - 1, 1):  # the last one, or 0 where few tokens are left, draws
        kept = i < n
        final = i == tl.where(greedy, n, -1)
        token = tl.where(kept, ids, tl.where(final, best, -1))
        log_p = tl.where(kept, log_or_minus_inf(p), 0.0)
        log_q = tl.where(kept, log_or_minus_inf(q), 0.0)
        log_q = tl.where(final & (i < length) & (proposed != best), -float("inf"), log_q)
        mine = (i <= K) & (i != tl.where(greedy, -1, n))
        tl.store(tokens_ptr + out, token, mask=mine)
        tl.store(target_logprobs_ptr + out, log_p, mask=mine)
        tl.store(draft_logprobs_ptr + out, log_q, mask=mine)
        tl.store(accepted_ptr + b, n.to(tl.int64))
        broken = broken_parameters(
            lengths_ptr, one_hot_ptr, temperature_ptr, penalty_ptr, top_k_ptr, top_p_ptr,
            min_p_ptr, b, K, length, draft_ptr is not None,
        )  # fmt: skip
        lawless = used & (tl.abs(peaks) == float("inf"))
        broken = broken | (tl.max(lawless.to(tl.int32), axis=0) > 0)
        broken = broken | (tl.max(bad.to(tl.int32), axis=0) > 0)
        tl.store(errors_ptr + b, broken.to(tl.int32))
    if sum_ptr is not None:
        if last & (greedy == 0):
            drawn_id = tl.full((), 0, tl.int64)
            its_p, its_q = n_total, n_total
            if few < 0:
                drawn_id, its_p, its_q = draw(
                    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
                    counts_ptr, counts_b, counts_v, ids_ptr, one_hot_ptr, penalty_ptr,
                    partial_ptr, close_ptr, b, batch, n, beyond, last_uniform, V, K,
                    scale, offset, n_lowest, draft_offset, draft_lowest, draft_unit, drawn, sure,
                    TILE, STRIP, STRIPS,
                )  # fmt: skip
            if found_ptr is not None:
                if few >= 0:
                    first = (b * rows + n).to(tl.int64) * CANDIDATES
                    drawn_id, its_p, its_q = draw_among(
                        draft_ptr, draft_b, draft_k, draft_v, counts_ptr, counts_b, counts_v,
                        ids_ptr, penalty_ptr, few_ptr + first, few_ids_ptr + first, few, b, n,
                        beyond, last_uniform, V, K, temperature, n_peak, n_lowest,
                        draft_n_peak, draft_lowest, draft_n_total, drawn, sure, CANDIDATES,
                    )  # fmt: skip
            here = i == n
            ones = tl.full((POSITIONS,), 1.0, tl.float64)
            tl.store(tokens_ptr + out, tl.where(here, drawn_id, 0), mask=here)
            log_p, log_q = log_or_minus_inf(ones * its_p), log_or_minus_inf(ones * its_q)
            tl.store(target_logprobs_ptr + out, log_p, mask=here)
            tl.store(draft_logprobs_ptr + out, log_q, mask=here)

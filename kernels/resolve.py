# mypy: disallow-untyped-defs=False
# ruff: noqa: SIM102 (what the compiler decides stays apart from what the device decides)
r"""Launch 2 of kernels/verify.py: which drafts are kept, and the token that comes after them.

A few programs share a sequence. Each decides where it ends (position n), then reads its tiles
there, the next one's logits already asked for, and notes what each strip of them has of the
residual (kernels/residual.py): one float32 sum, of what one warp has to itself, so that warps need
not meet. Whoever is last draws by the inverse CDF, first over the strips, then within one. Where
next to nothing is left of a residual, it first walks the row again in float64.

An id without mass is never chosen: where rounding leaves the CDF short of the uniform, the last id
(or strip) that has mass stands in. Everything else that is written has a program of its own, since
whoever draws is late.

Where truncation packed all that a row may say, one program draws from these few tokens instead.
"""

import triton
import triton.language as tl

from kernels.accept import (
    at_lowest,
    broken_parameters,
    four_sums,
    gather_rows,
    log_or_minus_inf,
    lowest_best,
    prob_at_drafts,
    two_sums,
)
from kernels.overlap import follow
from kernels.residual import (
    LITTLE,
    NO_RESIDUAL,
    exact_strips,
    final_logits,
    final_penalised,
    finite,
    laws,
    residual_near,
    two_parts,
)
from kernels.rows import draft_length, position_logits
from kernels.truncate import exact_weights
from kernels.weights import lowest_of, powers_of


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
def strip_numbers(ptr, b, strips, STRIPS: tl.constexpr):
    """One number of every strip of a sequence, past any cache that other programs do not write."""
    t = tl.arange(0, STRIPS)
    at = b.to(tl.int64) * strips + t
    return tl.load(ptr + at, mask=t < strips, other=0, cache_modifier=".cg").to(tl.float64)


@triton.jit
def draw(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    counts_ptr, counts_b, counts_v, ids_ptr, one_hot_ptr, penalty_ptr, threshold_ptr,
    partial_ptr, exact_ptr, b, n, beyond, u, V, K, scale, high, low, ratio, peak, threshold, lowest,
    draft_peak, draft_threshold, draft_lowest, whole, draft_whole, drawn, sure,
    TILE: tl.constexpr, STRIP: tl.constexpr, STRIPS: tl.constexpr,
):  # fmt: skip
    """Id of the token at position n, and both laws' probabilities of it."""
    strips = tl.cdiv(V, STRIP)
    t, lane = tl.arange(0, STRIPS), tl.arange(0, STRIP)
    mass = strip_numbers(partial_ptr, b, strips, STRIPS)
    total = tl.sum(mass, axis=0)
    from_residual = beyond
    # Without a drafter's law nothing was subtracted, and float32 is as good for a small residual.
    little = total <= tl.where(drawn, LITTLE, 2 * NO_RESIDUAL) * whole
    exact = beyond & little
    if exact:
        whole, draft_whole, total, from_residual = exact_strips(
            target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
            counts_ptr, counts_b, counts_v, ids_ptr, one_hot_ptr, penalty_ptr,
            exact_ptr + b.to(tl.int64) * strips, b, n, V, K, scale, peak, lowest,
            draft_peak, draft_lowest, drawn, sure, min(TILE, 2 * STRIP), STRIP,
        )  # fmt: skip
        mass = strip_numbers(exact_ptr, b, strips, STRIPS)
    chosen, rest = crossing(mass, t, u * total, STRIPS)
    first = chosen * STRIP
    x, y = final_logits(
        target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
        b, n, first, V, drawn, STRIP,
    )  # fmt: skip
    x, y = final_penalised(
        x, y, draft_ptr, counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, n, first, V, K,
        drawn, STRIP,
    )  # fmt: skip
    # The numbers that the strip's sum was made of: what has a share there has mass here.
    r = residual_near(
        x, y, draft_ptr, one_hot_ptr, threshold_ptr, first, peak, draft_peak,
        threshold, draft_threshold, high, low, ratio, sure, STRIP,
    ).to(tl.float64)  # fmt: skip
    p, q = laws(
        x, y, draft_ptr, one_hot_ptr, first, peak, lowest, draft_peak, draft_lowest, scale, sure,
        STRIP,
    )  # fmt: skip
    p, q = p * (1.0 / whole), q * (1.0 / draft_whole)
    if exact:
        r = tl.where(from_residual, tl.maximum(p - q, 0.0), p)
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
    kept_ptr, found_ptr, few_ptr, few_ids_ptr, uniforms_ptr, partial_ptr, exact_ptr, arrived_ptr,
    tokens_ptr, accepted_ptr, target_logprobs_ptr, draft_logprobs_ptr, errors_ptr, V, K, S,
    POSITIONS: tl.constexpr, SPLITS: tl.constexpr, SIDES: tl.constexpr, TILE: tl.constexpr,
    STRIP: tl.constexpr, STRIPS: tl.constexpr, WIDTH: tl.constexpr, AHEAD: tl.constexpr,
    CANDIDATES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """All of one sequence's outputs."""
    if OVERLAP > 0:
        follow(OVERLAP)
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
    if found_ptr is not None:
        found = tl.load(found_ptr + cells, mask=there, other=0)
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
    if sum_ptr is not None:
        # All that is known of position n is picked from what was read of every position: to read it
        # again would take as long as half of the launch.
        target_side = (side == 0) & (at == n)
        draft_side = (side == SIDES - 1) & (at == n)
        few = tl.full((), -1, tl.int32)  # any token may come
        if found_ptr is not None:
            few, theirs = two_sums(tl.where(target_side, found, 0), tl.where(draft_side, found, 0))
            few = tl.where(drawn & (theirs < 0), -1, few)
        walked = (greedy == 0) & (few < 0)
        x, y = final_logits(  # asked for before anything else is worked out
            target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
            b, n, part * TILE, tl.where(walked, V, 0), drawn, TILE,
        )  # fmt: skip
        n_peak, n_total, draft_n_peak, draft_n_total = four_sums(
            tl.where(target_side, peaks, 0.0),
            tl.where(target_side, totals, 0.0),
            tl.where(draft_side, peaks, 0.0),
            tl.where(draft_side, totals, 0.0),
        )
        n_peak, draft_n_peak = finite(n_peak), tl.where(drawn, finite(draft_n_peak), 0.0)
        draft_n_total = tl.where(drawn, draft_n_total, 1.0)
        threshold = tl.full((), -float("inf"), tl.float32)
        draft_threshold = threshold
        if threshold_ptr is not None:
            threshold, draft_threshold = two_sums(
                tl.where(target_side, thresholds, 0.0), tl.where(draft_side, thresholds, 0.0)
            )
            draft_threshold = tl.where(drawn, draft_threshold, -float("inf"))
        # A row without drafts has no sure token: no offset is -1.
        sure = tl.sum(tl.where(i == n, ids, 0), axis=0)
        sure = tl.where(beyond & (one_hot != 0), sure, -1)
        high, low = two_parts(scale)
        ratio = (n_total / draft_n_total).to(tl.float32)
    out = b * (K + 1) + i
    if part == parts - 1:  # which has no tile, or one fewer than others; not the one that draws
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
        if walked:
            strips = tl.cdiv(V, STRIP)
            for tile in range(part, tl.cdiv(V, TILE), parts):
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
                tile_x, tile_y = final_penalised(
                    x, y, draft_ptr, counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr,
                    b, n, tile * TILE, V, K, drawn, TILE,
                )  # fmt: skip
                mass = residual_near(
                    tile_x, tile_y, draft_ptr, one_hot_ptr, threshold_ptr, tile * TILE,
                    n_peak, draft_n_peak, threshold, draft_threshold, high, low, ratio, sure, TILE,
                )  # fmt: skip
                mass = tl.reshape(mass, (TILE // STRIP, WIDTH, STRIP // WIDTH))
                note = tl.sum(tl.sum(mass, axis=2), axis=1)
                # Each warp's first thread stores what its warp has: addresses laid out as the
                # threads are, since sums would pass through shared memory else.
                strip = tile * (TILE // STRIP) + tl.arange(0, TILE // STRIP)
                lane = tl.arange(0, WIDTH)[None, :]
                to = partial_ptr + b.to(tl.int64) * strips + strip[:, None] + lane
                writes = (strip < strips)[:, None] & (lane == 0)
                tl.store(to, tl.broadcast_to(note[:, None], to.shape), mask=writes)
                if AHEAD > 0:
                    x, y = next_x, next_y
            tl.debug_barrier()  # all of this program's numbers are written
            last = tl.atomic_add(arrived_ptr + b, 1) == parts - 1
    if sum_ptr is not None:
        if last & (greedy == 0):
            lowest = lowest_of(n_peak, temperature, threshold)
            draft_lowest = lowest_of(draft_n_peak, temperature, draft_threshold)
            drawn_id = tl.full((), 0, tl.int64)
            its_p, its_q = n_total, n_total
            if few < 0:
                drawn_id, its_p, its_q = draw(
                    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
                    counts_ptr, counts_b, counts_v, ids_ptr, one_hot_ptr, penalty_ptr,
                    threshold_ptr, partial_ptr, exact_ptr, b, n, beyond, last_uniform, V, K,
                    scale, high, low, ratio, n_peak, threshold, lowest,
                    draft_n_peak, draft_threshold, draft_lowest, n_total, draft_n_total, drawn,
                    sure, TILE, STRIP, STRIPS,
                )  # fmt: skip
            if found_ptr is not None:
                if few >= 0:
                    first = (b * rows + n).to(tl.int64) * CANDIDATES
                    drawn_id, its_p, its_q = draw_among(
                        draft_ptr, draft_b, draft_k, draft_v, counts_ptr, counts_b, counts_v,
                        ids_ptr, penalty_ptr, few_ptr + first, few_ids_ptr + first, few, b, n,
                        beyond, last_uniform, V, K, temperature, n_peak, lowest,
                        draft_n_peak, draft_lowest, draft_n_total, drawn, sure, CANDIDATES,
                    )  # fmt: skip
            here = i == n
            ones = tl.full((POSITIONS,), 1.0, tl.float64)
            tl.store(tokens_ptr + out, tl.where(here, drawn_id, 0), mask=here)
            log_p, log_q = log_or_minus_inf(ones * its_p), log_or_minus_inf(ones * its_q)
            tl.store(target_logprobs_ptr + out, log_p, mask=here)
            tl.store(draft_logprobs_ptr + out, log_q, mask=here)

# mypy: disallow-untyped-defs=False
# ruff: noqa: SIM102 (what the compiler decides stays apart from what the device decides)

"""Exact thresholds of top-k, top-p and min-p: two launches, the second of which rarely has work.

Each rule keeps the logits z at or above one value t of its row. With w(v) = exp((z_v - max z) / T),

    top-k   t = the largest value with at least k logits at or above it
    top-p   t = the largest value such that w at or above it reaches top_p of what top-k kept
    min-p   t = the least value with w >= min_p

and a row's threshold is the largest of the three, so that ties are kept and -inf never is.

  cut      one program a row. Launch 1 left the maximum of every GROUP tokens; all logits at or
           above the GROUPS_READ-th largest of these lie in as many groups (a short top-k needs
           few more groups than it keeps tokens). Those are read again, what is at or above that
           edge is packed (CANDIDATES at most), and the rules are decided among the few by comparing
           all with all. Launch 2 draws from these. top-k up to GROUPS_READ is decided here, but
           where many tie.
  search   one program a row, which leaves at once where cut decided. Else (a flat law, a long
           top-k, many ties) it looks for t by bisection, and walks the row for each step.

Nothing is added by atomics: the same logits give the same threshold in any batch.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.accept import three_sums
from kernels.launching import launch
from kernels.matrix import INTERPRETED
from kernels.overlap import follow, options
from kernels.rows import (
    Call,
    Rules,
    key_value,
    order_key,
    row_logits,
    row_peak,
    row_position,
    rules_of,
)
from kernels.stats import GROUP, Statistics
from kernels.weights import LOWEST, lowest_of, powers_of, weights

GROUPS_READ = 128
CANDIDATES = 512
READ, CUT_WARPS, CUT_REGISTERS = 4096, 16, 128  # tokens of these that are read at a time
FEW = 128  # candidates that are compared at once
AT_ONCE = 1  # are these few compared in one step, or CHUNK after CHUNK?
PROBES = 6  # keys that the edge's search counts from at a time: 2 or 6
STRIDE, SEARCH_WARPS = 4096, 16  # tokens of a row that search looks at together
CHUNK = tl.constexpr(32)  # candidates that all are compared with at a time
UNDECIDED = float("nan")


@dataclass(frozen=True, slots=True)
class Cut:
    """What each row keeps: its logits at or above a threshold."""

    thresholds: Tensor  # [B, rows] float32; -inf: all
    masses: Tensor  # [B, rows] float64, of what is kept, its largest weight being 1; -1: not known
    counts: Tensor  # [B, rows] int32, tokens among which all that is kept is; -1: anywhere
    logits: Tensor  # [B, rows, CANDIDATES] float32, penalised, of these tokens
    ids: Tensor  # [B, rows, CANDIDATES] int32, ascending

    def tensors(self) -> tuple[Tensor, ...]:
        return self.thresholds, self.masses, self.counts, self.logits, self.ids


@triton.jit
def exact_weights(x, peak, temperature):
    """exp((x - peak) / T) as the specification has it, for the few that a rule compares."""
    return tl.exp((x.to(tl.float64) - peak.to(tl.float64)) / temperature)


@triton.jit
def row_total(max_ptr, sum_ptr, cell, S, scale, SPLITS: tl.constexpr):
    """Largest logit of a row and its sum of weights."""
    s = tl.arange(0, SPLITS)
    at = cell * S + s
    maxima = tl.load(max_ptr + at, mask=s < S, other=-float("inf"))
    sums = tl.load(sum_ptr + at, mask=s < S, other=0.0)
    peak = tl.max(maxima, axis=0)
    factor = weights(maxima, tl.minimum(tl.maximum(peak, LOWEST), -LOWEST), LOWEST, scale)
    return peak, tl.sum(tl.where(sums > 0, sums * factor, 0.0), axis=0)


@triton.jit
def two_counts(keys, lower, upper):
    """How many of (at most 4096) keys reach each of two, in 16 bits each."""
    return (keys >= lower.to(tl.int32)).to(tl.int32) + (
        (keys >= upper.to(tl.int32)).to(tl.int32) << 16
    )


@triton.jit
def closer(key, count, most, low, beyond, high, reached):
    """Both ends of a search, one of them moved to a key that `count` reach, where it is nearer."""
    few, many = (count <= most) & (key < high), (count > most) & (key > low)
    low, beyond = tl.where(many, key, low), tl.where(many, count, beyond)
    return low, beyond, tl.where(few, key, high), tl.where(few, count, reached)


@triton.jit
def narrowed(keys, a, b, c, d, e, f, most, low, beyond, high, reached):
    """Both ends of a search after six more keys, each counted from at once."""
    ab, cd, ef = three_sums(two_counts(keys, a, b), two_counts(keys, c, d), two_counts(keys, e, f))
    low, beyond, high, reached = closer(a, ab & 65535, most, low, beyond, high, reached)
    low, beyond, high, reached = closer(b, ab >> 16, most, low, beyond, high, reached)
    low, beyond, high, reached = closer(c, cd & 65535, most, low, beyond, high, reached)
    low, beyond, high, reached = closer(d, cd >> 16, most, low, beyond, high, reached)
    low, beyond, high, reached = closer(e, ef & 65535, most, low, beyond, high, reached)
    return closer(f, ef >> 16, most, low, beyond, high, reached)


@triton.jit
def key_below(peak, distance, low, high):
    """The key of a value so far below the peak, from low to high."""
    key = order_key(peak - distance.to(tl.float32)).to(tl.int64)
    return tl.minimum(tl.maximum(key, low), high)


@triton.jit
def group_edge(keys, peak, temperature, enough, most, CAP: tl.constexpr, PROBES: tl.constexpr):
    """A key that `enough` of `keys` reach, `most` if ties allow, CAP at most; is it below all?"""
    bottom = tl.full((), -2139095040, tl.int64)  # the key of the least float32 above -inf
    low = bottom
    high = order_key(peak).to(tl.int64) + 1
    reached = tl.full((), 0, tl.int32)  # by `high`; never more than `most`
    beyond = tl.sum((keys >= low.to(tl.int32)).to(tl.int32), axis=0)  # reach `low`
    if beyond <= most:
        high = low
        reached = beyond
    if PROBES == 6:
        # Where a law has its mass: temperatures below the peak.
        if high > low:
            low, beyond, high, reached = narrowed(
                keys, key_below(peak, temperature, low, high),
                key_below(peak, 2 * temperature, low, high),
                key_below(peak, 4 * temperature, low, high),
                key_below(peak, 6 * temperature, low, high),
                key_below(peak, 10 * temperature, low, high),
                key_below(peak, 20 * temperature, low, high),
                most, low, beyond, high, reached,
            )  # fmt: skip
    # Several keys at a time: what takes time is that threads meet.
    while (high - low > 1) & (reached < enough):
        if PROBES == 6:
            step, end = tl.maximum((high - low) // 7, 1), high
            first = low
            low, beyond, high, reached = narrowed(
                keys, first + step, tl.minimum(first + 2 * step, end),
                tl.minimum(first + 3 * step, end), tl.minimum(first + 4 * step, end),
                tl.minimum(first + 5 * step, end), tl.minimum(first + 6 * step, end),
                most, low, beyond, high, reached,
            )  # fmt: skip
        else:
            third = tl.maximum((high - low) // 3, 1)
            lower, upper = low + third, high - third
            counts = tl.sum(two_counts(keys, lower, upper), axis=0)
            low, beyond, high, reached = closer(
                lower, counts & 65535, most, low, beyond, high, reached
            )
            low, beyond, high, reached = closer(
                upper, counts >> 16, most, low, beyond, high, reached
            )
    if (reached < enough) & (beyond <= CAP):  # a tie lies across `most`
        high = low
    return high.to(tl.int32), high == bottom


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
def decide(
    packed_ptr, weight_ptr, count, whole, total, top_k, top_p, min_p, peak, temperature, edge,
    PACKED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Threshold and kept mass from the `count` logits at or above `edge`; a mass of NaN: unknown.

    `whole`: nothing of the row lies below the edge. The weights are kept at `weight_ptr`.
    """
    d = tl.arange(0, PACKED)
    alive = d < count
    z = tl.load(packed_ptr + d, mask=alive, other=-float("inf"))
    kept = alive
    decided = (count > 0) & (count <= PACKED)
    sure = whole  # nothing below the edge could be kept
    last = tl.minimum(count, PACKED)
    above = tl.zeros((PACKED,), tl.int32)
    mass = tl.zeros((PACKED,), tl.float64)
    if CHUNK == PACKED:  # all at once; what top-k leaves out weighs on nothing that it keeps
        w = tl.where(alive, exact_weights(tl.where(alive, z, peak), peak, temperature), 0.0)
        # Through memory: the compiler would have every thread work out what it is to add.
        tl.store(weight_ptr + d, w)
        tl.debug_barrier()
        other = tl.load(packed_ptr + d, mask=alive, other=-float("inf"))
        theirs = tl.load(weight_ptr + d)
        reach = other[:, None] >= z[None, :]
        above, mass = counts_and_sums(reach, tl.where(reach, theirs[:, None], 0.0))
    if top_k > 0:
        if CHUNK != PACKED:
            for start in range(0, last, CHUNK):
                j = start + tl.arange(0, CHUNK)
                other = tl.load(packed_ptr + j, mask=j < last, other=-float("inf"))
                above += tl.sum((other[:, None] >= z[None, :]).to(tl.int32), axis=0)
        enough = alive & (above >= top_k)
        least = tl.max(tl.where(enough, z, -float("inf")), axis=0)
        kept = kept & (z >= least)
        decided = decided & ((count >= top_k) | whole)
        sure = sure | (count >= top_k)
    if CHUNK != PACKED:
        w = tl.where(kept, exact_weights(tl.where(kept, z, peak), peak, temperature), 0.0)
    if top_p < 1:
        if CHUNK != PACKED:
            tl.store(weight_ptr + d, w)
            tl.debug_barrier()
            for start in range(0, last, CHUNK):
                j = start + tl.arange(0, CHUNK)
                other = tl.load(packed_ptr + j, mask=j < last, other=-float("inf"))
                theirs = tl.load(weight_ptr + j, mask=j < last, other=0.0)
                mass += tl.sum(tl.where(other[:, None] >= z[None, :], theirs[:, None], 0.0), axis=0)
        whole_mass = tl.where(sure, tl.max(tl.where(kept, mass, 0.0), axis=0), total)
        enough = kept & (mass >= top_p * whole_mass)
        least = tl.max(tl.where(enough, z, -float("inf")), axis=0)
        decided = decided & (sure | (least > -float("inf")))
        sure = sure | (least > -float("inf"))
        kept = kept & (z >= least)
    if min_p > 0:
        heavy = kept & (w >= min_p)
        # What is kept ends above the edge, or everything at the edge is kept so far.
        fewer = tl.max((kept & ~heavy).to(tl.int32), axis=0) > 0
        decided = decided & (sure | fewer)
        kept = heavy
    threshold = tl.min(tl.where(kept, z, float("inf")), axis=0)
    if not decided:  # what search may begin with: too little lies at or above the edge
        threshold = tl.where(count <= PACKED, key_value(edge), float("inf"))
    kept_mass = tl.sum(tl.where(kept, w, 0.0), axis=0)
    return threshold, tl.where(decided, kept_mass, float("nan")), decided


@triton.jit
def cut_kernel(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    counts_ptr, counts_b, counts_v, ids_ptr, lengths_ptr, one_hot_ptr, temperature_ptr,
    penalty_ptr, top_k_ptr, top_p_ptr, min_p_ptr, max_ptr, sum_ptr, groups_ptr, list_ptr,
    packed_ptr, packed_ids_ptr, weight_ptr, found_ptr, threshold_ptr, kept_ptr, V, K, S, G,
    POSITIONS: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    CAP: tl.constexpr, READ: tl.constexpr, FEW: tl.constexpr, PACKED: tl.constexpr,
    TOGETHER: tl.constexpr, PROBES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Threshold and kept mass of one row, from the groups of tokens that hold its largest."""
    if OVERLAP > 0:
        follow()
    row, b = tl.program_id(0), tl.program_id(1)
    cell = (b * tl.num_programs(0) + row).to(tl.int64)
    # Asked for before it is known whether the row is in use.
    g = tl.arange(0, GROUPS)
    tops = tl.load(groups_ptr + cell * G + g, mask=g < G, other=-float("inf"))
    temperature = tl.load(temperature_ptr + b).to(tl.float64)
    top_k, top_p, min_p = rules_of(top_k_ptr, top_p_ptr, min_p_ptr, b, V)
    position = row_position(ids_ptr, lengths_ptr, one_hot_ptr, b, row, K, POSITIONS)
    if (position >= 0) & (temperature != 0):
        threshold = tl.full((), -float("inf"), tl.float32)
        kept_mass = tl.full((), -1.0, tl.float64)
        candidates = tl.full((), -1, tl.int32)
        if (top_k > 0) | (top_p < 1) | (min_p > 0):
            peak, total = row_total(max_ptr, sum_ptr, cell, S, powers_of(temperature), SPLITS)
            keys = order_key(tops)
            # A short top-k needs as many groups as it keeps tokens.
            short = (top_k > 0) & (top_k <= CAP)
            enough = tl.where(short, top_k, CAP - CAP // 8).to(tl.int32)
            most = tl.where(short, tl.minimum(top_k + tl.maximum(top_k // 4, 4), CAP), CAP)
            most = most.to(tl.int32)
            edge, whole = group_edge(keys, peak, temperature, enough, most, CAP, PROBES)
            read = keys >= edge
            slot = tl.cumsum(read.to(tl.int32), axis=0) - 1
            tl.store(list_ptr + cell * CAP + slot, g, mask=read)
            num_read = tl.sum(read.to(tl.int32), axis=0)
            tl.debug_barrier()
            count = tl.full((), 0, tl.int32)
            for start in range(0, num_read * GROUP, READ):
                # Whole groups side by side: 16 bytes of a row at a time.
                place = start // GROUP + tl.arange(0, READ // GROUP)
                group = tl.load(list_ptr + cell * CAP + place, mask=place < num_read, other=G)
                offsets = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
                x = row_logits(
                    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
                    counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, row, position,
                    offsets, V, K,
                )  # fmt: skip
                x = tl.reshape(x, (READ,))
                offsets = tl.reshape(offsets, (READ,))
                found = (order_key(x) >= edge) & (x > -float("inf"))
                at = count + tl.cumsum(found.to(tl.int32), axis=0) - 1
                fits = found & (at < PACKED)
                tl.store(packed_ptr + cell * PACKED + at, x, mask=fits)
                tl.store(packed_ids_ptr + cell * PACKED + at, offsets, mask=fits)
                count += tl.sum(found.to(tl.int32), axis=0)
            tl.debug_barrier()
            packed, kept_weights = packed_ptr + cell * PACKED, weight_ptr + cell * PACKED
            if count <= FEW:
                threshold, kept_mass, decided = decide(
                    packed, kept_weights, count, whole, total, top_k, top_p, min_p, peak,
                    temperature, edge, FEW, TOGETHER,
                )  # fmt: skip
            else:
                threshold, kept_mass, decided = decide(
                    packed, kept_weights, count, whole, total, top_k, top_p, min_p, peak,
                    temperature, edge, PACKED, CHUNK,
                )  # fmt: skip
            candidates = tl.where(decided, count, -1)
        tl.store(threshold_ptr + cell, threshold)
        tl.store(kept_ptr + cell, kept_mass)
        tl.store(found_ptr + cell, candidates)


@triton.jit
def count_from(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, row, position, key, V, K,
    STRIDE: tl.constexpr,
):  # fmt: skip
    """Logits of a row at or above a key; the least key of them, the largest key below."""
    count = tl.zeros((STRIDE,), tl.int32)
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
        count += reached.to(tl.int32)
        least = tl.where(reached, tl.minimum(least, keys), least)
        below = tl.where(reached, below, tl.maximum(below, keys))
    return tl.sum(count, axis=0), tl.min(least, axis=0), tl.max(below, axis=0)


@triton.jit
def mass_from(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, row, position, key, V, K,
    peak, temperature, STRIDE: tl.constexpr,
):  # fmt: skip
    """Weight of a row at or above a key; the least key of that, the largest key below."""
    mass = tl.zeros((STRIDE,), tl.float64)
    least = tl.full((STRIDE,), 2147483647, tl.int32)
    below = tl.full((STRIDE,), -2147483647, tl.int32)
    lowest = lowest_of(peak, temperature, -float("inf"))
    for start in range(0, V, STRIDE):
        x = row_logits(
            target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
            counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, row, position,
            start + tl.arange(0, STRIDE), V, K, start, start + STRIDE,
        )  # fmt: skip
        keys = order_key(x)
        reached = keys >= key
        w = weights(x, peak, lowest, powers_of(temperature))
        mass += tl.where(reached, w, 0.0)
        least = tl.where(reached, tl.minimum(least, keys), least)
        below = tl.where(reached, below, tl.maximum(below, keys))
    return tl.sum(mass, axis=0), tl.min(least, axis=0), tl.max(below, axis=0)


@triton.jit
def search_kernel(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    counts_ptr, counts_b, counts_v, ids_ptr, lengths_ptr, one_hot_ptr, temperature_ptr,
    penalty_ptr, top_k_ptr, top_p_ptr, min_p_ptr, max_ptr, threshold_ptr, kept_ptr, V, K, S,
    POSITIONS: tl.constexpr, SPLITS: tl.constexpr, STRIDE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Threshold and kept mass of one row that cut left undecided.

    `low` is always a key that enough of the row reaches, `high` one that too little does; both
    follow the logits that there are.
    """
    if OVERLAP > 0:
        follow()
    row, b = tl.program_id(0), tl.program_id(1)
    position = row_position(ids_ptr, lengths_ptr, one_hot_ptr, b, row, K, POSITIONS)
    temperature = tl.load(temperature_ptr + b).to(tl.float64)
    if (position >= 0) & (temperature != 0):
        cell = (b * tl.num_programs(0) + row).to(tl.int64)
        kept = tl.load(kept_ptr + cell)
        peak = row_peak(max_ptr, cell, S, SPLITS)
        if (kept != kept) & (tl.abs(peak) < float("inf")):
            top_k, top_p, min_p = rules_of(top_k_ptr, top_p_ptr, min_p_ptr, b, V)
            bottom = tl.full((), -2139095040, tl.int64)
            low = bottom
            top = order_key(peak).to(tl.int64) + 1
            edge = tl.minimum(order_key(tl.load(threshold_ptr + cell)).to(tl.int64), top)
            high = edge
            if top_k > 0:
                while high - low > 1:
                    middle = (low + high) // 2
                    count, least, below = count_from(
                        target_ptr, target_b, target_k, target_v,
                        draft_ptr, draft_b, draft_k, draft_v, counts_ptr, counts_b, counts_v,
                        ids_ptr, penalty_ptr, b, row, position, middle.to(tl.int32), V, K, STRIDE,
                    )  # fmt: skip
                    if count >= top_k:
                        low = least.to(tl.int64)
                    else:
                        high = tl.maximum(below.to(tl.int64), low) + 1
            if top_p < 1:
                bottom = low
                total, least, below = mass_from(
                    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
                    counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, row, position,
                    bottom.to(tl.int32), V, K, peak, temperature, STRIDE,
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
                    mass, least, below = mass_from(
                        target_ptr, target_b, target_k, target_v,
                        draft_ptr, draft_b, draft_k, draft_v, counts_ptr, counts_b, counts_v,
                        ids_ptr, penalty_ptr, b, row, position, middle.to(tl.int32), V, K,
                        peak, temperature, STRIDE,
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
            mass, least, below = mass_from(
                target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
                counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, row, position,
                low.to(tl.int32), V, K, peak, temperature, STRIDE,
            )  # fmt: skip
            tl.store(threshold_ptr + cell, key_value(low.to(tl.int32)))
            tl.store(kept_ptr + cell, mass)


def truncate(call: Call, stats: Statistics, rules: Rules) -> Cut:
    """Both launches."""
    assert stats.sums is not None
    assert stats.groups is not None
    _, rows, batch = call.grid
    device = stats.maxima.device
    group = min(GROUP, call.blocks["BLOCK"])
    groups = stats.groups.shape[-1]
    read = min(GROUPS_READ, triton.next_power_of_2(groups))
    cut = Cut(
        torch.empty(batch, rows, device=device),
        torch.empty(batch, rows, dtype=torch.float64, device=device),
        torch.empty(batch, rows, dtype=torch.int32, device=device),
        torch.empty(batch, rows, CANDIDATES, device=device),
        torch.empty(batch, rows, CANDIDATES, dtype=torch.int32, device=device),
    )
    groups_read = torch.empty(batch, rows, read, dtype=torch.int32, device=device)
    sizes = {name: call.blocks[name] for name in ("POSITIONS", "SPLITS")} | options(device)
    launch(
        cut_kernel, (rows, batch), *call.row_args, *rules.tensors(), stats.maxima, stats.sums,
        stats.groups, groups_read, cut.logits, cut.ids,
        torch.empty_like(cut.logits, dtype=torch.float64), cut.counts, cut.thresholds, cut.masses,
        *call.sizes, groups, GROUP=group, GROUPS=triton.next_power_of_2(groups), CAP=read,
        READ=min(READ, read * group), FEW=min(FEW, CANDIDATES), PACKED=CANDIDATES,
        TOGETHER=min(FEW, CANDIDATES) if AT_ONCE else CHUNK.value, PROBES=PROBES,
        num_warps=CUT_WARPS, maxnreg=CUT_REGISTERS, **sizes,
    )  # fmt: skip
    launch(
        search_kernel, (rows, batch), *call.row_args, *rules.tensors(), stats.maxima,
        cut.thresholds, cut.masses, *call.sizes, STRIDE=min(STRIDE, call.blocks["BLOCK"]),
        num_warps=SEARCH_WARPS, **sizes,
    )  # fmt: skip
    return cut

# mypy: disallow-untyped-defs=False
"""Exact thresholds of top-k, top-p and min-p: one launch between the two of kernels/verify.py.

Each rule keeps the logits z at or above one value t of its row. With w(v) = exp((z_v - max z) / T),

    top-k   t = the largest value with at least k logits at or above it
    top-p   t = the largest value such that w at or above it reaches top_p of what top-k kept
    min-p   t = the least value with w >= min_p

and a row's threshold is the largest of the three, so that ties are kept and -inf never is.

One program has a row. Launch 1 left the maximum of every GROUP tokens; all logits at or above the
GROUPS_READ-th largest of these lie in as many groups (a short top-k needs few more groups than it
keeps tokens; kernels/edges.py). Those are read again, what is at or above that edge is packed
(CANDIDATES at most), and the rules are decided among these few (kernels/candidates.py), from which
launch 2 draws. top-k up to GROUPS_READ is decided so, but where many tie. What is left (a flat law,
a long top-k, many ties) is looked for by bisection (kernels/search.py).

What takes time is a chain of steps for which all threads of a program meet: few threads, few steps.
Nothing is added by atomics: the same logits give the same threshold in any batch.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.candidates import decide, exact_weights, store_pairs, store_where
from kernels.edges import BOTTOM, group_edge
from kernels.launching import launch
from kernels.matrix import INTERPRETED
from kernels.overlap import follow, options
from kernels.plain_stats import row_start, wide
from kernels.rows import (
    Call,
    Rules,
    inverse_of,
    key_value,
    penalise_by,
    row_logits,
    row_position,
    rules_of,
)
from kernels.search import searched
from kernels.stats import GROUP, Statistics, lane
from kernels.weights import LOWEST, powers_of, weights

__all__ = ["Cut", "exact_weights", "truncate"]

GROUPS_READ = 128
CANDIDATES = 512
READ, CUT_WARPS, CUT_REGISTERS = 4096, 4, 255  # tokens of these that are read at a time
COLUMNS = 128  # parts of a row's groups whose maxima tell where to look for the edge
FEW = 128  # candidates that are compared first, one a thread; more take more registers
CHUNK = 32  # candidates that all are compared with at a time
STRIDE = 2048  # tokens of a row that a search looks at together


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
def row_total(maxima, sums, peak, scale):
    """Sum of weights of a row, from the maxima and sums of its splits."""
    factor = weights(maxima, tl.minimum(tl.maximum(peak, LOWEST), -LOWEST), LOWEST, scale)
    return tl.sum(tl.where(sums > 0, sums * factor, 0.0), axis=0)


@triton.jit
def here(x):
    """A float32 that the compiler does not know: what follows from it is not worked out earlier."""
    if INTERPRETED:
        return x
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=False, pack=1
    )


@triton.jit
def as_they_are(bits):
    """int32 of which the compiler knows nothing, so that it does not turn bits into predicates."""
    if INTERPRETED:
        return bits
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [bits], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def stored_logits(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v, ids_ptr,
    b, row, position, offsets, V, K,
):  # fmt: skip
    """A row's logits as stored where models agree on a type, else in float32."""
    if draft_ptr is not None and draft_ptr.dtype != target_ptr.dtype:
        return row_logits(
            target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
            None, 0, 0, ids_ptr, None, b, row, position, offsets, V, K,
        )  # fmt: skip
    else:
        start, stride = row_start(
            target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
            b, row, position, K,
        )  # fmt: skip
        at = start + offsets.to(tl.int64) * stride
        return tl.load(at, mask=offsets < V, other=-float("inf"))


@triton.jit
def drafts_of(group, ids_ptr, b, position, K, GROUP: tl.constexpr, LANE: tl.constexpr):
    """Which tokens [groups, GROUP] of groups are drafts before a position.

    A bit a token, since a draft is then one comparison for LANE of them.
    """
    lanes = group[:, None] * GROUP + tl.arange(0, GROUP // LANE)[None, :] * LANE
    bits = tl.zeros_like(lanes)
    for j in range(0, position):
        place = tl.load(ids_ptr + b * K + j).to(tl.int32) - lanes
        bit = tl.full((), 1, tl.int32) << (place & (LANE - 1))
        bits = bits | tl.where((place >= 0) & (place < LANE), bit, 0)
    bits = as_they_are(bits)
    bits = (bits[:, :, None] >> tl.arange(0, LANE)[None, None, :]) & 1
    return tl.reshape(bits, (group.shape[0], GROUP)) != 0


@triton.jit
def cut_kernel(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    counts_ptr, counts_b, counts_v, ids_ptr, lengths_ptr, one_hot_ptr, temperature_ptr,
    penalty_ptr, top_k_ptr, top_p_ptr, min_p_ptr, max_ptr, sum_ptr, groups_ptr, list_ptr,
    pairs_ptr, packed_ptr, packed_ids_ptr, weight_ptr, found_ptr, threshold_ptr, kept_ptr,
    V, K, S,
    G: tl.constexpr, POSITIONS: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr, CAP: tl.constexpr, READ: tl.constexpr,
    LANE: tl.constexpr, FEW: tl.constexpr, PACKED: tl.constexpr, CHUNK: tl.constexpr,
    STRIDE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Threshold and kept mass of one row, from the groups of tokens that hold its largest."""
    if OVERLAP > 0:
        follow(OVERLAP)
    row, b = tl.program_id(0), tl.program_id(1)
    cell = (b * tl.num_programs(0) + row).to(tl.int64)
    # Asked for before it is known whether the row is in use.
    g = tl.arange(0, GROUPS)
    live = g < G  # no work for groups that the compiler knows not to exist
    tops = tl.load(groups_ptr + cell * G + g, mask=live, other=-float("inf"))
    s = tl.arange(0, SPLITS)
    maxima = tl.load(max_ptr + cell * S + s, mask=s < S, other=-float("inf"))
    sums = tl.load(sum_ptr + cell * S + s, mask=s < S, other=0.0)
    temperature = tl.load(temperature_ptr + b).to(tl.float64)
    top_k, top_p, min_p = rules_of(top_k_ptr, top_p_ptr, min_p_ptr, b, V)
    penalty = tl.full((), 1.0, tl.float32)
    if penalty_ptr is not None:
        penalty = tl.load(penalty_ptr + b).to(tl.float32)
    tl.debug_barrier()  # the compiler looks at nothing before all this is asked for
    peak = tl.max(maxima, axis=0)
    position = row_position(ids_ptr, lengths_ptr, one_hot_ptr, b, row, K, POSITIONS)
    if (position >= 0) & (temperature != 0):
        threshold = tl.full((), -float("inf"), tl.float32)
        kept_mass = tl.full((), -1.0, tl.float64)
        candidates = tl.full((), -1, tl.int32)
        if (top_k > 0) | (top_p < 1) | (min_p > 0):
            # A short top-k needs as many groups as it keeps tokens; more that are read at a time
            # take no longer.
            short = (top_k > 0) & (top_k <= CAP)
            enough = tl.where(short, top_k, CAP - CAP // 8).to(tl.int32)
            most = top_k + tl.maximum(top_k // 4, 4)
            most = tl.cdiv(most, READ // GROUP) * (READ // GROUP)
            most = tl.where(short, tl.minimum(most, CAP), CAP).to(tl.int32)
            edge, num_read = group_edge(
                tops, live, peak, enough, most, CAP, GROUPS, COLUMNS
            )  # fmt: skip
            whole = edge == BOTTOM
            value = key_value(edge)
            read = live & (tops >= value)
            slot = tl.cumsum(read.to(tl.int32), axis=0) - 1
            store_where(list_ptr + cell * CAP + slot, g, read)
            tl.debug_barrier()
            count = tl.full((), 0, tl.int32)
            for start in range(0, num_read * GROUP, READ):
                # Whole groups side by side: 16 bytes of a row at a time.
                place = start // GROUP + tl.arange(0, READ // GROUP)
                group = tl.load(list_ptr + cell * CAP + place, mask=place < num_read, other=G)
                offsets = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
                x = stored_logits(
                    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
                    ids_ptr, b, row, position, offsets, V, K,
                )  # fmt: skip
                if penalty_ptr is not None:
                    asked = offsets < tl.where(penalty != 1.0, V, 0)
                    if counts_ptr is not None:
                        at = b.to(tl.int64) * counts_b + offsets.to(tl.int64) * counts_v
                        times = tl.load(counts_ptr + at, mask=asked, other=0)
                    # While these are under way.
                    inverse = here(inverse_of(here(penalty)))
                    before = tl.where(penalty != 1.0, position, 0)
                    drafts = drafts_of(group, ids_ptr, b, before, K, GROUP, LANE)
                    x = wide(x)
                    if counts_ptr is not None:
                        drafts = drafts | (times > 0)
                    x = penalise_by(x, drafts, penalty, inverse)
                else:
                    x = wide(x)
                if start > 0:
                    count = tl.load(found_ptr + cell)
                    tl.debug_barrier()  # all have it before it changes
                x = tl.reshape(x, (READ,))
                offsets = tl.reshape(offsets, (READ,))
                found = x >= value
                after = count + tl.cumsum(found.to(tl.int32), axis=0)
                slots = pairs_ptr + cell * PACKED + after - 1
                store_pairs(slots, x, offsets, value, after, tl.full((), PACKED, tl.int32))
                # How many there are by now, from whoever has the last of them.
                lanes = tl.max(tl.reshape(after, (READ // LANE, LANE)), axis=1)
                last = tl.arange(0, READ // LANE) == READ // LANE - 1
                store_where(found_ptr + cell + tl.zeros_like(lanes), lanes, last)
                tl.debug_barrier()
            pairs = tl.load(pairs_ptr + cell * PACKED + tl.arange(0, FEW))
            if num_read > 0:
                count = tl.load(found_ptr + cell)
            total = row_total(maxima, sums, peak, powers_of(temperature))  # meanwhile
            packed, kept_weights = packed_ptr + cell * PACKED, weight_ptr + cell * PACKED
            packed_ids = packed_ids_ptr + cell * PACKED
            if count <= FEW:
                threshold, kept_mass, decided = decide(
                    pairs, packed, packed_ids, kept_weights, count, whole, total,
                    top_k, top_p, min_p, peak, temperature, edge, FEW, CHUNK,
                )  # fmt: skip
            else:
                all_pairs = tl.load(pairs_ptr + cell * PACKED + tl.arange(0, PACKED))
                threshold, kept_mass, decided = decide(
                    all_pairs, packed, packed_ids, kept_weights, count, whole, total,
                    top_k, top_p, min_p, peak, temperature, edge, PACKED, CHUNK,
                )  # fmt: skip
            candidates = tl.where(decided, count, -1)
            if (decided == 0) & (tl.abs(peak) < float("inf")):
                threshold, kept_mass = searched(
                    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
                    counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, row, position, V, K,
                    peak, temperature, top_k, top_p, min_p, threshold, STRIDE,
                )  # fmt: skip
        tl.store(threshold_ptr + cell, threshold)
        tl.store(kept_ptr + cell, kept_mass)
        tl.store(found_ptr + cell, candidates)


def truncate(call: Call, stats: Statistics, rules: Rules) -> Cut:
    """The launch."""
    assert stats.sums is not None
    assert stats.groups is not None
    _, rows, batch = call.grid
    device = stats.maxima.device
    group = min(GROUP, call.blocks["BLOCK"])
    groups = stats.groups.shape[-1]
    padded = triton.next_power_of_2(groups)
    read = min(GROUPS_READ, padded)
    few = min(FEW, CANDIDATES)
    cut = Cut(
        torch.empty(batch, rows, device=device),
        torch.empty(batch, rows, dtype=torch.float64, device=device),
        torch.empty(batch, rows, dtype=torch.int32, device=device),
        torch.empty(batch, rows, CANDIDATES, device=device),
        torch.empty(batch, rows, CANDIDATES, dtype=torch.int32, device=device),
    )
    groups_read = torch.empty(batch, rows, read, dtype=torch.int32, device=device)
    # Only what one program tells its own threads.
    pairs = torch.empty_like(cut.logits, dtype=torch.int64)
    candidate_weights = torch.empty_like(cut.logits, dtype=torch.float64)
    launch(
        cut_kernel, (rows, batch), *call.row_args, *rules.tensors(), stats.maxima, stats.sums,
        stats.groups, groups_read, pairs, cut.logits, cut.ids, candidate_weights, cut.counts,
        cut.thresholds, cut.masses, *call.sizes,
        G=groups, POSITIONS=call.blocks["POSITIONS"], SPLITS=call.blocks["SPLITS"], GROUP=group,
        GROUPS=padded, COLUMNS=min(COLUMNS, padded), CAP=read, READ=min(READ, read * group),
        LANE=min(lane(call), group), FEW=few, PACKED=CANDIDATES, CHUNK=min(CHUNK, few),
        STRIDE=min(STRIDE, call.blocks["BLOCK"]), num_warps=CUT_WARPS, maxnreg=CUT_REGISTERS,
        **options(device),
    )  # fmt: skip
    return cut

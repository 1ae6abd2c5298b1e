# mypy: disallow-untyped-defs=False
"""Launch 1 of kernels/verify.py: what each split of each row in use amounts to."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launching import launch
from kernels.overlap import follow, options
from kernels.plain_stats import FLOOR, LN_2, TOP, exact_sum, plain_split
from kernels.rows import Call, Rules, logit_at, row_logits, row_position, rules_of
from kernels.sizes import sizes
from kernels.weights import LOG2_E, LOWEST, powers_of

GROUP = 64  # tokens whose maximum truncation looks at
RULE_WARPS = 8  # of a split, where penalties and groups take registers
WIDE_REGISTERS = 96  # of a thread, where logits take one each
CHUNK = 1024  # tokens at a time where sums are exact
EAGER_ROWS = 2  # batches where waiting for a length costs more than reading in vain
NEAR = tl.constexpr(-200.0)  # powers of two below which a sum adds nothing to another


@dataclass(frozen=True, slots=True)
class Statistics:
    """What launch 1 leaves for the others."""

    maxima: Tensor  # [B, rows, S] float32
    best: Tensor  # [B, rows, S] int32, of greedy rows
    sums: Tensor | None  # [B, rows, S] float64; None: the host knows that all rows are greedy
    drafted: Tensor  # [B, rows] float32, the logit of each row's draft
    groups: Tensor | None  # [B, rows, S * BLOCK / GROUP] float32 maxima; None: nothing is truncated
    arrived: Tensor  # [B] int32 zeros, programs of launch 2 that are done


def row_statistics(call: Call, device: torch.device, rules: Rules) -> Statistics:
    """Launch 1."""
    splits, rows, batch = call.grid
    block = call.blocks["BLOCK"]
    group = min(GROUP, block)
    maxima = torch.empty(batch, rows, splits, device=device)
    sums = groups = None
    if not call.greedy:
        sums = torch.empty_like(maxima, dtype=torch.float64)
        if rules.any():
            groups = torch.empty(batch, rows, splits * (block // group), device=device)
    found = Statistics(
        maxima,
        torch.empty_like(maxima, dtype=torch.int32),
        sums,
        torch.empty(batch, rows, device=device),
        groups,
        torch.empty(batch, dtype=torch.int32, device=device),
    )
    lengths, one_hot = call.row_args[12:14]
    chosen = sizes(batch)
    blocks = dict(call.blocks)
    parts = parts_of(call) if groups is None else 0
    # Those that are not kept in pairs take twice the registers.
    pairs = parts > 0 and call.row_args[0].element_size() == 2
    blocks["maxnreg"] = chosen.registers if pairs else max(chosen.registers, WIDE_REGISTERS)
    if groups is not None or call.row_args[15] is not None:
        warps = max(1, min(RULE_WARPS, block // 256))
        blocks |= {"num_warps": warps, "maxnreg": chosen.rule_registers}
    eager = batch <= EAGER_ROWS or (lengths is None and one_hot is None)
    launch(
        stats_kernel, call.grid, *call.row_args, rules.top_k, rules.top_p, maxima, found.best, sums,
        found.drafted, groups, found.arrived, *call.sizes,
        GROUP=group, LANE=min(lane(call), group), CHUNK=min(CHUNK, block), EAGER=eager,
        PARTS=parts,
        **blocks, **options(device),
    )  # fmt: skip
    return found


def lane(call: Call) -> int:
    """Tokens that a thread reads at once: 16 bytes."""
    return 16 // call.row_args[0].element_size()


def parts_of(call: Call) -> int:
    """Loads of 16 bytes that a thread makes of a split at once; 0: logits are not used as stored.

    Both models' logits are read by the same code, and so must be of one type.
    """
    target, draft, penalty = call.row_args[0], call.row_args[4], call.row_args[15]
    if penalty is not None or (draft is not None and draft.dtype != target.dtype):
        return 0
    return max(1, call.blocks["BLOCK"] // (32 * call.blocks["num_warps"] * lane(call)))


@triton.jit
def single_sum(x, peak, temperature):
    """Sum of weights in float32: one exponential a logit. Relative error some 1e-7."""
    scale = LOG2_E / temperature
    high = scale.to(tl.float32)
    low = (scale - high.to(tl.float64)).to(tl.float32)
    low = tl.where(tl.abs(high) < 1e6, low, 0.0)
    behind = x - tl.where(peak == -float("inf"), 0.0, peak)
    w = tl.exp2(behind * high + behind * low)
    # NaN and +inf stay in the sum, and so tell on themselves.
    return tl.sum(tl.where(x == -float("inf"), 0.0, w), axis=0).to(tl.float64)


@triton.jit
def lane_sums(x, scale):
    """Of tokens [N, LANE]: each row's maximum, its power of two, and its sum of weights by that.

    Few instructions a token, since these bound the launch: one fused product, one power, one sum.
    The product of a row's maximum is rounded, but what is rounded is what its weights refer to.
    """
    high = scale.to(tl.float32)
    tops = tl.max(x, axis=1)
    powers = tl.maximum(tops * high, FLOOR)
    sums = tl.sum(tl.exp2(tl.fma(x, high, -powers[:, None])), axis=1)
    # Where there is NaN or +inf, the sum is NaN. To ask for that here also keeps the compiler from
    # looking for the maximum of all first, while every logit takes a register.
    return tl.where(sums >= 0, tops, float("inf")), powers, sums


@triton.jit
def sum_of_lanes(tops, powers, sums, peak, scale):
    """Sum of weights by the largest of all, relative error some 1e-7; may it be used?"""
    high = scale.to(tl.float32)
    low = (scale - high.to(tl.float64)).to(tl.float32)
    fine = tl.abs(peak * high) <= TOP
    top = tl.maximum(peak * high, FLOOR)
    behind = powers - top
    # What float32 lacks of the scale matters between rows only: within one, logits are close.
    gap = tl.maximum(tops, LOWEST) - tl.maximum(peak, LOWEST)
    behind = tl.where(behind > NEAR, behind + gap * low, behind)
    total = tl.sum(sums * tl.exp2(behind), axis=0).to(tl.float64)
    by_high = top.to(tl.float64) - peak.to(tl.float64) * high.to(tl.float64)
    off = tl.where(fine, by_high * LN_2, 0.0)
    return total * (1.0 + off * (1.0 + 0.5 * off)), fine


@triton.jit
def stats_kernel(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    counts_ptr, counts_b, counts_v, ids_ptr, lengths_ptr, one_hot_ptr, temperature_ptr, penalty_ptr,
    top_k_ptr, top_p_ptr, max_ptr, best_ptr, sum_ptr, drafted_ptr, groups_ptr, arrived_ptr,
    V, K, S,
    POSITIONS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    LANE: tl.constexpr, CHUNK: tl.constexpr, EAGER: tl.constexpr, PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Maximum and sum of weights of one (split, row); greedy rows: maximum and its lowest id.

    EAGER programs ask for their logits before they know whether the row is in use: an unused row is
    read in vain, and one in use without waiting.

    A split that holds NaN or +inf has a maximum of +inf. Split 0 of a row also notes the logit of
    its draft. Rows that truncation will cut note the maximum of every GROUP tokens, and their sums
    are exact where top-p needs them.
    """
    if OVERLAP > 0:
        follow()
    split, row, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if (split == 0) & (row == 0):
        tl.store(arrived_ptr + b, 0)
    offsets = split * BLOCK + tl.arange(0, BLOCK)
    cell = (b * tl.num_programs(1) + row).to(tl.int64)
    at = cell * S + split
    if PARTS > 0:
        plain_split(
            target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
            ids_ptr, lengths_ptr, one_hot_ptr, temperature_ptr, max_ptr, best_ptr, sum_ptr,
            drafted_ptr, b, row, split, cell, at, V, K, POSITIONS, BLOCK, LANE, CHUNK, PARTS, EAGER,
        )  # fmt: skip
        return
    if EAGER:
        x = row_logits(
            target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
            counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, row,
            tl.where(row <= K, row, row - K - 1), offsets, V, K,
            split * BLOCK, split * BLOCK + BLOCK,
        )  # fmt: skip
    temperature = tl.load(temperature_ptr + b).to(tl.float64)
    top_k, top_p, _ = rules_of(top_k_ptr, top_p_ptr, None, b, V)
    position = row_position(ids_ptr, lengths_ptr, one_hot_ptr, b, row, K, POSITIONS)
    if position >= 0:
        if not EAGER:
            x = row_logits(
                target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
                counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, row, position, offsets,
                V, K, split * BLOCK, split * BLOCK + BLOCK,
            )  # fmt: skip
        if split == 0:
            token = tl.load(ids_ptr + b * K + position, mask=position < K, other=-1)
            own = logit_at(
                target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
                counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, row, position, token, V, K,
            )  # fmt: skip
            tl.store(drafted_ptr + cell, own)
        if sum_ptr is None or temperature == 0:
            if sum_ptr is not None:
                # Again, from the cache: sampled rows would hold every logit in a register else.
                x = row_logits(
                    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
                    counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, row, position,
                    offsets, V, K, split * BLOCK, split * BLOCK + BLOCK,
                )  # fmt: skip
            peak = tl.max(tl.where(x == x, x, float("inf")), axis=0)
            tl.store(max_ptr + at, peak)
            tl.store(best_ptr + at, tl.min(tl.where(x == peak, offsets, V), axis=0))
        else:
            scale = powers_of(temperature)
            tops, powers, sums = lane_sums(tl.reshape(x, (BLOCK // LANE, LANE)), scale)
            peak = tl.max(tops, axis=0)
            total, fine = sum_of_lanes(tops, powers, sums, peak, scale)
            exact = (fine == 0) & (peak > -float("inf"))
            if groups_ptr is not None:
                group = tl.max(tl.reshape(tops, (BLOCK // GROUP, GROUP // LANE)), axis=1)
                number = split * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
                tl.store(groups_ptr + cell * S * (BLOCK // GROUP) + number, group)
                exact = exact | ((top_p < 1) & (top_k == 0))
            if exact:
                total = exact_sum(
                    target_ptr, target_b, target_k, target_v,
                    draft_ptr, draft_b, draft_k, draft_v, counts_ptr, counts_b, counts_v,
                    ids_ptr, penalty_ptr, b, row, position, split * BLOCK, V, K,
                    peak, temperature, BLOCK, CHUNK,
                )  # fmt: skip
            bad = (total != total) | (peak == float("inf"))
            tl.store(max_ptr + at, tl.where(bad, float("inf"), peak))
            tl.store(sum_ptr + at, total)

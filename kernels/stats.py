# mypy: disallow-untyped-defs=False
"""Launch 1 of kernels/verify.py: what each split of each row in use amounts to."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launching import launch
from kernels.overlap import follow, options
from kernels.plain_stats import plain_split
from kernels.rows import Call, Rules
from kernels.rule_stats import rule_split
from kernels.single_row import single_row
from kernels.sizes import sizes
from kernels.weights import LOG2_E

GROUP = 64  # tokens whose maximum truncation looks at
RULE_WARPS = 8  # of a split, where penalties and groups take registers
WIDE_REGISTERS = 96  # of a thread, where logits take one each
CHUNK = 1024  # tokens at a time where sums are exact
EAGER_ROWS = 2  # batches where waiting for a length costs more than reading in vain


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
    plain = groups is None and stored_alike(call)
    if plain:  # logits of 32 bits are not kept in pairs
        warps, side_by_side = call.blocks["num_warps"], rows
        pairs = call.row_args[0].element_size() == 2
        registers = chosen.registers if pairs else max(chosen.registers, WIDE_REGISTERS)
    else:
        warps, registers = max(1, min(RULE_WARPS, block // 256)), chosen.rule_registers
        side_by_side = rows if batch <= EAGER_ROWS else min(rows, chosen.rule_rows)
    blocks = dict(call.blocks) | {"num_warps": warps, "maxnreg": registers}
    parts = max(1, block // (32 * warps * lane(call)))
    eager = batch <= EAGER_ROWS or (lengths is None and one_hot is None)
    launch(
        stats_kernel, (splits, side_by_side, batch), *call.row_args, rules.top_k, rules.top_p,
        maxima, found.best, sums, found.drafted, groups, found.arrived, *call.sizes,
        GROUP=group, LANE=min(lane(call), group), CHUNK=min(CHUNK, block), EAGER=eager, PARTS=parts,
        PLAIN=plain, ALONE=batch <= EAGER_ROWS, **blocks, **options(device),
    )  # fmt: skip
    return found


def lane(call: Call) -> int:
    """Tokens that a thread reads at once: 16 bytes."""
    return 16 // call.row_args[0].element_size()


def stored_alike(call: Call) -> bool:
    """Are all logits of one type, and used as they are stored?"""
    target, draft, penalty = call.row_args[0], call.row_args[4], call.row_args[15]
    return penalty is None and (draft is None or draft.dtype == target.dtype)


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
def stats_kernel(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    counts_ptr, counts_b, counts_v, ids_ptr, lengths_ptr, one_hot_ptr, temperature_ptr, penalty_ptr,
    top_k_ptr, top_p_ptr, max_ptr, best_ptr, sum_ptr, drafted_ptr, groups_ptr, arrived_ptr,
    V, K, S,
    POSITIONS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    LANE: tl.constexpr, CHUNK: tl.constexpr, EAGER: tl.constexpr, PARTS: tl.constexpr,
    PLAIN: tl.constexpr, ALONE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Maximum and sum of weights of one (split, row); greedy rows: maximum and its lowest id.

    EAGER programs ask for their logits before they know whether the row is in use: an unused row is
    read in vain, and one in use without waiting.

    A split that holds NaN or +inf has a maximum of +inf. Split 0 of a row also notes the logit of
    its draft. Rows that truncation will cut note the maximum of every GROUP tokens, and their sums
    are exact where top-p needs them.
    """
    if OVERLAP > 0:
        follow(OVERLAP)
    split, row, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if (split == 0) & (row == 0):
        tl.store(arrived_ptr + b, 0)
    rows = K + 1 if draft_ptr is None else 2 * K + 1
    if PLAIN:
        cell = (b * rows + row).to(tl.int64)
        at = cell * S + split
        plain_split(
            target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
            ids_ptr, lengths_ptr, one_hot_ptr, temperature_ptr, max_ptr, best_ptr, sum_ptr,
            drafted_ptr, b, row, split, cell, at, V, K, POSITIONS, BLOCK, LANE, CHUNK, PARTS, EAGER,
        )  # fmt: skip
    elif ALONE:
        single_row(
            target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
            counts_ptr, counts_b, counts_v, ids_ptr, lengths_ptr, one_hot_ptr, temperature_ptr,
            penalty_ptr, top_k_ptr, top_p_ptr, max_ptr, best_ptr, sum_ptr, drafted_ptr, groups_ptr,
            b, row, rows, split, V, K, S, POSITIONS, BLOCK, GROUP, LANE, CHUNK, PARTS,
        )  # fmt: skip
    else:
        rule_split(
            target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
            counts_ptr, counts_b, counts_v, ids_ptr, lengths_ptr, one_hot_ptr, temperature_ptr,
            penalty_ptr, top_k_ptr, top_p_ptr, max_ptr, best_ptr, sum_ptr, drafted_ptr, groups_ptr,
            b, row, rows, tl.num_programs(1), split, V, K, S,
            POSITIONS, BLOCK, GROUP, LANE, CHUNK, PARTS, EAGER,
        )  # fmt: skip

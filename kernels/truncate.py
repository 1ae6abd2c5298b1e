# mypy: disallow-untyped-defs=False
# ruff: noqa: SIM102 (what the compiler decides stays apart from what the device decides)
"""Exact thresholds of top-k, top-p and min-p, split over the vocabulary.

Each rule keeps the logits z at or above one value t of its row. Float32 values are mapped to
integers of the same order (order_key), and t is found digit by digit, four bits at a time. With
W(t) = sum of w(v) over {v: key(z_v) >= t},

    top-k   t = max{t: W(t) >= k}               w(v) = 1
    top-p   t = max{t: W(t) >= top_p * W(0)}    w(v) = exp((z_v - max z) / T) where top-k kept v
    min-p   t = min{t: exp((t - max z) / T) >= min_p}, by bisection on the key, no logit read

One pass: every (row, split) sums w into the 16 values of the next digit, among the keys that begin
with the digits found so far; the next pass begins by adding up the splits in order and choosing the
digit. No atomics, so that the same logits give the same threshold in any batch. A logit of 16 bits
has a key whose low 16 bits say nothing (float16: 12): bfloat16 needs 4 passes, float16 5, float32
or a penalty 8. Launches: passes + 1 for top-k, passes + 1 for top-p, 1 for min-p and 1 for the
kept mass.
Rows that ask for no rule leave each kernel at once.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.rows import Call, key_value, order_key, row_logits, row_peak, row_position, weight

BINS = 16
# Passes of four bits that tell two logits of a type apart.
PASSES = {torch.bfloat16: 4, torch.float16: 5, torch.float32: 8}


@dataclass(frozen=True, slots=True)
class Rules:
    """Truncation rules of one call, on the device; None where the host knows that no row asks."""

    top_k: Tensor | None  # [B]
    top_p: Tensor | None  # [B]
    min_p: Tensor | None  # [B]

    def tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.top_k, self.top_p, self.min_p

    def any(self) -> bool:
        return any(rule is not None for rule in self.tensors())


@triton.jit
def asks(top_k_ptr, top_p_ptr, temperature_ptr, b, V, COUNT: tl.constexpr):
    """True where row b wants top-k (COUNT) or top-p."""
    wanted = tl.load(temperature_ptr + b) != 0
    if COUNT:
        top_k = tl.load(top_k_ptr + b)
        wanted = wanted & (top_k > 0) & (top_k < V)
    else:
        wanted = wanted & (tl.load(top_p_ptr + b) < 1)
    return wanted


@triton.jit
def choose_digit(
    sums_ptr, prefix_ptr, missing_ptr, top_k_ptr, top_p_ptr, b, cell, step, cells, S,
    COUNT: tl.constexpr, SPLITS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Digits found before pass `step`, and the mass still missing at and below them."""
    prefix = tl.zeros((), tl.int64)
    if COUNT:
        missing = tl.load(top_k_ptr + b).to(tl.float64)
    else:
        missing = tl.load(top_p_ptr + b).to(tl.float64)
    if step > 0:
        bins, s = tl.arange(0, BINS), tl.arange(0, SPLITS)
        at = ((step - 1) % 2 * cells + cell).to(tl.int64) * S
        where = (at + s)[:, None] * BINS + bins[None, :]
        mass = tl.sum(tl.load(sums_ptr + where, mask=(s < S)[:, None], other=0.0), axis=0)
        if step > 1:
            prefix = tl.load(prefix_ptr + (step - 1) * cells + cell)
            missing = tl.load(missing_ptr + (step - 1) * cells + cell)
        elif not COUNT:
            missing = missing * tl.sum(mass, axis=0)
        above = tl.sum(mass, axis=0) - tl.cumsum(mass, axis=0)
        reached = (mass > 0) & (above + mass >= missing)
        # Rounding may leave the mass short of itself: then the lowest digit that occurs.
        lowest = tl.min(tl.where(mass > 0, bins, BINS), axis=0)
        digit = tl.maximum(tl.max(tl.where(reached, bins, -1), axis=0), lowest)
        missing -= tl.sum(tl.where(bins > digit, mass, 0.0), axis=0)
        prefix = prefix * BINS + digit
    return prefix, missing


@triton.jit(do_not_specialize=["step"])
def digit_kernel(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    counts_ptr, counts_b, counts_v, ids_ptr, lengths_ptr, one_hot_ptr, temperature_ptr,
    penalty_ptr, top_k_ptr, top_p_ptr, max_ptr, sums_ptr, prefix_ptr, missing_ptr, threshold_ptr,
    step, V, K, S,
    COUNT: tl.constexpr, POSITIONS: tl.constexpr, SPLITS: tl.constexpr, BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Masses [BINS] of the next digit for one (split, row): pass `step` of a radix select."""
    split, row, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = row_position(ids_ptr, lengths_ptr, one_hot_ptr, b, row, K, POSITIONS)
    wanted = asks(top_k_ptr, top_p_ptr, temperature_ptr, b, V, COUNT)
    if (position >= 0) & wanted:
        rows = tl.num_programs(1)
        cell, cells = b * rows + row, tl.num_programs(2) * rows
        prefix, missing = choose_digit(
            sums_ptr, prefix_ptr, missing_ptr, top_k_ptr, top_p_ptr, b, cell, step, cells, S,
            COUNT, SPLITS, BINS,
        )  # fmt: skip
        if split == 0:
            tl.store(prefix_ptr + step * cells + cell, prefix)
            tl.store(missing_ptr + step * cells + cell, missing)
        offsets = split * BLOCK + tl.arange(0, BLOCK)
        x = row_logits(
            target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
            counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, row, position, offsets, V, K,
        )  # fmt: skip
        key = order_key(x)
        shift = (28 - 4 * step).to(tl.int64)
        matches = (offsets < V) & ((key >> (shift + 4)) == prefix)
        bins = tl.arange(0, BINS)
        mass = tl.zeros((BINS,), tl.float64)
        if tl.max(matches.to(tl.int32), axis=0) > 0:
            if COUNT:
                w = tl.where(matches, 1.0, 0.0).to(tl.float64)
            else:
                kept = matches & (key >= tl.load(threshold_ptr + cell))
                temperature = tl.load(temperature_ptr + b).to(tl.float64)
                peak = row_peak(max_ptr, cell, S, SPLITS)
                w = tl.where(kept, weight(x, peak, temperature), 0.0)
            digit = (key >> shift) & (BINS - 1)
            for d in range(0, BINS):
                in_bin = tl.sum(tl.where(digit == d, w, 0.0), axis=0)
                mass = tl.where(bins == d, in_bin, mass)
        slot = (step % 2 * cells + cell).to(tl.int64) * S + split
        tl.store(sums_ptr + slot * BINS + bins, mass)


@triton.jit(do_not_specialize=["passes"])
def threshold_kernel(
    ids_ptr, lengths_ptr, one_hot_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    max_ptr, sums_ptr, prefix_ptr, missing_ptr, threshold_ptr, passes, V, K, S,
    COUNT: tl.constexpr, SELECT: tl.constexpr, POSITIONS: tl.constexpr, SPLITS: tl.constexpr,
    BINS: tl.constexpr,
):  # fmt: skip
    """Key below which one row keeps nothing: what the passes found, and min-p where it is given."""
    row, b = tl.program_id(0), tl.program_id(1)
    position = row_position(ids_ptr, lengths_ptr, one_hot_ptr, b, row, K, POSITIONS)
    temperature = tl.load(temperature_ptr + b).to(tl.float64)
    if (position >= 0) & (temperature != 0):
        rows = tl.num_programs(0)
        cell, cells = b * rows + row, tl.num_programs(1) * rows
        threshold = tl.load(threshold_ptr + cell)
        if SELECT:
            if asks(top_k_ptr, top_p_ptr, temperature_ptr, b, V, COUNT):
                prefix, _ = choose_digit(
                    sums_ptr, prefix_ptr, missing_ptr, top_k_ptr, top_p_ptr, b, cell, passes, cells,
                    S, COUNT, SPLITS, BINS,
                )  # fmt: skip
                found = prefix << (32 - 4 * passes).to(tl.int64)
                threshold = tl.maximum(threshold, found)
        if min_p_ptr is not None:
            min_p = tl.load(min_p_ptr + b).to(tl.float64)
            if min_p > 0:
                peak = row_peak(max_ptr, cell, S, SPLITS)
                low = tl.full((), 8388607, tl.int64)  # the key of -inf, never kept
                high = order_key(peak)  # always kept
                for _ in range(0, 32):
                    middle = (low + high) // 2
                    kept = weight(key_value(middle), peak, temperature) >= min_p
                    high = tl.where(kept, middle, high)
                    low = tl.where(kept, low, middle)
                threshold = tl.maximum(threshold, high)
        tl.store(threshold_ptr + cell, threshold)


@triton.jit
def kept_kernel(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    counts_ptr, counts_b, counts_v, ids_ptr, lengths_ptr, one_hot_ptr, temperature_ptr,
    penalty_ptr, max_ptr, sum_ptr, threshold_ptr, V, K, S,
    POSITIONS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace a split's sum of exp((z - its max) / T) by that of what the threshold keeps."""
    split, row, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = row_position(ids_ptr, lengths_ptr, one_hot_ptr, b, row, K, POSITIONS)
    cell = b * tl.num_programs(1) + row
    threshold = tl.load(threshold_ptr + cell)
    if (position >= 0) & (threshold > 0):
        offsets = split * BLOCK + tl.arange(0, BLOCK)
        x = row_logits(
            target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
            counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, row, position, offsets, V, K,
        )  # fmt: skip
        at = cell.to(tl.int64) * S + split
        peak = tl.load(max_ptr + at)
        temperature = tl.load(temperature_ptr + b).to(tl.float64)
        kept = (order_key(x) >= threshold) & (x > -float("inf"))
        w = tl.where(kept, weight(tl.where(kept, x, peak), peak, temperature), 0.0)
        tl.store(sum_ptr + at, tl.sum(w, axis=0).to(tl.float32))


def truncate(call: Call, maxima: Tensor, sums: Tensor, rules: Rules) -> Tensor:
    """Keys [B, rows] below which a row keeps nothing; `sums` become those of what is kept."""
    splits, rows, batch = call.grid
    device = maxima.device
    threshold = torch.zeros(batch, rows, dtype=torch.int64, device=device)
    bins = torch.empty(2, batch * rows, splits, BINS, dtype=torch.float64, device=device)
    prefix = torch.empty(call.passes, batch * rows, dtype=torch.int64, device=device)
    missing = torch.empty_like(prefix, dtype=torch.float64)
    state = (maxima, bins, prefix, missing, threshold)
    sizes = {name: call.blocks[name] for name in ("POSITIONS", "SPLITS")}

    def finish(min_p: Tensor | None, *, count: bool, select: bool) -> None:
        threshold_kernel[(rows, batch)](
            *call.row_args[11:15], rules.top_k, rules.top_p, min_p, *state, call.passes,
            *call.sizes, COUNT=count, SELECT=select, BINS=BINS, **sizes,
        )  # fmt: skip

    for count, rule in ((True, rules.top_k), (False, rules.top_p)):
        if rule is None:
            continue
        for step in range(call.passes):
            digit_kernel[call.grid](
                *call.row_args, rules.top_k, rules.top_p, *state, step, *call.sizes,
                COUNT=count, BINS=BINS, **call.blocks,
            )  # fmt: skip
        finish(None, count=count, select=True)
    if rules.min_p is not None:
        finish(rules.min_p, count=False, select=False)
    kept_kernel[call.grid](*call.row_args, maxima, sums, threshold, *call.sizes, **call.blocks)
    return threshold

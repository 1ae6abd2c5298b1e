# mypy: disallow-untyped-defs=False
r"""Verification under Gumbel coupling in Triton: two launches, more where rows are truncated.

The contract is that of kernels/coupled_reference.py, the noise that of kernels/race.py, drawn where
it is used: nothing of [B, K, V] is read twice or written. With z the penalised logits of a row at
place t, as far as truncation keeps them,

  1. race    per (row, split): max over v of z(v) / T - ln e(t, v), its lowest id, and what the
             log-probability needs: z there, max z and sum exp((z - max z) / T)
  2. finish  per sequence: the best of all splits at every position; drafts are kept while they are
             it

Scores are those of float64. float32 finds who can have won at all, which is one token but for a
few splits in ten thousand; it alone is scored in float64, or else all are. Splits follow from V
alone, so a row's result never depends on the batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.inputs import Inputs
from kernels.launching import launch
from kernels.race import TO_UNIT, Key
from kernels.rows import Call, draft_length, row_logits, row_position
from kernels.stats import row_statistics, single_sum
from kernels.truncate import truncate
from kernels.types import Verification
from kernels.verify import (
    check_for_kernel,
    launch_arguments,
    raise_for,
    truncation_rules,
)

ROUNDS = tl.constexpr(10)
UNIT = tl.constexpr(TO_UNIT)
MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)  # Philox 4x64 (Salmon et al. 2011, table 2)
WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
RACE_BLOCK, RACE_WARPS = 2048, 4  # tokens of a split, at most, and the warps that share them
# Scores in float32 are off by less: 2^-22 of e, a few 2^-24 of the score.
MARGIN, RELATIVE_MARGIN = tl.constexpr(1e-4), tl.constexpr(1e-6)
STEEPEST = tl.constexpr(1e30)  # 1 / T in float32, at most

M0, M1 = tl.constexpr(MULTIPLIERS[0]), tl.constexpr(MULTIPLIERS[1])
W0, W1 = tl.constexpr(WEYL[0]), tl.constexpr(WEYL[1])


def couple(
    target_logits: Tensor,  # [B, K + 1, V] raw bfloat16, float16 or float32; any strides
    draft_token_ids: Tensor,  # [B, K]; the first -1 ends a row's draft
    *,
    temperature: Tensor,  # [B]; 0: greedy
    keys: list[Key],  # B of them
    places: list[int],  # B; where the token stands in its text that row 0 of the logits decides
    num_draft_tokens: Tensor | None = None,  # [B]; K
    top_k: Tensor | None = None,  # [B]
    top_p: Tensor | None = None,  # [B]
    min_p: Tensor | None = None,  # [B]
    repetition_penalty: Tensor | None = None,  # [B]
    seen_token_counts: Tensor | None = None,  # [B, V]; None: nothing was seen before the draft
) -> Verification:
    """The tokens that each row keeps; the contract of kernels.coupled_reference.couple."""
    inputs = Inputs.of_target(
        target_logits,
        draft_token_ids,
        temperature,
        num_draft_tokens,
        top_k,
        top_p,
        min_p,
        repetition_penalty,
        seen_token_counts,
    )
    check_for_kernel(inputs)
    words = key_words(keys, places).to(target_logits.device, non_blocking=True)
    verification, errors = enqueue(inputs, words)
    raise_for(inputs, errors)
    return verification


def key_words(keys: list[Key], places: list[int]) -> Tensor:
    """[B, 3] int64: both words of a row's key, bit for bit, and its place."""
    signed = [[word - (1 << 64) * (word >> 63) for word in key] for key in keys]
    return torch.tensor([[*key, place] for key, place in zip(signed, places, strict=True)])


def enqueue(inputs: Inputs, words: Tensor) -> tuple[Verification, Tensor]:
    """Launch every kernel; the verification, and a flag [B] for rows that break the contract.

    `words` [B, 3] int64, as `key_words` makes them, lie on the device.
    """
    call: Call = launch_arguments(inputs)
    batch, width = inputs.uniforms.shape
    device = inputs.target_logits.device
    _, rows, _ = call.grid
    threshold = None
    rules = truncation_rules(inputs)
    if rules.any() and not call.greedy:
        threshold = truncate(call, row_statistics(call, device, rules), rules).thresholds
    vocab, num_draft, _ = call.sizes
    block = min(RACE_BLOCK, call.blocks["BLOCK"])
    splits = triton.cdiv(vocab, block)
    sizes = (vocab, num_draft, splits)
    blocks = {
        "POSITIONS": call.blocks["POSITIONS"],
        "SPLITS": triton.next_power_of_2(splits),
        "BLOCK": block,
        "num_warps": RACE_WARPS,
    }
    # Score, logit, largest logit and its sum of weights; -inf and 0 where nothing is kept.
    found = torch.empty(4, batch, rows, splits, dtype=torch.float64, device=device)
    ids = torch.empty(batch, rows, splits, dtype=torch.int32, device=device)
    verification = Verification.unwritten(batch, width, device)
    errors = torch.empty(batch, dtype=torch.int32, device=device)
    launch(
        race_kernel, (splits, rows, batch), *call.row_args, words, threshold, found, ids, *sizes,
        **blocks,
    )  # fmt: skip
    ids_ptr, lengths_ptr, _, temperature_ptr, _ = call.row_args[-5:]
    launch(
        finish_kernel, (batch,), ids_ptr, lengths_ptr, temperature_ptr, found, ids,
        verification.token_ids, verification.num_accepted, verification.target_logprobs,
        verification.draft_logprobs, errors, *sizes, **blocks,
    )  # fmt: skip
    return verification, errors


@triton.jit
def philox(block, place, key0, key1):
    """The four words of Philox 4x64 at counter [block, 0, 0, place], as numpy has them."""
    c0, c1, c2 = block, block * 0, block * 0
    c3 = block * 0 + place
    for _ in tl.static_range(ROUNDS):
        high0, low0 = tl.umulhi(c0, block * 0 + M0), c0 * M0
        high1, low1 = tl.umulhi(c2, block * 0 + M1), c2 * M1
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0 += W0
        key1 += W1
    return c0, c1, c2, c3


@triton.jit
def exponential(word):
    """-ln(1 - u) of the highest 53 bits; 1 - u is exact."""
    u = (word >> 11).to(tl.int64).to(tl.float64) * UNIT
    return -tl.log(1.0 - u)


@triton.jit
def random_words(split, place, key0, key1, BLOCK: tl.constexpr):
    """A word of 64 bits for each of the BLOCK tokens of a split."""
    first = split.to(tl.int64) * (BLOCK // 4) + 1
    block = (first + tl.arange(0, BLOCK // 4)).to(tl.uint64)
    a, b, c, d = philox(block, place, key0, key1)
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def arrivals(split, place, key0, key1, BLOCK: tl.constexpr):
    """e of the BLOCK tokens of a split, in float64."""
    return exponential(random_words(split, place, key0, key1, BLOCK))


@triton.jit
def nearly_arrivals(words):
    """e in float32, relative error below 2^-17 everywhere: u and 1 - u are exact integers first."""
    whole = (words >> 11).to(tl.int64)
    u = whole.to(tl.float32) * UNIT
    rest = (9007199254740992 - whole).to(tl.float32) * UNIT
    small = u * (1.0 + u * (0.5 + u * (1 / 3 + u * (0.25 + u * 0.2))))
    return tl.where(u < 0.0625, small, -tl.log(rest))


@triton.jit
def race_kernel(
    target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
    counts_ptr, counts_b, counts_v, ids_ptr, lengths_ptr, one_hot_ptr, temperature_ptr, penalty_ptr,
    words_ptr, threshold_ptr, found_ptr, best_ptr, V, K, S,
    POSITIONS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first to arrive among one split of one row; NaN and +inf become a score of NaN."""
    split, row, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = row_position(ids_ptr, lengths_ptr, one_hot_ptr, b, row, K, POSITIONS)
    if position >= 0:
        offsets = split * BLOCK + tl.arange(0, BLOCK)
        x = row_logits(
            target_ptr, target_b, target_k, target_v, draft_ptr, draft_b, draft_k, draft_v,
            counts_ptr, counts_b, counts_v, ids_ptr, penalty_ptr, b, row, position, offsets, V, K,
        )  # fmt: skip
        bad = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), axis=0) > 0
        cell = b * tl.num_programs(1) + row
        kept = x > -float("inf")
        temperature = tl.load(temperature_ptr + b).to(tl.float64)
        if threshold_ptr is not None:
            lowest = tl.load(threshold_ptr + cell)  # a greedy row has none
            kept = kept & (x >= tl.where(temperature == 0, -float("inf"), lowest))
        x = tl.where(kept, x, -float("inf"))
        peak = tl.max(x, axis=0)
        best = peak.to(tl.float64)
        near = kept & (x == peak)
        total = tl.full((), 1.0, tl.float64)
        if temperature != 0:
            key0 = tl.load(words_ptr + 3 * b).to(tl.uint64, bitcast=True)
            key1 = tl.load(words_ptr + 3 * b + 1).to(tl.uint64, bitcast=True)
            place = (tl.load(words_ptr + 3 * b + 2) + position).to(tl.uint64)
            words = random_words(split, place, key0, key1, BLOCK)
            steep = tl.minimum(1.0 / temperature, STEEPEST).to(tl.float32)
            nearly = x * steep - tl.log(nearly_arrivals(words))
            nearly = tl.where(kept, nearly, -float("inf"))
            first = tl.max(nearly, axis=0)
            margin = MARGIN + RELATIVE_MARGIN * tl.abs(first)
            near = kept & (nearly >= first - margin)
            if tl.sum(near.to(tl.int32), axis=0) == 1:
                word = tl.sum(tl.where(near, words.to(tl.int64, bitcast=True), 0), axis=0)
                e = exponential(word.to(tl.uint64, bitcast=True))
                logit = tl.max(tl.where(near, x, -float("inf")), axis=0).to(tl.float64)
                best = logit / temperature - tl.log(e)
            else:
                z = tl.where(kept, x, 0.0).to(tl.float64)
                score = z / temperature - tl.log(exponential(words))
                score = tl.where(kept, score, -float("inf"))
                best = tl.max(score, axis=0)
                near = kept & (score == best)
            total = single_sum(x, peak, temperature)
        token = tl.min(tl.where(near, offsets, V), axis=0)
        logit = tl.max(tl.where(offsets == token, x, -float("inf")), axis=0).to(tl.float64)
        at = cell.to(tl.int64) * S + split
        stride = tl.num_programs(2).to(tl.int64) * tl.num_programs(1) * S
        tl.store(found_ptr + at, tl.where(bad, float("nan"), best))
        tl.store(found_ptr + stride + at, logit)
        tl.store(found_ptr + 2 * stride + at, peak)
        tl.store(found_ptr + 3 * stride + at, total)
        tl.store(best_ptr + at, token)


@triton.jit
def finish_kernel(
    ids_ptr, lengths_ptr, temperature_ptr, found_ptr, best_ptr, tokens_ptr, accepted_ptr,
    target_logprobs_ptr, draft_logprobs_ptr, errors_ptr, V, K, S,
    POSITIONS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every position's token, and how far the drafts are they."""
    b, rows = tl.program_id(0), K + 1
    i, s = tl.arange(0, POSITIONS), tl.arange(0, SPLITS)
    length = draft_length(ids_ptr, lengths_ptr, b, K, POSITIONS)
    drafts = tl.load(ids_ptr + b * K + i, mask=i < length, other=-1)
    used = i <= length
    at = (b * rows + i).to(tl.int64)[:, None] * S + s[None, :]
    mask = used[:, None] & (s < S)[None, :]
    stride = tl.num_programs(0).to(tl.int64) * rows * S
    nothing = -float("inf")
    scores = tl.load(found_ptr + at, mask=mask, other=nothing)
    broken = tl.max((scores != scores).to(tl.int32), axis=1) > 0
    best = tl.max(tl.where(scores == scores, scores, nothing), axis=1)
    ids = tl.load(best_ptr + at, mask=mask, other=0)
    token = tl.min(tl.where(mask & (scores == best[:, None]), ids, V), axis=1)
    broken = used & (broken | (best == nothing) | (token >= V))
    wrong = (i < length) & ((drafts < 0) | (drafts >= V))
    logits = tl.load(found_ptr + stride + at, mask=mask, other=nothing)
    logit = tl.max(tl.where(ids == token[:, None], logits, nothing), axis=1)
    peaks = tl.load(found_ptr + 2 * stride + at, mask=mask, other=nothing)
    peak = tl.max(peaks, axis=1)
    totals = tl.load(found_ptr + 3 * stride + at, mask=mask, other=0.0)
    given = tl.load(temperature_ptr + b).to(tl.float64)
    temperature = tl.where(given == 0, 1.0, given)
    alive = totals > 0
    behind = tl.where(alive, peaks, 0.0) - tl.where(alive, peak[:, None], 0.0)
    total = tl.sum(totals * tl.exp(behind / temperature), axis=1)
    logprob = (tl.where(used, logit - peak, 0.0)) / temperature - tl.log(tl.where(used, total, 1.0))
    logprob = tl.where(given == 0, 0.0, logprob)
    n = tl.min(tl.where((i < length) & (drafts != token), i, length), axis=0)
    emitted = i <= n
    out = b * (K + 1) + i
    tl.store(tokens_ptr + out, tl.where(emitted, token, -1).to(tl.int64), mask=i <= K)
    tl.store(accepted_ptr + b, n.to(tl.int64))
    tl.store(target_logprobs_ptr + out, tl.where(emitted, logprob, 0.0), mask=i <= K)
    missed = (i == n) & (n < length)
    tl.store(draft_logprobs_ptr + out, tl.where(missed, nothing, 0.0), mask=i <= K)
    bad = tl.max((broken | wrong).to(tl.int32), axis=0) > 0
    bad = bad | (given < 0) | (given == float("inf")) | (given != given)
    tl.store(errors_ptr + b, bad.to(tl.int32))

r"""Verification from raw logits in Triton: two launches, three where a row may be truncated.

The contract and the mathematics are those of kernels/reference.py; this page is how they are split
over a GPU. With z the penalised logits of a row, M = max z, and w(v) = exp((z(v) - M) / T) where
truncation kept v, else 0:

  1. stats     per (row, split of BLOCK tokens): its maximum m_s and l_s = sum exp((z - m_s) / T)
     (thresholds, where a row asks for top-k, top-p or min-p: kernels/truncate.py)
  2. resolve   per sequence: M = max m_s and L = sum l_s exp((m_s - M) / T) of all rows; draft x_i
               is kept iff u_i w_q(x_i) / L_q < w_p(x_i) / L_p, n is the first that is not; then
               over strips of STRIP tokens the mass of max(w_p / P - w_q / Q, 0) at position n,
               and by whoever is last the strip in which its CDF crosses u_K, and the id within it

Nothing of [B, K, V] is written; one target and one draft row are read again by launch 2. The
acceptance test works on float32 sums (relative error some 1e-7), and so does the residual, but in
float64 where next to nothing is left of it (kernels/residual.py). Sums have a fixed order, and
splits and tiles follow from V only: a row's result never depends on the batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels.inputs import Inputs
from kernels.launching import launch
from kernels.overlap import options
from kernels.resolve import resolve_kernel
from kernels.rows import Call, Rules
from kernels.sizes import sizes
from kernels.stats import row_statistics
from kernels.truncate import truncate
from kernels.types import Verification

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Of all batches, since the order of sums follows from these; the rest is in kernels/sizes.py.
BLOCK, WARPS = 8192, 4  # launch 1: tokens of a split, at most, and the warps that share them
TILE, TILE_WARPS = 2048, 8  # launch 2
STRIP = 256  # tokens of a tile whose sums stay apart: one warp's, so that warps need not meet


def block_size(vocab: int) -> int:
    """Tokens of a split: a power of two, from the vocabulary alone."""
    return max(128, min(BLOCK, triton.next_power_of_2(vocab)))


@dataclass(frozen=True, slots=True)
class Uses:
    """What some row of a call may ask for; a parameter that is not named is not looked at."""

    sampling: bool = True  # False: all rows are greedy
    top_k: bool = True
    top_p: bool = True
    min_p: bool = True
    repetition_penalty: bool = True


EVERYTHING = Uses()


def verify(
    target_logits: Tensor,  # [B, K + 1, V] raw bfloat16, float16 or float32; any strides
    draft_token_ids: Tensor,  # [B, K]; the first -1 ends a row's draft
    draft_logits: Tensor | None,  # [B, K, V] raw; None: every row was drafted without chance
    *,
    temperature: Tensor,  # [B]; 0: greedy
    uniforms: Tensor,  # [B, K + 1] in [0, 1); the last one draws the recovered or bonus token
    num_draft_tokens: Tensor | None = None,  # [B]; K
    draft_is_one_hot: Tensor | None = None,  # [B] bool; draft_logits is None
    top_k: Tensor | None = None,  # [B]
    top_p: Tensor | None = None,  # [B]
    min_p: Tensor | None = None,  # [B]
    repetition_penalty: Tensor | None = None,  # [B]
    seen_token_counts: Tensor | None = None,  # [B, V]; None: nothing was seen before the draft
    check: bool = True,
    uses: Uses = EVERYTHING,
) -> Verification:
    """The tokens that each row keeps; the contract of kernels.reference.verify, on a GPU.

    Parameters of one number a row may stay on the host: then a rule that no row asks for costs
    nothing. Where they live on the device, as in a CUDA graph whose replays read other values,
    `uses` says what a row may ask for, ever. `check=False` leaves out the one read back from the
    device (as a CUDA graph must), and so the errors for values that break the contract.
    """
    inputs = Inputs(
        target_logits,
        draft_token_ids,
        draft_logits,
        temperature,
        uniforms,
        num_draft_tokens,
        draft_is_one_hot,
        top_k if uses.top_k else None,
        top_p if uses.top_p else None,
        min_p if uses.min_p else None,
        repetition_penalty if uses.repetition_penalty else None,
        seen_token_counts,
    )
    check_for_kernel(inputs)
    verification, errors = enqueue(inputs, sampled=uses.sampling)
    if check:
        raise_for(inputs, errors)
    return verification


def check_for_kernel(inputs: Inputs) -> None:
    """Raise for what the host knows to break the contract, and for logits that no kernel reads."""
    inputs.check_parameters(host_only=True)
    for name in ("target_logits", "draft_logits"):
        logits = getattr(inputs, name)
        if logits is not None and logits.dtype not in DTYPES:
            raise ValueError(
                f"{name} is {logits.dtype}; the kernel reads bfloat16, float16 and float32, and "
                "its specification in PyTorch reads float64"
            )


def raise_for(inputs: Inputs, errors: Tensor) -> None:
    """Raise where a kernel flagged a row [B]; waits for the device."""
    if any(errors.tolist()):
        inputs.check_values()  # says which value it was
        raise ValueError("repetition_penalty makes a logit overflow float32; pass smaller logits")


def enqueue(inputs: Inputs, *, sampled: bool = True) -> tuple[Verification, Tensor]:
    """Launch every kernel; the verification, and a flag [B] for rows that break the contract.

    `sampled=False`: all rows are greedy, though their temperatures may lie on the device.
    """
    call = launch_arguments(inputs, sampled=sampled)
    batch, width = inputs.uniforms.shape
    device = inputs.target_logits.device
    rules = truncation_rules(inputs)
    stats = row_statistics(call, device, rules)
    tile = min(call.blocks["BLOCK"], TILE)
    tiles, strip = triton.cdiv(call.sizes[0], tile), min(tile, STRIP)
    strips = triton.cdiv(call.sizes[0], strip)
    cut = truncate(call, stats, rules) if rules.any() and not call.greedy else None
    partial = exact = None
    if not call.greedy:
        partial = torch.empty(batch, strips, device=device)
        exact = torch.empty(batch, strips, dtype=torch.float64, device=device)
    verification = Verification.unwritten(batch, width, device)
    errors = torch.empty(batch, dtype=torch.int32, device=device)
    chosen = sizes(batch)
    plain = cut is None and call.row_args[15] is None  # no penalty
    # One wave of programs: a second one with few of them would take as long as the first.
    # The last of a row writes what is known before the draw, and so has a tile less, if any.
    parts = 1 if call.greedy else min(tiles + 1, max(1, chosen.programs // batch))
    launch(
        resolve_kernel, (parts, batch), *call.row_args, *rules.tensors(),
        stats.maxima, stats.best, stats.sums, stats.drafted,
        *((None,) * 5 if cut is None else cut.tensors()),
        inputs.uniforms.contiguous(), partial, exact, stats.arrived,
        verification.token_ids, verification.num_accepted, verification.target_logprobs,
        verification.draft_logprobs, errors, *call.sizes,
        POSITIONS=call.blocks["POSITIONS"], SPLITS=call.blocks["SPLITS"],
        SIDES=1 if call.row_args[4] is None else 2, TILE=tile,
        STRIP=strip, STRIPS=triton.next_power_of_2(strips), WIDTH=max(1, strip // 8),
        AHEAD=chosen.ahead,
        CANDIDATES=1 if cut is None else cut.ids.shape[-1], num_warps=TILE_WARPS,
        maxnreg=chosen.tile_registers if plain else chosen.rule_tile_registers, **options(device),
    )  # fmt: skip
    return verification, errors


def launch_arguments(inputs: Inputs, *, sampled: bool = True) -> Call:
    """What all kernels are given; a value that the host knows to be neutral becomes None."""
    batch, num_draft, vocab = inputs.sizes
    device = inputs.target_logits.device
    draft, one_hot = inputs.draft_logits, inputs.draft_is_one_hot
    if num_draft == 0 or _host_says(one_hot, lambda values: values.all()):
        draft = one_hot = None
    elif _host_says(one_hot, lambda values: ~values.any()) and draft is not None:
        one_hot = None
    penalty = _unless(inputs.repetition_penalty, 1, device)
    counts = None if penalty is None else inputs.seen_token_counts
    if counts is not None and counts.dtype == torch.bool:
        counts = counts.view(torch.uint8)
    greedy = not sampled or _host_says(inputs.temperature, lambda values: (values == 0).all())
    block = block_size(vocab)
    splits = triton.cdiv(vocab, block)
    rows = num_draft + 1 if draft is None else 2 * num_draft + 1
    return Call(
        row_args=(
            *_with_strides(inputs.target_logits, 3),
            *_with_strides(draft, 3),
            *_with_strides(counts, 2),
            inputs.draft_token_ids.contiguous(),
            _on(inputs.num_draft_tokens, device),
            _on(None if one_hot is None else one_hot.view(torch.uint8), device),
            _on(inputs.temperature, device),
            penalty,
        ),
        sizes=(vocab, num_draft, splits),
        grid=(splits, rows, batch),
        greedy=greedy,
        blocks={
            "POSITIONS": triton.next_power_of_2(num_draft + 1),
            "SPLITS": triton.next_power_of_2(splits),
            "BLOCK": block,
            "num_warps": max(1, min(WARPS, block // 256)),
        },
    )


def truncation_rules(inputs: Inputs) -> Rules:
    device = inputs.target_logits.device
    return Rules(
        _unless(inputs.top_k, 0, device),
        _unless(inputs.top_p, 1, device),
        _unless(inputs.min_p, 0, device),
    )


def _host_says(values: Tensor | None, test: Callable[[Tensor], Tensor]) -> bool:
    """True where the values are on the host and pass; those on a device are not waited for."""
    return values is not None and values.device.type == "cpu" and bool(test(values))


def _unless(values: Tensor | None, neutral: float, device: torch.device) -> Tensor | None:
    """The parameter on the device, or None where the host knows that no row asks for it."""
    if _host_says(values, lambda given: (given == neutral).all()):
        return None
    return _on(values, device)


def _on(values: Tensor | None, device: torch.device) -> Tensor | None:
    return None if values is None else values.to(device, non_blocking=True).contiguous()


def _with_strides(tensor: Tensor | None, dims: int) -> tuple[Tensor | int | None, ...]:
    return (tensor, *((0,) * dims if tensor is None else tensor.stride()))

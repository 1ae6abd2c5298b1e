r"""Verification from raw logits in Triton: four launches, two when every row is greedy.

The contract and the mathematics are those of kernels/reference.py; this page is how they are split
over a GPU. The vocabulary is cut into S splits of BLOCK tokens. With z the penalised logits of a
row, M = max z, and w(v) = exp((z(v) - M) / T) where truncation kept v, else 0:

  1. stats     per (row, split): m_s = max z, its lowest id, and l_s = sum_v exp((z(v) - m_s) / T)
     (thresholds, where a row asks for top-k, top-p or min-p: kernels/truncate.py)
  2. accept    per sequence: M = max_s m_s and L = sum_s l_s exp((m_s - M) / T) of all rows, then
               draft x_i is kept iff u_i w_q(x_i) / L_q < w_p(x_i) / L_p; n = the first that is not;
               per split of position n: P_s = sum w_p and Q_s = sum w_q, in float64
  3. residual  per split of position n: R_s = sum_v max(w_p(v) / P - w_q(v) / Q, 0), in float64
  4. draw      per sequence: the split in which the CDF of R crosses u_K, then the id within it

Nothing of [B, K, V] is written; one target and one draft row are read again by launches 2 to 4.
The acceptance test works on float32 sums (relative error some 1e-7); the residual is a difference
of two laws that a good drafter makes nearly equal, and so gets float64 throughout. Sums over splits
have a fixed order, and S depends on V only: a row's result never depends on the batch.
"""

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from kernels.accept import accept_kernel, stats_kernel
from kernels.draw import draw_kernel, residual_kernel
from kernels.inputs import Inputs
from kernels.rows import Call
from kernels.truncate import PASSES, Rules, truncate
from kernels.types import Verification


def block_size(vocab: int) -> int:
    """Tokens of a split: a power of two, from the vocabulary alone."""
    largest = 2048 if vocab <= 65536 else 4096
    return max(128, min(largest, triton.next_power_of_2(vocab)))


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
) -> Verification:
    """The tokens that each row keeps; the contract of kernels.reference.verify, on a GPU.

    Parameters of one number a row may stay on the host, and should: then a rule that no row asks
    for costs nothing, and greedy rows take two launches. `check=False` leaves out the one read back
    from the device (as a CUDA graph must), and so the errors for values that break the contract.
    """
    inputs = Inputs(
        target_logits,
        draft_token_ids,
        draft_logits,
        temperature,
        uniforms,
        num_draft_tokens,
        draft_is_one_hot,
        top_k,
        top_p,
        min_p,
        repetition_penalty,
        seen_token_counts,
    )
    check_for_kernel(inputs)
    verification, errors = enqueue(inputs)
    if check:
        raise_for(inputs, errors)
    return verification


def check_for_kernel(inputs: Inputs) -> None:
    """Raise for what the host knows to break the contract, and for logits that no kernel reads."""
    inputs.check_parameters(host_only=True)
    for name in ("target_logits", "draft_logits"):
        logits = getattr(inputs, name)
        if logits is not None and logits.dtype not in PASSES:
            raise ValueError(
                f"{name} is {logits.dtype}; the kernel reads bfloat16, float16 and float32, and "
                "its specification in PyTorch reads float64"
            )


def raise_for(inputs: Inputs, errors: Tensor) -> None:
    """Raise where a kernel flagged a row [B]; waits for the device."""
    if any(errors.tolist()):
        inputs.check_values()  # says which value it was
        raise ValueError("repetition_penalty makes a logit overflow float32; pass smaller logits")


def enqueue(inputs: Inputs, greedy: bool = False) -> tuple[Verification, Tensor]:
    """Launch every kernel; the verification, and a flag [B] for rows that break the contract.

    `greedy`: the caller knows all rows to be, though their temperatures lie on the device.
    """
    call = launch_arguments(inputs, greedy)
    batch, width = inputs.uniforms.shape
    splits = call.grid[0]
    device = inputs.target_logits.device
    rules = truncation_rules(inputs)
    maxima = torch.empty(batch, call.rows, splits, device=device)
    best = torch.empty_like(maxima, dtype=torch.int32)
    sums = mass = residual = threshold = None
    if not call.greedy:
        sums = torch.empty_like(maxima)
        mass = torch.empty(2, batch, splits, dtype=torch.float64, device=device)
        residual = torch.empty(batch, splits, dtype=torch.float64, device=device)
    verification = Verification.unwritten(batch, width, device)
    token_ids, num_accepted = verification.token_ids, verification.num_accepted
    logprobs = verification.target_logprobs, verification.draft_logprobs
    errors = torch.empty(batch, dtype=torch.int32, device=device)
    uniforms = inputs.uniforms.contiguous()
    stats_kernel[call.grid](*call.row_args, maxima, best, sums, *call.sizes, **call.blocks)
    if sums is not None and rules.any():
        threshold = truncate(call, maxima, sums, rules)
    accept_kernel[(1 if call.greedy else splits, batch)](
        *call.row_args, maxima, best, sums, threshold, uniforms, *rules.tensors(), mass,
        token_ids, num_accepted, *logprobs, errors, *call.sizes, **call.blocks,
    )  # fmt: skip
    if not call.greedy:
        residual_kernel[(splits, batch)](
            *call.row_args, maxima, threshold, mass, residual, num_accepted,
            *call.sizes, **call.blocks,
        )  # fmt: skip
        draw_kernel[(batch,)](
            *call.row_args, maxima, threshold, mass, residual, uniforms, token_ids, num_accepted,
            *logprobs, *call.sizes, **call.blocks,
        )  # fmt: skip
    return verification, errors


def launch_arguments(inputs: Inputs, greedy: bool = False) -> Call:
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
    greedy = greedy or _host_says(inputs.temperature, lambda values: (values == 0).all())
    block = block_size(vocab)
    splits = triton.cdiv(vocab, block)
    rows = num_draft + 1 if draft is None else 2 * num_draft + 1
    dtypes = {inputs.target_logits.dtype, torch.bfloat16 if draft is None else draft.dtype}
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
        passes=8 if penalty is not None else max(PASSES[dtype] for dtype in dtypes),
        blocks={
            "POSITIONS": triton.next_power_of_2(num_draft + 1),
            "SPLITS": triton.next_power_of_2(splits),
            "BLOCK": block,
            "num_warps": 8 if block > 2048 else 4,
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

# mypy: disallow-untyped-defs=False
r"""RMSNorm with what comes before it: embedding, or the sum of a product's parts and a residual.

For row m, with d = sum of parts[s, m] in order of s, plus b, rounded to the model's type:

    r'[m] = r[m] + d,    y[m] = w * (r'[m] / sqrt(mean(r'[m]^2) + eps)),

float32 inside, rounded where transformers rounds: after the product, after the residual, before the
weight, after it. One program a row, so a row's bits depend on nothing else.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launching import launch
from kernels.matrix import narrow, rounded, total_of_parts
from kernels.overlap import announce_early, options, wait_for_turn


def norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of rows [M, D] in float64, rounded before the weight and after it."""
    wide = x.double()
    scaled = (wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()).to(x.dtype)
    return (weight.double() * scaled.double()).to(x.dtype)


def add_norm_reference(
    parts: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(new residual, normalised), as `add_norm` leaves them."""
    total = parts.double().sum(0)
    delta = (total if bias is None else total + bias.double()).to(residual.dtype)
    new = (residual.double() + delta.double()).to(residual.dtype)
    return new, norm_reference(new, weight, eps)


def embed_norm(
    token_ids: Tensor,  # [M] int32
    embedding: Tensor,  # [V, D]
    weight: Tensor,  # [D]
    eps: float,
) -> tuple[Tensor, Tensor]:
    """(residual, normalised) [M, D] of the tokens' embeddings."""
    residual = embedding.new_empty(len(token_ids), embedding.shape[1])
    return residual, _launch(embedding, token_ids, None, None, residual, weight, eps)


def add_norm(
    parts: Tensor,  # [split, M, D]
    bias: Tensor | None,  # [D]
    residual: Tensor,  # [M, D], replaced by the new one
    weight: Tensor,  # [D]
    eps: float,
) -> Tensor:
    """The normalised rows [M, D]; the residual has taken in the parts."""
    return _launch(residual, None, parts, bias, residual, weight, eps)


def _launch(
    source: Tensor,
    token_ids: Tensor | None,
    parts: Tensor | None,
    bias: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
) -> Tensor:
    num_rows, size = residual.shape
    out = torch.empty_like(residual)
    block = triton.next_power_of_2(size)
    launch(
        add_norm_kernel,
        (num_rows,),
        source,
        token_ids,
        parts,
        bias,
        residual,
        weight,
        out,
        num_rows,
        eps,
        SIZE=size,
        SPLIT=1 if parts is None else len(parts),
        BLOCK=block,
        **options(out.device),
        num_warps=max(1, min(8, block // 256)),
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def add_norm_kernel(
    source_ptr,
    ids_ptr,
    parts_ptr,
    bias_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    eps,
    SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    d = tl.arange(0, BLOCK)
    inside = d < SIZE
    if OVERLAP > 0:
        announce_early(OVERLAP)
    # No kernel writes these, so that nobody needs to wait before they are asked for.
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + d, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP > 0:
        wait_for_turn(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    at = row * SIZE + d
    start = row
    if ids_ptr is not None:
        start = tl.load(ids_ptr + row).to(tl.int64)
    x = tl.load(source_ptr + start * SIZE + d, mask=inside, other=0.0).to(tl.float32)
    if parts_ptr is not None:
        stride = num_rows.to(tl.int64) * SIZE
        delta = total_of_parts(parts_ptr, at, inside, stride, SPLIT)
        if bias_ptr is not None:
            delta += bias
        x = rounded(x + rounded(delta, out_ptr), out_ptr)
    tl.store(residual_ptr + at, narrow(x, out_ptr), mask=inside)
    mean = tl.sum(x * x, axis=0) / SIZE
    scaled = rounded(x * tl.rsqrt(mean + eps), out_ptr)
    tl.store(out_ptr + at, narrow(weight * scaled, out_ptr), mask=inside)

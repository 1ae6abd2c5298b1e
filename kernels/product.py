# mypy: disallow-untyped-defs=False
r"""Skinny products y = x W^T for a few rows, bound by reading W once.

W [N, K] lies row-major. A program holds BLOCK_N rows of W against BLOCK_M rows of x and walks over
the columns of its share of K, W on the left of the matrix unit: which instruction is used then
follows from the weight's tile alone, never from the number of rows. Rows of x that are not there
are zeros. With K cut into shares s = 0, 1, ... of whole blocks,

    parts[s, m, n] = sum of x[m, k] W[n, k] over the k of share s, in order,

and whoever reads the parts adds them in order (kernels/norm.py, kernels/heads.py). Nothing is added
by atomics, so a row's bits depend on the row and on the weight's tile only.

The first blocks of a share are asked for before the kernel in front has ended (no kernel writes a
weight), wait in registers, and are added last. Most of a short product is waiting for memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launching import launch
from kernels.matrix import multiply, narrow, rounded
from kernels.overlap import LATE, options, wait_for_turn
from kernels.tiles import Tile, pipeline_bytes, product_tile, row_block


def parts_reference(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T in float64, one part."""
    return (x.double() @ weight.double().T)[None]


def product_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b in float64, rounded once."""
    total = parts_reference(x, weight)[0]
    return (total if bias is None else total + bias.double()).to(x.dtype)


def gated_reference(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
) -> Tensor:
    """silu(x Wg^T + bg) * (x Wu^T + bu), rounded where a model of single operations rounds."""
    opened = torch.nn.functional.silu(product_reference(x, gate, gate_bias).double()).to(x.dtype)
    return (opened.double() * product_reference(x, up, up_bias).double()).to(x.dtype)


def product_parts(
    x: Tensor, weight: Tensor, tile: Tile | None = None, wanted: Tensor | None = None
) -> Tensor:
    """[split, M, N] float32, whose sum over the first dimension is x W^T. x [M, K], W [N, K].

    `wanted` [1] int32, here and below: where it is 0 on the device, nothing is computed or read,
    and what is returned is whatever the memory held.
    """
    tile = tile or product_tile("parts", len(weight), weight.shape[1], x.device)
    out = torch.empty(tile.split, len(x), len(weight), dtype=torch.float32, device=x.device)
    _launch(x, weight, None, None, None, out, tile, wanted)
    return out


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    tile: Tile | None = None,
    wanted: Tensor | None = None,
) -> Tensor:
    """x W^T + b [M, N] in x's type. x [M, K], W [N, K], b [N]."""
    tile = tile or product_tile("whole", len(weight), weight.shape[1], x.device)
    assert tile.split == 1, tile
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    _launch(x, weight, None, bias, None, out, tile, wanted)
    return out


def gated_product(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    tile: Tile | None = None,
    wanted: Tensor | None = None,
) -> Tensor:
    """silu(x Wg^T + bg) * (x Wu^T + bu) [M, N] in x's type; both weights [N, K]."""
    tile = tile or product_tile("gated", len(gate), gate.shape[1], x.device)
    assert tile.split == 1, tile
    out = torch.empty(len(x), len(gate), dtype=x.dtype, device=x.device)
    _launch(x, gate, up, gate_bias, up_bias, out, tile, wanted)
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    second: Tensor | None,
    bias: Tensor | None,
    second_bias: Tensor | None,
    out: Tensor,
    tile: Tile,
    wanted: Tensor | None,
) -> None:
    read = (x, weight, weight if second is None else second)
    assert all(t.is_contiguous() for t in read), "x and W are read row by row"
    num_rows, (num_out, num_in) = len(x), weight.shape
    block_m = row_block(num_rows)
    # Programs that read the same part of W are neighbours, and find it in the cache.
    grid = (triton.cdiv(num_rows, block_m), triton.cdiv(num_out, tile.block_n), tile.split)
    num_weights, itemsize = 1 if second is None else 2, x.element_size()
    shared = pipeline_bytes(x.device)
    early = tile.early(num_in, itemsize, shared) if out.dim() == 3 else 0
    launch(
        product_kernel,
        grid,
        x,
        weight,
        second,
        bias,
        second_bias,
        wanted,
        out,
        num_rows,
        N=num_out,
        K=num_in,
        PARTS=out.dim() == 3,
        SPLIT=tile.split,
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        EARLY=early,
        **options(x.device),
        num_warps=tile.num_warps,
        num_stages=tile.stages(block_m, num_weights, itemsize, early, shared),
    )


def kernel_name(constants):
    """How a profile knows the product whose launch has these constants; None is one of them."""
    kind = "parts" if constants["PARTS"] else "gated" if "second_ptr" not in constants else "whole"
    return f"product_{kind}_{constants['N']}x{constants['K']}"


def _name(specialisation):
    return kernel_name(specialisation.constants)


@triton.jit
def weight_block(pointer, at, inside, EVEN: tl.constexpr):
    """[BLOCK_N, BLOCK_K] of a weight."""
    if EVEN:
        found = tl.load(pointer + at)
    else:
        found = tl.load(pointer + at, mask=inside[None, :], other=0.0)
    return found


@triton.jit
def input_block(pointer, at, there, inside, EVEN: tl.constexpr):
    """[BLOCK_K, BLOCK_M] of the rows."""
    if EVEN:
        found = tl.load(pointer + at, mask=there[None, :], other=0.0)
    else:
        found = tl.load(pointer + at, mask=there[None, :] & inside[:, None], other=0.0)
    return found


@triton.jit(do_not_specialize=["num_rows"], repr=_name)
def product_kernel(
    x_ptr,
    weight_ptr,
    second_ptr,
    bias_ptr,
    second_bias_ptr,
    wanted_ptr,
    out_ptr,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if wanted_ptr is not None:
        if OVERLAP > 0:
            wait_for_turn(LATE)
        if tl.load(wanted_ptr) == 0:
            return
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    share: tl.constexpr = (blocks + SPLIT - 1) // SPLIT
    even: tl.constexpr = K % (BLOCK_K * SPLIT) == 0
    k = split * (share * BLOCK_K) + tl.arange(0, BLOCK_K)
    there = m < num_rows
    row = n
    if N % BLOCK_N != 0:
        row = tl.minimum(n, N - 1)
    weights = row.to(tl.int64)[:, None] * K + k[None, :]  # [BLOCK_N, BLOCK_K]
    inputs = m.to(tl.int64)[None, :] * K + k[:, None]  # [BLOCK_K, BLOCK_M]
    early = ()
    for block in tl.static_range(EARLY):
        inside = k + block * BLOCK_K < K
        early += (weight_block(weight_ptr, weights + block * BLOCK_K, inside, even),)  # type: ignore[assignment]
    if OVERLAP > 0 and wanted_ptr is None:
        wait_for_turn(LATE)
    early_x = ()
    for block in tl.static_range(EARLY):
        inside = k + block * BLOCK_K < K
        early_x += (input_block(x_ptr, inputs + block * BLOCK_K, there, inside, even),)  # type: ignore[assignment]
    weights += EARLY * BLOCK_K
    inputs += EARLY * BLOCK_K
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    second = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for block in range(EARLY, share):
        inside = k + block * BLOCK_K < K
        w = weight_block(weight_ptr, weights, inside, even)
        x = input_block(x_ptr, inputs, there, inside, even)
        if second_ptr is not None:
            w2 = weight_block(second_ptr, weights, inside, even)
        total = multiply(w, x, total)
        if second_ptr is not None:
            second = multiply(w2, x, second)
        weights += BLOCK_K
        inputs += BLOCK_K
    for block in tl.static_range(EARLY):
        total = multiply(early[block], early_x[block], total)
    at = m.to(tl.int64)[None, :] * N + n[:, None]
    mask = there[None, :] & (n < N)[:, None]
    if PARTS:
        at += split.to(tl.int64) * num_rows * N
    if bias_ptr is not None:
        total += tl.load(bias_ptr + row).to(tl.float32)[:, None]
    if second_ptr is not None:
        if second_bias_ptr is not None:
            second += tl.load(second_bias_ptr + row).to(tl.float32)[:, None]
        gate = rounded(total, out_ptr)
        gate = rounded(gate / (1.0 + tl.exp(-gate)), out_ptr)
        total = gate * rounded(second, out_ptr)
    tl.store(out_ptr + at, narrow(total, out_ptr), mask=mask)

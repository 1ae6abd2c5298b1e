# mypy: disallow-untyped-defs=False
"""Attention of one new token a row over a ring of columns, of which a row owns some.

For row b, key head h and the G query heads of its group, with own columns C_b = {c : mask[b, c]}:

    out[b, h, g] = sum over c in C_b of softmax_c(scale q[b, h, g] . k[b, h, c]) v[b, h, c]

One program a (row, key head) walks the ring in blocks of BLOCK columns with a running maximum and
sum in float32; a block in which a row owns nothing is neither loaded nor multiplied, so the cost
follows the tokens that rows hold and not the ring's size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64
LEAST_ROWS = 16  # of a matrix unit's tile: a group of fewer heads is padded


def tiles(size: int) -> bool:
    """Whether heads of this size fit the matrix unit's tiles."""
    return size >= 16 and size & (size - 1) == 0


def reference(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The same in float64; shapes as in `ring_attention`."""
    scores = scale * query.double() @ key.double().transpose(-1, -2)
    scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    return (scores.softmax(-1) @ value.double()).to(query.dtype)


def ring_attention(
    query: Tensor,  # [B, H, G, D], H key heads
    key: Tensor,  # [B, H, L, D]
    value: Tensor,  # [B, H, L, D]
    mask: Tensor,  # [B, L] bool; every row owns a column
    scale: float,
) -> Tensor:  # [B, H, G, D]
    """Each row's attention over its own columns. Any strides but a last one of 1.

    Raises ValueError where D is no power of two of at least 16, which tiles of the unit need.
    """
    batch, heads, group, size = query.shape
    if not tiles(size):
        raise ValueError(f"heads of size {size} do not tile; use heads of 16, 32, 64, 128 or 256")
    query, mask = query.contiguous(), mask.contiguous()
    out = torch.empty_like(query)
    ring_attention_kernel[(batch * heads,)](
        query,
        key,
        value,
        mask,
        out,
        *(stride for states in (key, value) for stride in states.stride()[:3]),
        heads,
        key.shape[2],
        scale,
        GROUP=group,
        ROWS=max(LEAST_ROWS, triton.next_power_of_2(group)),
        SIZE=size,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out


@triton.jit
def ring_attention_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    mask_ptr,
    out_ptr,
    key_batch_stride,
    key_head_stride,
    key_column_stride,
    value_batch_stride,
    value_head_stride,
    value_column_stride,
    heads,
    num_columns,
    scale,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    b, h = program // heads, program % heads
    g, d = tl.arange(0, ROWS)[:, None], tl.arange(0, SIZE)[None]
    places = (program * GROUP + g) * SIZE + d
    query = tl.load(query_ptr + places, mask=g < GROUP, other=0.0)
    key_ptr += b * key_batch_stride + h * key_head_stride
    value_ptr += b * value_batch_stride + h * value_head_stride
    peak = tl.full((ROWS, 1), -float("inf"), tl.float32)
    total = tl.zeros((ROWS, 1), tl.float32)
    mixed = tl.zeros((ROWS, SIZE), tl.float32)
    for start in range(0, num_columns, BLOCK):
        c = start + tl.arange(0, BLOCK)
        own = tl.load(mask_ptr + b * num_columns + c, mask=c < num_columns, other=0) != 0
        if tl.max(own.to(tl.int32), axis=0) > 0:
            columns = c.to(tl.int64)[:, None]
            key = tl.load(key_ptr + columns * key_column_stride + d, mask=own[:, None], other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            scores = tl.where(own[None], scores, -float("inf"))
            higher = tl.maximum(peak, tl.max(scores, axis=1)[:, None])
            weights = tl.exp(scores - higher)
            fade = tl.exp(peak - higher)
            value = tl.load(
                value_ptr + columns * value_column_stride + d, mask=own[:, None], other=0.0
            )
            total = total * fade + tl.sum(weights, axis=1)[:, None]
            mixed = mixed * fade + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            peak = higher
    tl.store(out_ptr + places, (mixed / total).to(out_ptr.dtype.element_ty), mask=g < GROUP)

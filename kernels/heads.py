# mypy: disallow-untyped-defs=False
r"""From the parts of the stacked q, k, v product to queries, and keys and values in the cache.

For token (b, w) at position p = positions[b] + w, head h, halves x = (x1, x2):

    x = sum of parts + bias;   q, k: x = weight * x / rms(x) where the model norms its heads;
    q, k: (x1 cos a - x2 sin a, x2 cos a + x1 sin a) with the angles a of p.

Rounded where transformers rounds: the product, the norm before and after its weight, each of the
rotation's products and their sum. Row b lives in slot slots[b] of the cache; tokens past widths[b]
are padding, and nothing of them is kept. One program a (token, head).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launching import launch
from kernels.matrix import narrow, rounded, total_of_parts
from kernels.norm import norm_reference
from kernels.overlap import announce_early, options, settled, wait_for_turn


@dataclass(frozen=True)
class Batch:
    """Where the rows of a pass live, on the device: [B] int32 each."""

    slots: Tensor  # of the cache
    positions: Tensor  # of each row's first new token
    widths: Tensor  # new tokens of each row, at most `width`
    width: int

    def places(self) -> tuple[Tensor, Tensor, Tensor]:
        """(slot, position, whether it is a token) of every place [B * width]."""
        w = torch.arange(self.width, device=self.slots.device)
        positions = (self.positions[:, None] + w).flatten()
        slots = self.slots[:, None].expand(-1, self.width).flatten()
        return slots.long(), positions.long(), (w < self.widths[:, None]).flatten()


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorm of query and key heads."""

    query: Tensor  # [D]
    key: Tensor
    eps: float


def heads_reference(
    parts: Tensor,
    bias: Tensor | None,
    norms: HeadNorms | None,
    cos: Tensor,
    sin: Tensor,
    batch: Batch,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """`split_heads` by single operations; shapes as there."""
    kv, size, dtype = keys.shape[1], keys.shape[3], keys.dtype
    total = parts.double().sum(0)
    x = (total if bias is None else total + bias.double()).to(dtype)
    x = x.view(len(x), -1, size)
    query, key, value = x.split([x.shape[1] - 2 * kv, kv, kv], dim=1)
    if norms is not None:
        query = norm_reference(query, norms.query, norms.eps)
        key = norm_reference(key, norms.key, norms.eps)
    slots, positions, there = batch.places()
    places = positions.clamp(max=len(cos) - 1)
    query, key = (_turned(heads, cos[places], sin[places]) for heads in (query, key))
    keys[slots[there], :, positions[there]] = key[there]
    values[slots[there], :, positions[there]] = value[there]
    return query


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[M, heads, D] turned by [M, D / 2]."""
    first, second = x.chunk(2, -1)
    whole = torch.cat([cos, cos], -1)[:, None], torch.cat([sin, sin], -1)[:, None]
    return x * whole[0] + torch.cat([-second, first], -1) * whole[1]


def split_heads(
    parts: Tensor,  # [split, B * width, (Hq + 2 H) * D]
    bias: Tensor | None,  # [(Hq + 2 H) * D]
    norms: HeadNorms | None,
    cos: Tensor,  # [P, D / 2] of the model's type
    sin: Tensor,
    batch: Batch,
    keys: Tensor,  # [slots, H, P', D], written at each token's position
    values: Tensor,
) -> Tensor:
    """Queries [B * width, Hq, D]; those of padding are zeros."""
    _, kv_heads, capacity, size = keys.shape
    num_heads = parts.shape[2] // size - 2 * kv_heads
    out = torch.empty(parts.shape[1], num_heads, size, dtype=keys.dtype, device=keys.device)
    launch(
        split_heads_kernel,
        (parts.shape[1], num_heads + 2 * kv_heads),
        parts,
        bias,
        None if norms is None else norms.query,
        None if norms is None else norms.key,
        cos,
        sin,
        batch.slots,
        batch.positions,
        batch.widths,
        keys,
        values,
        out,
        batch.width,
        capacity,
        0.0 if norms is None else norms.eps,
        QUERY_HEADS=num_heads,
        KV_HEADS=kv_heads,
        SIZE=size,
        HALF=triton.next_power_of_2(size // 2),
        SPLIT=len(parts),
        **options(keys.device),
        num_warps=1,
        enable_fp_fusion=False,  # a product and a sum in one would round once
    )
    return out


@triton.jit
def head_norm(first, second, norm_ptr, d, inside, eps, SIZE: tl.constexpr):
    """RMSNorm of one head's halves."""
    mean = (tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)) / SIZE
    scale = tl.rsqrt(mean + eps)
    left = tl.load(norm_ptr + d, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(norm_ptr + SIZE // 2 + d, mask=inside, other=0.0).to(tl.float32)
    first = rounded(left * rounded(first * scale, norm_ptr), norm_ptr)
    second = rounded(right * rounded(second * scale, norm_ptr), norm_ptr)
    return first, second


@triton.jit(do_not_specialize=["width"])
def split_heads_kernel(
    parts_ptr,
    bias_ptr,
    query_norm_ptr,
    key_norm_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    positions_ptr,
    widths_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    width,
    capacity,
    eps,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, HALF)
    if OVERLAP > 0:
        announce_early(OVERLAP)
    # No kernel writes these, or one before the product in front: asked for before the wait.
    b, w = token // width, token % width
    place = settled(positions_ptr + b).to(tl.int64) + w
    size = tl.where(w < settled(widths_ptr + b), SIZE // 2, 0)  # nothing of padding is read
    slot = settled(slots_ptr + b).to(tl.int64)
    inside = d < size
    turned_size = tl.where(head < QUERY_HEADS + KV_HEADS, size, 0)
    angle = place * (SIZE // 2) + d
    cos = tl.load(cos_ptr + angle, mask=d < turned_size, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=d < turned_size, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        column, own = head * SIZE + d, d < SIZE // 2
        first_bias = tl.load(bias_ptr + column, mask=own, other=0.0).to(tl.float32)
        second_bias = tl.load(bias_ptr + column + SIZE // 2, mask=own, other=0.0).to(tl.float32)
    if OVERLAP > 0:
        wait_for_turn(OVERLAP)
    heads: tl.constexpr = QUERY_HEADS + 2 * KV_HEADS
    at = (token * heads + head) * SIZE + d
    stride = tl.num_programs(0).to(tl.int64) * (heads * SIZE)
    first = total_of_parts(parts_ptr, at, inside, stride, SPLIT)
    second = total_of_parts(parts_ptr, at + SIZE // 2, inside, stride, SPLIT)
    if bias_ptr is not None:
        first += first_bias
        second += second_bias
    first, second = rounded(first, out_ptr), rounded(second, out_ptr)
    is_query = head < QUERY_HEADS
    if head < QUERY_HEADS + KV_HEADS:
        if query_norm_ptr is not None:
            norm_ptr = tl.where(is_query, query_norm_ptr, key_norm_ptr)
            first, second = head_norm(first, second, norm_ptr, d, inside, eps, SIZE)
        turned = rounded(first * cos, out_ptr) - rounded(second * sin, out_ptr)
        second = rounded(second * cos, out_ptr) + rounded(first * sin, out_ptr)
        first = turned
    first, second = narrow(first, out_ptr), narrow(second, out_ptr)
    if is_query:
        at = (token * QUERY_HEADS + head) * SIZE + d
        tl.store(out_ptr + at, first, mask=d < SIZE // 2)
        tl.store(out_ptr + at + SIZE // 2, second, mask=d < SIZE // 2)
    else:
        to_keys = head < QUERY_HEADS + KV_HEADS
        kv = tl.where(to_keys, head - QUERY_HEADS, head - QUERY_HEADS - KV_HEADS)
        at = ((slot * KV_HEADS + kv) * capacity + place) * SIZE + d
        if to_keys:
            tl.store(keys_ptr + at, first, mask=inside)
            tl.store(keys_ptr + at + SIZE // 2, second, mask=inside)
        else:
            tl.store(values_ptr + at, first, mask=inside)
            tl.store(values_ptr + at + SIZE // 2, second, mask=inside)

# mypy: disallow-untyped-defs=False
r"""Attention of a few new tokens a row over a static cache, in chunks of keys at fixed places.

Token (b, w) stands at p = positions[b] + w and sees keys j <= p of its row's slot, with a window
only j > p - window. The G query heads that share keys lie, token after token, in tiles of 16 rows.
Chunk c holds the keys c C .. c C + C - 1. A program sums one chunk for one tile,

    m_c = max s_j,   l_c = sum exp(s_j - m_c),   a_c = sum exp(s_j - m_c) v_j,   s_j = scale q k_j,

and a second launch adds the chunks that a token sees, in groups of GROUP at fixed places, in order:

    out = sum_c exp(m_c - M) a_c / sum_c exp(m_c - M) l_c,   M = max m_c so far.

Where chunks begin and in which order they are added follows from positions alone, and what a token
does not see adds exact zeros: its bits depend on its row's tokens only. Programs past a row's end
do nothing, so that one launch serves every length up to the cache's capacity. Keys and values of
earlier tokens are asked for before the kernel in front has ended: it writes those of the new ones.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.heads import Batch
from kernels.launching import launch
from kernels.matrix import multiply, narrow
from kernels.overlap import announce_early, fetch, options, settled, wait_for_turn
from kernels.tiles import Attention, attention_tile, pipeline_bytes

ROWS = 16  # of a tile: queries times the heads of a group
GROUP = 8  # chunks added at once
WORKSPACE_BYTES = 64 << 20  # of chunk sums; more rows take their turns
LINE_BYTES = 128  # that come to the cache at once
LOG2_E = 1.4426950408889634
NO_WINDOW = (1 << 31) - 1


def attention_reference(
    query: Tensor, keys: Tensor, values: Tensor, batch: Batch, window: int | None, scale: float
) -> Tensor:
    """`decode_attention` in float64, one token after the other; shapes as there."""
    slots, positions, there = batch.places()
    kv = keys.shape[1]
    out = torch.zeros(len(query), query.shape[1], query.shape[2], dtype=torch.float64)
    for m in there.nonzero()[:, 0].tolist():
        end = int(positions[m]) + 1
        seen = slice(max(0, end - (window or end)), end)
        key, value = (states[slots[m], :, seen].double() for states in (keys, values))
        grouped = query[m].double().view(kv, -1, query.shape[2])
        weights = (scale * grouped @ key.transpose(1, 2)).softmax(-1)
        out[m] = (weights @ value).view(query.shape[1:])
    return out.to(query.device, query.dtype)


def decode_attention(
    query: Tensor,  # [B * width, Hq, D]
    keys: Tensor,  # [slots, H, capacity, D], the new tokens' own included
    values: Tensor,
    batch: Batch,
    window: int | None,  # last positions that a token sees, its own included; None: all
    scale: float,
    tile: Attention | None = None,
) -> Tensor:  # [B * width, Hq * D]
    """Each token over its row; the outputs of padding are zeros."""
    tile = tile or attention_tile(query.device)
    num_tokens, num_heads, size = query.shape
    num_chunks = triton.cdiv(keys.shape[2], tile.chunk)
    out = torch.empty(num_tokens, num_heads * size, dtype=query.dtype, device=query.device)
    token_bytes = 4 * num_heads * num_chunks * (size + 2)
    rows, tokens = _turn(len(batch.slots), batch.width, WORKSPACE_BYTES // token_bytes)
    shape = (rows * tokens * num_heads, num_chunks)
    sums = torch.empty(*shape, size, dtype=torch.float32, device=query.device)
    peaks = torch.empty(2, *shape, dtype=torch.float32, device=query.device)
    for first_row in range(0, len(batch.slots), rows):
        for first_token in range(0, batch.width, tokens):
            turn = (
                min(rows, len(batch.slots) - first_row),
                min(tokens, batch.width - first_token),
            )
            start = (first_row, first_token, *turn)
            _attend(query, keys, values, batch, window, scale, tile, sums, peaks, out, start)
    return out


def _turn(num_rows: int, width: int, most: int) -> tuple[int, int]:
    """(rows, tokens of a row) that are computed at once, at most so many tokens in all."""
    if width <= most:
        return max(1, min(num_rows, most // width)), width
    return 1, max(1, most)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: Batch,
    window: int | None,
    scale: float,
    tile: Attention,
    sums: Tensor,
    peaks: Tensor,
    out: Tensor,
    turn: tuple[int, int, int, int],
) -> None:
    first_row, first_token, rows, tokens = turn
    _, kv_heads, capacity, size = keys.shape
    num_heads = query.shape[1]
    num_chunks = sums.shape[1]
    places = (batch.slots, batch.positions, batch.widths)
    sizes = (batch.width, first_row, first_token, tokens, num_chunks)
    shape = {"QUERY_HEADS": num_heads, "SIZE": size, "WIDE": max(16, triton.next_power_of_2(size))}
    seen = NO_WINDOW if window is None else window
    tiles = triton.cdiv(tokens * (num_heads // kv_heads), ROWS)
    launch(
        attend_chunk_kernel,
        (num_chunks, kv_heads * tiles, rows),
        query,
        keys,
        values,
        *places,
        sums,
        peaks,
        *sizes,
        capacity,
        seen,
        scale * LOG2_E,
        KV_HEADS=kv_heads,
        CHUNK=tile.chunk,
        BLOCK=tile.block,
        ROWS=ROWS,
        LINE=min(size, LINE_BYTES // keys.element_size()),
        **shape,
        **options(query.device),
        num_warps=tile.num_warps,
        num_stages=tile.stages(shape["WIDE"] * keys.element_size(), pipeline_bytes(keys.device)),
    )
    launch(
        merge_chunks_kernel,
        (rows * tokens, num_heads),
        *places,
        sums,
        peaks,
        out,
        *sizes,
        seen,
        CHUNK=tile.chunk,
        GROUP=GROUP,
        **shape,
        **options(query.device),
        num_warps=4 if size > 64 else 2,
    )


SIZES = ["width", "first_row", "first_token", "tokens", "num_chunks", "window"]


@triton.jit(do_not_specialize=SIZES)
def attend_chunk_kernel(
    query_ptr,
    keys_ptr,
    values_ptr,
    slots_ptr,
    positions_ptr,
    widths_ptr,
    sums_ptr,
    peaks_ptr,
    width,
    first_row,
    first_token,
    tokens,
    num_chunks,
    capacity,
    window,
    scale,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    LINE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP > 0:
        announce_early(OVERLAP)
    # Written before the last product: where rows stand, and the keys of their earlier tokens.
    chunk, h, turn_row = tl.program_id(0), tl.program_id(1) % KV_HEADS, tl.program_id(2)
    tile, b = tl.program_id(1) // KV_HEADS, first_row + turn_row
    group: tl.constexpr = QUERY_HEADS // KV_HEADS
    first = settled(positions_ptr + b)
    end = first + settled(widths_ptr + b)  # keys of the row, new ones included
    slot = settled(slots_ptr + b).to(tl.int64)
    r = tile * ROWS + tl.arange(0, ROWS)
    turn_token = r // group
    head = h * group + r % group
    place = first + first_token + turn_token
    there = (turn_token < tokens) & (place < end)
    lowest = first + first_token + tile * ROWS // group
    start = chunk * CHUNK
    # The tile's first token is its lowest; its last sees the farthest key.
    last = tl.max(tl.where(there, place, -1), axis=0)
    seen = (start <= last) & (start + CHUNK > lowest - window + 1)
    d = tl.arange(0, WIDE)
    own = d[None, :] < SIZE
    base = (slot * KV_HEADS + h) * capacity * SIZE
    if OVERLAP > 0:
        if seen:
            old = base + tl.minimum(start + tl.arange(0, CHUNK), first).to(tl.int64) * SIZE
            at = old[:, None] + tl.minimum(tl.arange(0, WIDE // LINE) * LINE, SIZE - 1)[None, :]
            fetch(keys_ptr + at)
            fetch(values_ptr + at)
        wait_for_turn(OVERLAP)
    if seen:
        token = b.to(tl.int64) * width + first_token + turn_token
        rows = (token * QUERY_HEADS + head) * SIZE
        q = tl.load(query_ptr + rows[:, None] + d[None, :], mask=there[:, None] & own, other=0.0)
        peak = tl.full((ROWS,), -float("inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        mixed = tl.zeros((ROWS, WIDE), tl.float32)
        for block in range(0, CHUNK // BLOCK):
            j = start + block * BLOCK + tl.arange(0, BLOCK)
            at = base + j.to(tl.int64)[:, None] * SIZE + d[None, :]
            inside = (j < end)[:, None] & own
            key = tl.load(keys_ptr + at, mask=inside, other=0.0)
            value = tl.load(values_ptr + at, mask=inside, other=0.0)
            scores = multiply(q, tl.trans(key), tl.zeros((ROWS, BLOCK), tl.float32)) * scale
            distance = place[:, None] - j[None, :]
            visible = (distance >= 0) & (distance < window) & there[:, None]
            scores = tl.where(visible, scores, -float("inf"))
            higher = tl.maximum(peak, tl.max(scores, axis=1))
            level = tl.where(higher == -float("inf"), 0.0, higher)
            weights = tl.exp2(scores - level[:, None])
            fade = tl.exp2(peak - level)
            total = total * fade + tl.sum(weights, axis=1)
            mixed = multiply(narrow(weights, values_ptr), value, mixed * fade[:, None])
            peak = higher
        cells = turn_row.to(tl.int64) * tokens + turn_token
        cells = (cells * QUERY_HEADS + head) * num_chunks + chunk
        half = tl.num_programs(2).to(tl.int64) * tokens * QUERY_HEADS * num_chunks
        tl.store(peaks_ptr + cells, peak, mask=there)
        tl.store(peaks_ptr + half + cells, total, mask=there)
        tl.store(sums_ptr + cells[:, None] * SIZE + d[None, :], mixed, mask=there[:, None] & own)


@triton.jit(do_not_specialize=SIZES)
def merge_chunks_kernel(
    slots_ptr,
    positions_ptr,
    widths_ptr,
    sums_ptr,
    peaks_ptr,
    out_ptr,
    width,
    first_row,
    first_token,
    tokens,
    num_chunks,
    window,
    QUERY_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP > 0:
        announce_early(OVERLAP)
    cell, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b = first_row + cell // tokens
    w = first_token + cell % tokens
    place = settled(positions_ptr + b) + w
    there = w < settled(widths_ptr + b)
    if OVERLAP > 0:
        wait_for_turn(OVERLAP)
    d, g = tl.arange(0, WIDE), tl.arange(0, GROUP)
    own = d < SIZE
    mixed = tl.zeros((WIDE,), tl.float32)
    if there:
        start = (cell * QUERY_HEADS + head) * num_chunks
        half = tl.num_programs(0).to(tl.int64) * QUERY_HEADS * num_chunks
        first_chunk = tl.maximum(place - window + 1, 0) // CHUNK
        end = place // CHUNK + 1
        peak = place.to(tl.float32) * 0.0 - float("inf")
        total = place.to(tl.float32) * 0.0
        for number in range(first_chunk // GROUP, (end + GROUP - 1) // GROUP):
            chunk = number * GROUP + g
            seen = (chunk >= first_chunk) & (chunk < end)
            peaks = tl.load(peaks_ptr + start + chunk, mask=seen, other=-float("inf"))
            sums = tl.load(peaks_ptr + half + start + chunk, mask=seen, other=0.0)
            at = (start + chunk)[:, None] * SIZE + d[None, :]
            inside = seen[:, None] & own[None, :]
            mixtures = tl.load(sums_ptr + at, mask=inside, other=0.0)
            higher = tl.maximum(peak, tl.max(peaks, axis=0))
            fade, weights = tl.exp2(peak - higher), tl.exp2(peaks - higher)
            total = total * fade + tl.sum(weights * sums, axis=0)
            mixed = mixed * fade + tl.sum(weights[:, None] * mixtures, axis=0)
            peak = higher
        mixed = mixed / total
    at = ((b.to(tl.int64) * width + w) * QUERY_HEADS + head) * SIZE + d
    tl.store(out_ptr + at, narrow(mixed, out_ptr), mask=own)

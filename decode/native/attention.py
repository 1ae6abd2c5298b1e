"""Attention of one row's new tokens over its cache, grouped heads read once.

The query heads that share keys and values are laid one after the other as more queries of one head,
so nothing is repeated: [W, kv heads, group, head_dim] becomes [kv heads, 1, W * group, head_dim].

Pinned attention makes a token's sums depend on its position alone, not on the tokens read beside
it: keys are padded to a multiple of BLOCK that follows from the query's own position, the rest
masked, which adds exact zeros; queries are padded to a multiple of QUERY_BLOCK, so that the kernels
for a few rows are never taken. Tokens on two sides of a block's end are computed apart.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  as everywhere
from torch import Tensor

from decode.native.architecture import Architecture
from decode.native.cache import BLOCK, CacheRow

QUERY_BLOCK = 8


@dataclass(frozen=True)
class Span:
    """Tokens of one pass that attend together."""

    first: int  # among the tokens of the pass
    end: int
    num_keys: int
    masks: dict[int | None, Tensor | None]  # by window: [queries, num_keys], added to scores
    queries: Tensor | None  # [kv heads, 1, queries, head_dim], written anew by every layer


class RowAttention:
    """One row's part in one pass over the layers: what it reads, and what each token sees."""

    def __init__(
        self,
        row: CacheRow,
        num_tokens: int,
        architecture: Architecture,
        like: Tensor,  # of the device and type of the activations
        pinned: bool,
    ) -> None:
        self._row = row
        self._architecture = architecture
        places = range(row.length, row.length + num_tokens)
        self._spans = [
            make_span(row.length, first, end, num_keys, architecture, like, pinned)
            for first, end, num_keys in (
                _pinned_spans(places) if pinned else [(0, num_tokens, places.stop)]
            )
        ]

    def __call__(self, layer: int, heads: Tensor) -> Tensor:  # [W, all heads, head_dim]
        """Write keys and values, and attend: [W, query heads * head_dim].

        `heads` holds query heads, then key heads, then value heads.
        """
        self._row.write(layer, heads[:, self._architecture.num_heads :])
        parts = [self._attend(layer, heads, span) for span in self._spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(self, layer: int, heads: Tensor, span: Span) -> Tensor:
        a, width = self._architecture, span.end - span.first
        shape = (a.num_kv_heads, width, a.group_size, a.head_dim)
        size = width * a.group_size
        queries = heads[span.first : span.end, : a.num_heads]
        if span.queries is None:  # one token: its heads lie as they should
            grouped = queries.reshape(a.num_kv_heads, 1, a.group_size, a.head_dim)
        else:
            by_head = queries.unflatten(1, (a.num_kv_heads, a.group_size)).transpose(0, 1)
            span.queries[:, 0, :size].view(shape).copy_(by_head)
            grouped = span.queries
        keys, values = self._row.read(layer, span.num_keys)
        mask = span.masks[a.windows[layer]]
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        return out[:, 0, :size].view(shape).transpose(0, 1).reshape(width, -1)


def make_span(
    length: int,
    first: int,
    end: int,
    num_keys: int,
    architecture: Architecture,
    like: Tensor,
    pinned: bool,
) -> Span:
    """Tokens first .. end - 1 of a pass that follows `length` tokens."""
    num_queries = (end - first) * architecture.group_size
    if pinned:
        num_queries = _round_up(num_queries, QUERY_BLOCK)
    masks: dict[int | None, Tensor | None] = dict.fromkeys(architecture.windows)
    alone = not pinned and end - first == 1
    if not alone or any(window is not None and num_keys > window for window in masks):
        query = torch.arange(length + first, length + end, device=like.device)
        query = query.repeat_interleave(architecture.group_size)
        # Padded queries see what the first one sees, so that none sees nothing.
        query = F.pad(query, (0, num_queries - len(query)), value=length + first)
        masks = {window: _mask(query, num_keys, window, like) for window in masks}
    shape = (architecture.num_kv_heads, 1, num_queries, architecture.head_dim)
    return Span(first, end, num_keys, masks, None if alone else like.new_zeros(shape))


def _pinned_spans(places: range) -> Iterator[tuple[int, int, int]]:
    """(first, end, number of keys) of the tokens that share a number of keys."""
    first = places.start
    while first < places.stop:
        num_keys = _round_up(first + 1, BLOCK)
        end = min(num_keys, places.stop)
        yield first - places.start, end - places.start, num_keys
        first = end


def _mask(query: Tensor, num_keys: int, window: int | None, like: Tensor) -> Tensor:
    """[queries, num_keys]: zero where a key is seen, else minus infinity."""
    key = torch.arange(num_keys, device=like.device)
    query = query[:, None]
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return like.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


def _round_up(number: int, block: int) -> int:
    return -(-number // block) * block

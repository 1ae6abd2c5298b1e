"""The forward: every token of every row in one product, each row's attention over its own cache.

For one layer, with x [N, hidden size] of the N tokens of all rows:
    x = x + output(attention(rope(qkv(norm(x)))));  x = x + down(silu(gate(norm(x))) * up(norm(x)))
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F  # noqa: N812  as everywhere
from torch import Tensor

from decode.native.architecture import Architecture
from decode.native.attention import RowAttention
from decode.native.cache import CacheRow
from decode.native.rope import RopeTable, rotate_
from decode.native.weights import Layer, Weights

# Products of one row take another kernel, with other sums, than those of two rows or more.
FEWEST_ROWS = 2


class Forward:
    """Weights and tables; holds no row.

    With `pinned`, a lone token is computed as two rows, so that all widths share one kernel.
    """

    def __init__(
        self, architecture: Architecture, weights: Weights, rope: RopeTable, pinned: bool
    ) -> None:
        self.architecture = architecture
        self.weights = weights
        self.rope = rope
        self.pinned = pinned

    def __call__(
        self, rows: Sequence[CacheRow], token_ids: Sequence[Sequence[int]], with_logits: bool
    ) -> Tensor | None:  # [N, V], rows one after the other
        """Read each row's tokens into its cache; their raw logits, where they are asked for."""
        a, device = self.architecture, self.weights.embedding.device
        widths = [len(ids) for ids in token_ids]
        for row, width in zip(rows, widths, strict=True):
            row.reserve(width)
        self.rope.reach(max(row.length + width for row, width in zip(rows, widths, strict=True)))
        flat = [token for ids in token_ids for token in ids]
        places = [
            row.length + i for row, width in zip(rows, widths, strict=True) for i in range(width)
        ]
        num_tokens = len(flat)
        if self.pinned and num_tokens < FEWEST_ROWS:
            flat, places = flat * FEWEST_ROWS, places * FEWEST_ROWS
        attentions = [
            RowAttention(row, width, a, self.weights.embedding, self.pinned)
            for row, width in zip(rows, widths, strict=True)
        ]
        ends = list(accumulate(widths))
        spans = [(end - width, end) for end, width in zip(ends, widths, strict=True)]
        cos, sin = self.rope.at(torch.tensor(places, device=device))
        x = F.embedding(torch.tensor(flat, device=device), self.weights.embedding)
        for number, layer in enumerate(self.weights.layers):
            heads = self._heads(layer, x, cos, sin)
            parts = [
                attend(number, heads[start:end])
                for attend, (start, end) in zip(attentions, spans, strict=True)
            ]
            if not with_logits and number == a.num_layers - 1:
                break
            if len(flat) > num_tokens:
                parts.append(parts[0])
            seen = parts[0] if len(parts) == 1 else torch.cat(parts)
            x = self._mix(layer, layer.output.plus(seen, x))
        for row, width in zip(rows, widths, strict=True):
            row.length += width
        if not with_logits:
            return None
        return self.weights.head(self._norm(x, self.weights.norm))[:num_tokens]

    def _heads(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[N, query, key and value heads, head_dim], queries and keys turned to their places."""
        a = self.architecture
        heads = layer.qkv(self._norm(x, layer.input_norm)).view(len(x), -1, a.head_dim)
        turned = heads[:, : a.num_heads + a.num_kv_heads]
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys = turned[:, : a.num_heads], turned[:, a.num_heads :]
            queries.copy_(self._norm(queries, layer.query_norm))
            keys.copy_(self._norm(keys, layer.key_norm))
        rotate_(turned, cos, sin)
        return heads

    def _mix(self, layer: Layer, x: Tensor) -> Tensor:
        normed = self._norm(x, layer.mlp_norm)
        return layer.down.plus(layer.up.times(normed, layer.gate.silu(normed)), x)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.architecture.norm_eps)

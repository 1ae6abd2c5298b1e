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


class Pass:
    """What one pass reads: every row's new tokens behind one another, and where each row's lie."""

    def __init__(
        self,
        rows: Sequence[CacheRow],
        token_ids: Sequence[Sequence[int]],
        architecture: Architecture,
        like: Tensor,
        pinned: bool,
    ) -> None:
        widths = [len(ids) for ids in token_ids]
        ends = list(accumulate(widths))
        pairs = list(zip(rows, widths, strict=True))
        for row, width in pairs:
            row.reserve(width)
        self.num_tokens = ends[-1]
        self.num_positions = max(row.length + width for row, width in pairs)
        token_list = [token for ids in token_ids for token in ids]
        places = [row.length + i for row, width in pairs for i in range(width)]
        self.is_doubled = pinned and self.num_tokens < FEWEST_ROWS
        if self.is_doubled:
            token_list, places = token_list * FEWEST_ROWS, places * FEWEST_ROWS
        self.token_ids = torch.tensor(token_list, device=like.device)
        self.positions = torch.tensor(places, device=like.device)
        self.last_places = [end - 1 for end in ends]
        self._pairs = pairs
        self._spans = [
            (RowAttention(row, width, architecture, like, pinned), slice(end - width, end))
            for (row, width), end in zip(pairs, ends, strict=True)
        ]

    def attend(self, layer: int, heads: Tensor) -> Tensor:  # [N, query heads * head_dim]
        """Every row over its own cache, which takes in its new keys and values."""
        parts = [attention(layer, heads[span]) for attention, span in self._spans]
        if self.is_doubled:
            parts *= FEWEST_ROWS
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def finish(self) -> None:
        """The rows have read their tokens."""
        for row, width in self._pairs:
            row.length += width


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
        under_way = self._begin(rows, token_ids)
        x, seen = self._read(under_way)
        if not with_logits:
            return None
        return self._answer(x, seen)[: under_way.num_tokens]

    def last(
        self, rows: Sequence[CacheRow], token_ids: Sequence[Sequence[int]]
    ) -> Tensor:  # [B, V]
        """Read each row's tokens; the raw logits after each row's last one.

        Not where passes are pinned: a token's sums would follow from how many rows there are.
        """
        assert not self.pinned
        under_way = self._begin(rows, token_ids)
        x, seen = self._read(under_way)
        if len(x) > len(rows):
            x, seen = x[under_way.last_places], seen[under_way.last_places]
        return self._answer(x, seen)

    def _begin(self, rows: Sequence[CacheRow], token_ids: Sequence[Sequence[int]]) -> Pass:
        like = self.weights.norm
        return Pass(rows, token_ids, self.architecture, like, self.pinned)

    def _read(self, under_way: Pass) -> tuple[Tensor, Tensor]:
        """What the last layer is given, and what its heads have seen; all caches are written."""
        self.rope.reach(under_way.num_positions)
        cos, sin = self.rope.at(under_way.positions)
        x = F.embedding(under_way.token_ids, self.weights.embedding).to(self.weights.norm.dtype)
        *others, last = self.weights.layers
        for number, layer in enumerate(others):
            seen = under_way.attend(number, self._heads(layer, x, cos, sin))
            x = self._mix(layer, layer.output.plus(seen, x))
        seen = under_way.attend(len(others), self._heads(last, x, cos, sin))
        under_way.finish()
        return x, seen

    def _answer(self, x: Tensor, seen: Tensor) -> Tensor:  # [N, V]
        """The rest of the last layer, and the head."""
        layer, head = self.weights.layers[-1], self.weights.head
        x = self._mix(layer, layer.output.plus(seen, x))
        return head(self._norm(x, self.weights.norm).to(head.weight.dtype))

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

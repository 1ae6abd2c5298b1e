"""Attention of one row's new tokens over its cache, grouped heads read once.

The query heads that share keys and values are laid one after the other as more queries of one head,
so nothing is repeated: [W, kv heads, group, head_dim] becomes [kv heads, 1, W * group, head_dim].
"""

import torch
import torch.nn.functional as F  # noqa: N812  as everywhere
from torch import Tensor

from decode.native.architecture import Architecture
from decode.native.cache import CacheRow


class RowAttention:
    """One row's part in one pass: how many tokens it reads, after how many, and what they see."""

    def __init__(
        self, row: CacheRow, num_tokens: int, architecture: Architecture, dtype: torch.dtype
    ) -> None:
        self._row = row
        self._num_tokens = num_tokens
        self._architecture = architecture
        self._end = row.length + num_tokens
        device = row.device
        self._masks: dict[int | None, Tensor | None] = {
            window: self._mask(window, dtype, device) for window in set(architecture.windows)
        }

    def __call__(self, layer: int, heads: Tensor) -> Tensor:  # [W, all heads, head_dim]
        """Write keys and values, and attend: [W, query heads * head_dim].

        `heads` holds query heads, then key heads, then value heads.
        """
        a, width = self._architecture, self._num_tokens
        self._row.write(layer, heads[:, a.num_heads :])
        keys, values = self._row.read(layer, 0, self._end)
        queries = heads[:, : a.num_heads]
        grouped = queries.unflatten(1, (a.num_kv_heads, a.group_size)).transpose(0, 1)
        out = F.scaled_dot_product_attention(
            grouped.reshape(a.num_kv_heads, 1, width * a.group_size, a.head_dim),
            keys,
            values,
            attn_mask=self._masks[a.windows[layer]],
        )
        out = out.view(a.num_kv_heads, width, a.group_size, a.head_dim).transpose(0, 1)
        return out.reshape(width, a.num_heads * a.head_dim)

    def _mask(self, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """[W * group, T], added to scores; None where all is seen."""
        first = self._end - self._num_tokens
        if self._num_tokens == 1 and (window is None or self._end <= window):
            return None
        query = torch.arange(first, self._end, device=device)[:, None]
        key = torch.arange(self._end, device=device)
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
        mask.masked_fill_(hidden, float("-inf"))
        return mask.repeat_interleave(self._architecture.group_size, dim=0)

"""Rotary positions as tables: cosines and sines of every position, made once and looked up.

With halves x = (x1, x2) of a head, rotation by the angles a of its position is
    (x1 cos a - x2 sin a, x2 cos a + x1 sin a) = x * (cos a, cos a) + (x2, x1) * (-sin a, sin a).
"""

from typing import Any

import torch
from torch import Tensor

from decode.native.architecture import UnsupportedModelError


class RopeTable:
    """(cos, signed sin) of positions 0, 1, ...; grows by doubling."""

    def __init__(
        self, rotary: Any, head_dim: int, dtype: torch.dtype, num_positions: int = 256
    ) -> None:
        # What the first positions turn by; a dynamic kind may have moved its other copy since.
        frequencies = getattr(rotary, "original_inv_freq", rotary.inv_freq)
        if 2 * frequencies.numel() != head_dim:
            raise UnsupportedModelError(
                f"RoPE turns {2 * frequencies.numel()} of {head_dim} values of a head"
            )
        self._frequencies = frequencies.detach().float().clone()  # [head_dim / 2]
        self._scaling = float(rotary.attention_scaling)
        self._dtype = dtype
        self._make(num_positions)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:  # [N] -> 2 x [N, 1, head_dim]
        """Factors that broadcast over heads; the positions must have been reached."""
        return self._cos[positions], self._sin[positions]

    def reach(self, num_positions: int) -> None:
        """Have positions 0 .. num_positions - 1 at hand."""
        if num_positions > len(self._cos):
            self._make(max(num_positions, 2 * len(self._cos)))

    def _make(self, num_positions: int) -> None:
        places = torch.arange(num_positions, device=self._frequencies.device)
        angles = places[:, None].float() * self._frequencies
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        self._cos = torch.cat([cos, cos], dim=-1).to(self._dtype)[:, None]
        self._sin = torch.cat([-sin, sin], dim=-1).to(self._dtype)[:, None]


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:  # [N, heads, head_dim]
    """Turn the heads in place."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    heads.mul_(cos).addcmul_(swapped, sin)

"""Keys and values of many rows in one place, at addresses that a captured pass can rely on.

Row r of layer l is keys[l, r] and values[l, r], [H, capacity, D]. More rows or longer ones than fit
move everything to a larger place, doubled each time, after which whatever was captured is stale.
"""

import weakref

import torch
from torch import Tensor

from decode.native.architecture import Architecture

FIRST_ROWS = 1
FIRST_CAPACITY = 1024  # tokens
BLOCK = 128  # capacities are multiples of it


class StaticRow:
    """One row's slot; it is handed out again when nobody holds the row any more."""

    def __init__(self, cache: "StaticCache", slot: int) -> None:
        self.cache = cache
        self.slot = slot
        self.length = 0

    def reserve(self, num_tokens: int) -> None:
        """Make room for that many more; raises ValueError where the context ends before."""
        needed, limit = self.length + num_tokens, self.cache.architecture.max_context
        if needed > limit:
            raise ValueError(
                f"a row of {self.length} tokens cannot take {num_tokens} more: the context holds "
                f"{limit}; cut the prompt"
            )
        self.cache.reserve(num_tokens=needed)


class StaticCache:
    """All rows' keys and values."""

    def __init__(
        self, architecture: Architecture, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.architecture = architecture
        self.version = 0  # how often everything has moved
        self._free: list[int] = []
        self._num_slots = 0
        self._dtype, self._device = dtype, device
        self._store(FIRST_ROWS, FIRST_CAPACITY)

    @property
    def num_rows(self) -> int:
        return self.keys.shape[1]

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def open(self) -> StaticRow:
        """A row that holds nothing yet."""
        if not self._free:
            self.reserve(num_rows=2 * self.num_rows)
        slot = self._free.pop()
        row = StaticRow(self, slot)
        weakref.finalize(row, self._free.append, slot)
        return row

    def reserve(self, *, num_rows: int = 0, num_tokens: int = 0) -> None:
        """Have room for that many rows and for that many tokens in each."""
        if num_rows <= self.num_rows and num_tokens <= self.capacity:
            return
        capacity = self.capacity
        if num_tokens > capacity:
            capacity = max(num_tokens, 2 * capacity)
        old = self.keys, self.values
        self._store(max(num_rows, self.num_rows), capacity)
        for new, held in zip((self.keys, self.values), old, strict=True):
            new[:, : held.shape[1], :, : held.shape[3]] = held
        self.version += 1

    def _store(self, num_rows: int, capacity: int) -> None:
        """Zeros, since what is masked may be multiplied by zero all the same."""
        a = self.architecture
        capacity = -(-min(capacity, a.max_context) // BLOCK) * BLOCK
        shape = (a.num_layers, num_rows, a.num_kv_heads, capacity, a.head_dim)
        self._free += range(self._num_slots, num_rows)
        self._num_slots = num_rows
        with torch.inference_mode(False):  # so that they can be written in any mode
            self.keys = torch.zeros(shape, dtype=self._dtype, device=self._device)
            self.values = torch.zeros(shape, dtype=self._dtype, device=self._device)

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, H, capacity, D] of one layer."""
        return self.keys[number], self.values[number]

"""Keys and values of one row: storage that grows by doubling, and forgets by moving one number."""

import torch
from torch import Tensor

from decode.native.architecture import Architecture

FIRST_CAPACITY = 256  # tokens
BLOCK = 64  # capacities are multiples of it, so that keys may be read past a row's end


class CacheRow:
    """One row's cache. Token-major, so that a step writes one stretch and a layer reads another."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype, device: torch.device):
        self.length = 0
        self._architecture = architecture
        self._store(self._new(FIRST_CAPACITY, dtype, device))

    @property
    def capacity(self) -> int:
        return len(self._storage[0])

    @property
    def device(self) -> torch.device:
        return self._storage.device

    @property
    def num_bytes(self) -> int:
        return self._storage.nbytes

    def reserve(self, num_tokens: int) -> None:
        """Make room for that many more; raises ValueError where the context ends before."""
        needed, limit = self.length + num_tokens, self._architecture.max_context
        if needed > limit:
            raise ValueError(
                f"a row of {self.length} tokens cannot take {num_tokens} more: the context holds "
                f"{limit}; cut the prompt"
            )
        if needed > self.capacity:
            old = self._storage
            new = self._new(max(needed, 2 * self.capacity), old.dtype, old.device)
            new[:, : self.length] = old[:, : self.length]
            self._store(new)

    def write(self, layer: int, keys_values: Tensor) -> None:  # [W, 2 * kv heads, head_dim]
        """Keep what a layer made of the W tokens after `length`."""
        self._layers[layer][self.length : self.length + len(keys_values)] = keys_values

    def read(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [kv heads, 1, end, head_dim] of the first positions."""
        return self._keys[layer][:, :, :end], self._values[layer][:, :, :end]

    def _new(self, capacity: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros, since what is masked is multiplied by zero all the same."""
        a = self._architecture
        capacity = -(-min(capacity, a.max_context) // BLOCK) * BLOCK
        shape = (a.num_layers, capacity, 2 * a.num_kv_heads, a.head_dim)
        return torch.zeros(shape, dtype=dtype, device=device)

    def _store(self, storage: Tensor) -> None:
        kv = self._architecture.num_kv_heads
        self._storage = storage
        self._layers = list(storage)
        heads_first = [layer.transpose(0, 1).unsqueeze(1) for layer in storage]
        self._keys = [layer[:kv] for layer in heads_first]
        self._values = [layer[kv:] for layer in heads_first]

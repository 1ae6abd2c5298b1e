"""How the products are cut into programs: one choice by device and by shape of the weight.

A choice never depends on the number of rows, since the order of a sum follows from it: that is what
makes a row's result the same beside any other rows. Only the number of rows that a program takes
grows with them, and the depth of its pipeline, which no sum knows of. Choices that were measured
(`python -m pipeline.bench_engine TARGET --sweep`) stand in tables; all other shapes follow a rule.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
from triton.runtime import driver

ROW_BLOCKS = (16, 32, 64, 128)  # rows a program takes, the smallest that holds them all
SHARED_BYTES = 232_448  # that a program may have, where there is no CUDA device to say so
SPARE_BYTES = 32_768  # of them, beside a program's pipeline
PROGRAMS = 264  # two a multiprocessor, which hide each other's starts and ends
SHORT = 3  # blocks of a share that all fit there
EARLY_BYTES = 49_152  # of a program's registers, of the 256 KB that a multiprocessor has
UNEVEN = 1.1  # blocks that shares of one size may have, over those that there are


@dataclass(frozen=True)
class Tile:
    """One program's share of y = x W^T."""

    block_n: int  # rows of W
    block_k: int  # columns of W at a time
    split: int  # programs that share the columns, their sums added in order
    num_warps: int
    num_stages: int

    def stages(self, block_m: int, num_weights: int, itemsize: int, early: int, shared: int) -> int:
        """As many blocks under way as `shared` bytes hold beside those asked for early."""
        block_bytes = self._block_bytes(block_m, num_weights, itemsize)
        return max(1, min(self.num_stages, shared // block_bytes - early))

    def early(self, num_in: int, itemsize: int, shared: int) -> int:
        """Blocks of a share that are asked for before its turn: all of a short one, else two.

        No more than `shared` bytes hold beside one other, whatever the number of rows.
        """
        share = triton.cdiv(triton.cdiv(num_in, self.block_k), self.split)
        wanted = share if share <= SHORT else 2
        fit = shared // self._block_bytes(ROW_BLOCKS[-1], 1, itemsize) - 1
        held = EARLY_BYTES // (self.block_n * self.block_k * itemsize)
        return max(0, min(wanted, held, fit))

    def _block_bytes(self, block_m: int, num_weights: int, itemsize: int) -> int:
        return (num_weights * self.block_n + block_m) * self.block_k * itemsize


@dataclass(frozen=True)
class Attention:
    """How the keys of a row are cut."""

    chunk: int  # keys whose sums are added up by one program
    block: int  # of them at a time
    num_warps: int
    num_stages: int

    def stages(self, key_bytes: int, shared: int) -> int:
        """As many blocks of keys and values under way as `shared` bytes hold."""
        return max(1, min(self.num_stages, shared // (2 * self.block * key_bytes)))


Key = tuple[str, int, int]  # kind of product, rows and columns of the weight
# By compute capability.
TILES: dict[tuple[int, int], dict[Key, Tile]] = {
    (9, 0): {  # H200; Qwen2.5-1.5B's shapes
        ("parts", 2048, 1536): Tile(64, 128, 4, 4, 5),
        ("parts", 1536, 1536): Tile(64, 128, 6, 4, 3),
        ("gated", 8960, 1536): Tile(64, 64, 1, 4, 5),
        ("parts", 1536, 8960): Tile(64, 128, 5, 4, 5),
        ("whole", 151936, 1536): Tile(64, 128, 1, 4, 4),
    },
}
ATTENTION: dict[tuple[int, int], Attention] = {}
DEFAULT_ATTENTION = Attention(chunk=128, block=64, num_warps=4, num_stages=3)


def product_tile(kind: str, num_out: int, num_in: int, device: torch.device) -> Tile:
    """The choice for W [num_out, num_in].

    Kinds: "whole" (one program sums all columns), "parts", "gated" (two weights side by side).
    """
    found = TILES.get(capability(device), {}).get((kind, num_out, num_in))
    return found or rule(kind, num_out, num_in)


def attention_tile(device: torch.device) -> Attention:
    """The choice for a device."""
    return ATTENTION.get(capability(device), DEFAULT_ATTENTION)


def rule(kind: str, num_out: int, num_in: int) -> Tile:
    """Enough programs to fill a large chip, each with a few blocks of columns at least."""
    block_k = 128 if num_in >= 512 else 32
    block_n = 64 if num_out >= 64 * PROGRAMS else 32
    split = 1
    if kind == "parts":
        blocks = triton.cdiv(num_in, block_k)
        wanted = max(1, round(PROGRAMS * block_n / num_out))
        # Shares of about equal size, so that none ends last.
        fits = [
            shares
            for shares in range(1, min(2 * wanted, blocks) + 1)
            if triton.cdiv(blocks, shares) * shares <= UNEVEN * blocks
        ]
        # Shares that are equal need no mask, which is worth a third more or fewer of them.
        split = min(fits, key=lambda s: abs(s - wanted) + (blocks % s != 0) * wanted / 3)
    return Tile(block_n=block_n, block_k=block_k, split=split, num_warps=4, num_stages=4)


def row_block(num_rows: int) -> int:
    """Rows that a program takes."""
    return next((size for size in ROW_BLOCKS if size >= num_rows), ROW_BLOCKS[-1])


@cache
def pipeline_bytes(device: torch.device) -> int:
    """Shared memory that a program's pipeline may have."""
    most = SHARED_BYTES
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        most = driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return most - SPARE_BYTES


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability; (0, 0) for what is no CUDA device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)

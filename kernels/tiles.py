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

ROW_BLOCKS = (16, 32, 64, 128)  # rows a program takes, the smallest that holds them all
SHARED_BYTES = 200_000  # of a program's pipeline, of the 227 KB that a multiprocessor has
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

    def stages(self, block_m: int, num_weights: int, itemsize: int, early: int = 0) -> int:
        """As many blocks under way as the shared memory holds beside those asked for early."""
        block_bytes = (num_weights * self.block_n + block_m) * self.block_k * itemsize
        return max(1, min(self.num_stages, SHARED_BYTES // block_bytes - early))

    def early(self, num_in: int, itemsize: int) -> int:
        """Blocks of a share that are asked for before its turn: all of a short one, else two."""
        share = triton.cdiv(triton.cdiv(num_in, self.block_k), self.split)
        wanted = share if share <= SHORT else 2
        return min(wanted, EARLY_BYTES // (self.block_n * self.block_k * itemsize))


@dataclass(frozen=True)
class Attention:
    """How the keys of a row are cut."""

    chunk: int  # keys whose sums are added up by one program
    block: int  # of them at a time
    num_warps: int
    num_stages: int


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
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability; (0, 0) for what is no CUDA device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)

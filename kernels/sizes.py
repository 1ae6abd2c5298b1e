"""Sizes of verification's launches that may differ by the number of rows: no sum knows of them.

What a sum's order follows from (BLOCK, WARPS, TILE, TILE_WARPS of kernels/verify.py, RULE_WARPS of
kernels/stats.py) is the same for every batch, so that a row's result is too. `python -m
pipeline.bench_kernels --sweep --out FOLDER` measures both kinds.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one batch; registers are a thread's, at most."""

    registers: int = 72  # launch 1: seven splits of four warps on a multiprocessor
    rule_registers: int = 128  # where penalties and groups take registers
    rule_rows: int = 64  # programs of launch 1 that then share a sequence's rows, at most
    tile_registers: int = 80  # launch 2: three programs of eight warps on a multiprocessor
    rule_tile_registers: int = 128
    ahead: int = 1  # of launch 2: is a tile's successor asked for before the tile is summed?
    programs: int = 396  # of launch 2, where there are tiles for them: all that are under way


TABLE: tuple[
    tuple[int, Sizes], ...
] = (  # rows up to which a choice holds; the last holds for any number
    (8, Sizes()),
    (64, Sizes(rule_rows=3)),
)


def sizes(batch: int) -> Sizes:
    """The choice for so many rows."""
    return next((chosen for rows, chosen in TABLE if batch <= rows), TABLE[-1][1])

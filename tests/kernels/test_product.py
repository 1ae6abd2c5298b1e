"""Would catch: a product that sums in another order for another number of rows, or whose rows touch
one another; columns of a ragged block counted twice or lost, rows of W past its end written out;
shares that overlap; a bias added to the wrong row; rounding in another place than a model of single
operations has; weights that are read although all rows are padding.

Bits: a row alone, in every width, and at every place among other rows. Tolerances: float32 over at
most 320 columns against float64, 1e-5 of the largest value; 16-bit results may fall on the other
side of one rounding, 2^-7 of their size in bfloat16 (twice that through a gate), 2^-10 in float16.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.product import (
    gated_product,
    gated_reference,
    parts_reference,
    product,
    product_parts,
    product_reference,
)
from kernels.tiles import ROW_BLOCKS, SPARE_BYTES, TILES, Tile, product_tile, row_block, rule

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
DTYPES = tuple(ROUNDING)
# Whole blocks and shares; ragged columns; ragged rows of W and a last share with nothing in it.
SHAPES = [(48, 64, Tile(16, 32, 2, 4, 2)), (64, 100, Tile(32, 32, 2, 4, 2))]
SHAPES += [(53, 36, Tile(16, 16, 4, 4, 2)), (16, 320, Tile(16, 64, 5, 4, 3))]
# Shares that are read early in part, whole and ragged ones.
SHAPES += [(16, 320, Tile(16, 16, 2, 4, 2)), (16, 90, Tile(16, 16, 1, 4, 2))]
WIDTHS = (2, 15, 17, 64, 129)
KINDS = ("parts", "whole", "gated")


def random(dtype: torch.dtype, *shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype, times: int = 1) -> None:
    gap = (found.double() - wanted.double()).abs()
    allowed = ROUNDING[dtype] * wanted.double().abs().clamp(min=1e-3 * wanted.abs().max().item())
    if dtype == torch.float32:
        allowed = ROUNDING[dtype] * wanted.double().abs().max()
    assert bool((gap <= times * allowed).all()), float((gap / allowed).max())
    if dtype != torch.float32:  # roundings are where the reference has them
        assert float((gap > 0).float().mean()) < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_out", "num_in", "tile"), SHAPES)
def test_parts_add_up(num_out: int, num_in: int, tile: Tile, dtype: torch.dtype) -> None:
    x, weight = random(dtype, 19, num_in, seed=1), random(dtype, num_out, num_in, seed=2)
    parts = product_parts(x, weight, tile)
    assert parts.shape == (tile.split, 19, num_out)
    assert parts.dtype == torch.float32
    close(parts.double().sum(0), parts_reference(x, weight)[0], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_whole_and_gated_products(dtype: torch.dtype, with_bias: bool) -> None:
    x, gate, up = (random(dtype, n, 72, seed=n) for n in (21, 44, 45))
    up = up[:44].contiguous()
    biases = [random(dtype, 44, seed=s) if with_bias else None for s in (5, 6)]
    close(product(x, gate, biases[0]), product_reference(x, gate, biases[0]), dtype)
    found = gated_product(x, gate, up, *biases)
    # The gate and its inputs may each fall on the other side of a rounding.
    close(found, gated_reference(x, gate, up, *biases), dtype, times=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_out", "num_in", "tile"), SHAPES)
def test_a_row_does_not_know_its_neighbours(
    num_out: int, num_in: int, tile: Tile, dtype: torch.dtype
) -> None:
    x, weight = random(dtype, 130, num_in, seed=1), random(dtype, num_out, num_in, seed=2)
    some = [0, 1, 14, 16, 63, 127, 129]
    alone = torch.cat([product_parts(x[i : i + 1], weight, tile) for i in some], dim=1)
    whole = product_parts(x, weight, tile)
    assert torch.equal(whole[:, some], alone)
    for width in WIDTHS:
        assert torch.equal(product_parts(x[:width], weight, tile), whole[:, :width]), width
        last = x[130 - width :].contiguous()
        assert torch.equal(product_parts(last, weight, tile), whole[:, 130 - width :]), width


def test_gates_do_not_know_their_neighbours_either() -> None:
    x, gate, up = (random(torch.bfloat16, n, 64, seed=n) for n in (100, 49, 50))
    up = up[:49].contiguous()
    whole = gated_product(x, gate, up)
    for width in (1, *WIDTHS[:-1]):
        assert torch.equal(gated_product(x[:width], gate, up), whole[:width]), width


def test_rows_of_the_workspace_are_all_written() -> None:
    x, weight = random(torch.float32, 3, 36, seed=1), random(torch.float32, 53, 36, seed=2)
    x[1] = torch.nan  # a row that nobody asks for may hold anything
    parts = product_parts(x, weight, SHAPES[2][2])
    assert torch.isfinite(parts[:, [0, 2]]).all()


def test_the_choice_of_a_tile_follows_from_the_weight() -> None:
    device = torch.device(DEVICE)
    for kind, shape in (("parts", (1536, 8960)), ("gated", (8960, 1536)), ("whole", (51, 36))):
        tile = product_tile(kind, *shape, device)
        assert tile.split == 1 or kind == "parts"
        assert tile.block_n >= 16
        assert tile.block_k >= 16
    assert [row_block(n) for n in (1, 16, 17, 64, 65, 1088)] == [16, 16, 32, 64, 128, 128]


def test_shares_fill_the_chip_and_are_about_equal() -> None:
    for num_out, num_in in ((2048, 1536), (1536, 8960), (896, 4864), (960, 576), (576, 1536)):
        tile = rule("parts", num_out, num_in)
        blocks = -(-num_in // tile.block_k)
        assert -(-blocks // tile.split) * tile.split <= 1.1 * blocks
        programs = -(-num_out // tile.block_n) * tile.split
        assert programs >= 132 or tile.split >= blocks // 4


@pytest.mark.parametrize("block_m", ROW_BLOCKS)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("shared", [199_680, 134_144, 68_608])
def test_a_pipeline_fits_the_shared_memory(shared: int, itemsize: int, block_m: int) -> None:
    chosen = {(kind, 151_936, 8192): rule(kind, 151_936, 8192) for kind in KINDS}
    for (kind, _, num_in), tile in (chosen | TILES[9, 0]).items():
        num_weights = 2 if kind == "gated" else 1
        early = tile.early(num_in, itemsize, shared) if kind == "parts" else 0
        stages = tile.stages(block_m, num_weights, itemsize, early, shared)
        block_bytes = (num_weights * tile.block_n + block_m) * tile.block_k * itemsize
        assert 1 <= stages <= tile.num_stages
        assert (stages + early) * block_bytes <= max(shared + SPARE_BYTES, block_bytes)


@pytest.mark.parametrize("kind", KINDS)
def test_what_nobody_wants_is_not_computed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = random(torch.float32, 3, 32, seed=1), random(torch.float32, 40, 32, seed=2)

    def filled(*shape: int, **options: Any) -> Tensor:
        return torch.full(shape, 7.0, **options)

    def run(wanted: int | None) -> Tensor:
        flag = None if wanted is None else torch.tensor([wanted], dtype=torch.int32, device=DEVICE)
        if kind == "gated":
            return gated_product(x, weight, weight, wanted=flag)
        return (product if kind == "whole" else product_parts)(x, weight, wanted=flag)

    monkeypatch.setattr(torch, "empty", filled)
    assert torch.equal(run(1), run(None))
    assert bool((run(0) == 7.0).all())

"""Would catch: a column that is nobody's read as a token, a row's own column lost at the end of a
block or of the ring, heads of one group given another's keys, strides taken for granted, a padded
query head written out.

Tolerances: float32 against float64 over at most 100 columns, 1e-5; bfloat16 keeps 8 bits of the
weights and of the result, 3e-2 on values of unit size.
"""

import pytest
import torch

from kernels.ring_attention import BLOCK, reference, ring_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def states(dtype: torch.dtype, *shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def owned(batch: int, num_columns: int) -> torch.Tensor:
    """Runs of columns that wrap around the ring; one row owns a single column, one owns all."""
    mask = torch.zeros(batch, num_columns, dtype=torch.bool)
    for row in range(batch):
        length = 1 if row == 0 else num_columns if row == 1 else 1 + 7 * row % num_columns
        first = num_columns - 3 if row else num_columns - 1
        mask[row, (first + torch.arange(length)) % num_columns] = True
    return mask.to(DEVICE)


@pytest.mark.parametrize("num_columns", [7, BLOCK, 3 * BLOCK - 5])
@pytest.mark.parametrize(("heads", "group", "size"), [(3, 3, 64), (1, 1, 16), (2, 20, 32)])
def test_rows_attend_to_what_they_own(num_columns: int, heads: int, group: int, size: int) -> None:
    batch = 5
    query = states(torch.float32, batch, heads, group, size, seed=1)
    key, value = (states(torch.float32, batch, heads, num_columns, size, seed=s) for s in (2, 3))
    mask = owned(batch, num_columns)
    expected = reference(query, key, value, mask, 0.3)
    key[~mask[:, None].expand(-1, heads, -1)] = 1e4  # what others left there
    value[~mask[:, None].expand(-1, heads, -1)] = torch.nan
    found = ring_attention(query, key, value, mask, 0.3)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_strides_are_honoured() -> None:
    query = states(torch.float32, 2, 2, 3, 32, seed=1).transpose(0, 1)
    key, value = (states(torch.float32, 2, 70, 2, 32, seed=s).transpose(1, 2) for s in (2, 3))
    mask = owned(2, 70)
    found = ring_attention(query, key, value, mask, 0.2)
    torch.testing.assert_close(found, reference(query, key, value, mask, 0.2), atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter multiplies bfloat16 as integers")
def test_bfloat16() -> None:
    query = states(torch.bfloat16, 3, 2, 3, 64, seed=1)
    key, value = (states(torch.bfloat16, 3, 2, 100, 64, seed=s) for s in (2, 3))
    mask = owned(3, 100)
    found = ring_attention(query, key, value, mask, 0.125)
    torch.testing.assert_close(
        found, reference(query, key, value, mask, 0.125), atol=3e-2, rtol=3e-2
    )


def test_heads_that_do_not_tile_are_refused() -> None:
    query = torch.zeros(1, 1, 1, 24)
    with pytest.raises(ValueError, match="size 24"):
        ring_attention(query, query, query, torch.ones(1, 1, dtype=torch.bool), 1.0)

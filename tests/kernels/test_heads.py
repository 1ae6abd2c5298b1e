"""Would catch: a head rotated by another token's angle, halves swapped with the wrong sign, a norm
with the other heads' weight, a bias of another head; keys of padding written over a row, a row
written into another slot or past its end; bits that depend on the rows beside.

float32 against single operations: 1e-5. bfloat16: a value may fall on the other side of a rounding
where float32 and float64 sums differ, in less than one in a hundred.
"""

import pytest
import torch
from torch import Tensor

from kernels.heads import Batch, HeadNorms, heads_reference, split_heads

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAPACITY = 48


def random(dtype: torch.dtype, *shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def batch(slots: list[int], positions: list[int], widths: list[int], width: int) -> Batch:
    rows = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (slots, positions, widths))
    return Batch(*rows, width)


def angles(dtype: torch.dtype, size: int) -> tuple[Tensor, Tensor]:
    turn = 3 * random(torch.float32, CAPACITY, size // 2, seed=9)
    return turn.cos().to(dtype), turn.sin().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv", "size"), [(6, 2, 10), (2, 2, 16)])
def test_queries_and_cache(
    heads: int, kv: int, size: int, normed: bool, dtype: torch.dtype
) -> None:
    rows = batch([2, 0, 3], [0, 41, CAPACITY - 4], [5, 1, 4], 5)
    columns = (heads + 2 * kv) * size
    parts, bias = random(torch.float32, 2, 15, columns, seed=1), random(dtype, columns, seed=2)
    norms = None
    if normed:
        norms = HeadNorms(random(dtype, size, seed=3), random(dtype, size, seed=4), 1e-6)
    caches = [random(dtype, 4, kv, CAPACITY, size, seed=s) for s in (5, 6)]
    wanted_caches = [cache.clone() for cache in caches]
    cos, sin = angles(dtype, size)
    there = rows.places()[2]
    for given in (bias, None):
        found = split_heads(parts, given, norms, cos, sin, rows, *caches)
        wanted = heads_reference(parts, given, norms, cos, sin, rows, *wanted_caches)
        assert not bool(found[~there].any())
        pairs = zip((found[there], *caches), (wanted[there], *wanted_caches), strict=True)
        for ours, theirs in pairs:
            loose = 1e-5 if dtype == torch.float32 else 0.05
            torch.testing.assert_close(ours, theirs, atol=loose, rtol=loose)
            if dtype != torch.float32:
                assert float(((ours - theirs).abs() > 1e-30).float().mean()) < 0.01


def test_a_token_does_not_know_its_neighbours() -> None:
    parts = random(torch.float32, 2, 6, 60, seed=1)
    cos, sin = angles(torch.bfloat16, 10)
    caches = [torch.zeros(3, 2, CAPACITY, 10, dtype=torch.bfloat16, device=DEVICE) for _ in "kv"]
    rows = batch([1, 2], [7, 20], [3, 3], 3)
    together = split_heads(parts, None, None, cos, sin, rows, *caches)
    kept = [cache.clone() for cache in caches]
    for m, (slot, place) in enumerate([(1, 7), (1, 8), (1, 9), (2, 20), (2, 21), (2, 22)]):
        part = parts[:, m : m + 1].contiguous()
        row = batch([slot], [place], [1], 1)
        assert torch.equal(split_heads(part, None, None, cos, sin, row, *caches)[0], together[m])
    assert all(torch.equal(a, b) for a, b in zip(caches, kept, strict=True))

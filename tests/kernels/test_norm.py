"""Would catch: a residual without the product's bias or one of its parts, a norm of the old
residual, a weight applied before the rounding, a padded column in the mean, a row that reads its
neighbour; an embedding of another token.

float32 against float64: 1e-5. bfloat16: the residual may fall on the other side of one rounding
(2^-8 of its size), the result of three (2^-6).
"""

import pytest
import torch
from torch import Tensor

from kernels.norm import add_norm, add_norm_reference, embed_norm, norm_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(dtype: torch.dtype, *shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [36, 64, 1000])
@pytest.mark.parametrize("split", [1, 3])
def test_residual_and_norm(size: int, split: int, dtype: torch.dtype) -> None:
    parts = random(torch.float32, split, 5, size, seed=1)
    residual, bias = random(dtype, 5, size, seed=2), random(dtype, size, seed=3)
    weight = 1 + 0.3 * random(dtype, size, seed=4)
    loose = 1e-5 if dtype == torch.float32 else 2**-6
    for given in (bias, None):
        new, wanted = add_norm_reference(parts, given, residual, weight, 1e-5)
        kept = residual.clone()
        found = add_norm(parts, given, kept, weight, 1e-5)
        torch.testing.assert_close(kept, new, atol=1e-5, rtol=loose / 4)
        torch.testing.assert_close(found, wanted, atol=loose, rtol=loose)
        assert found.dtype == dtype
        if dtype != torch.float32:  # roundings are where the reference has them
            assert float((found != wanted).float().mean()) < 0.02


def test_parts_may_be_rounded_already() -> None:
    parts = random(torch.bfloat16, 1, 3, 48, seed=1)
    residual, weight = (random(torch.bfloat16, n, 48, seed=n) for n in (3, 1))
    new, _ = add_norm_reference(parts, None, residual, weight[0], 1e-6)
    kept = residual.clone()
    add_norm(parts, None, kept, weight[0], 1e-6)
    assert torch.equal(kept, new)


def test_embeddings() -> None:
    embedding = random(torch.bfloat16, 53, 40, seed=1)
    weight = random(torch.bfloat16, 40, seed=2)
    ids = torch.tensor([52, 0, 7, 7], dtype=torch.int32, device=DEVICE)
    residual, normed = embed_norm(ids, embedding, weight, 1e-6)
    assert torch.equal(residual, embedding[ids.long()])
    wanted = norm_reference(residual, weight, 1e-6)
    torch.testing.assert_close(normed, wanted, atol=2**-7, rtol=2**-7)
    assert torch.equal(normed[2], normed[3])


def test_a_row_does_not_know_its_neighbours() -> None:
    parts = random(torch.float32, 2, 33, 100, seed=1)
    residual, weight = (random(torch.bfloat16, n, 100, seed=n) for n in (33, 1))
    together = add_norm(parts, None, residual.clone(), weight[0], 1e-6)
    for m in (0, 1, 17, 32):
        row = parts[:, m : m + 1].contiguous()
        alone = add_norm(row, None, residual[m : m + 1].clone(), weight[0], 1e-6)
        assert torch.equal(alone[0], together[m])

"""Would catch: a tie that goes to a higher id, in a split or between two; a maximum in the last,
ragged split lost; padding that moves on; a token that the next pass does not read.
"""

import pytest
import torch

from kernels.greedy import greedy_reference, take_greedy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [7, 128, 5000])
def test_the_lowest_id_of_the_maximum(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(6, vocab, generator=generator).to(DEVICE, dtype)
    logits[0] = 0.5  # all alike
    logits[1, -1] = 9
    logits[2, vocab // 2 :] = logits[2].max() + 1
    logits[3] = -torch.inf
    logits[3, vocab // 3] = -7
    ints = {"dtype": torch.int32, "device": DEVICE}
    token_ids, taken = torch.full((6,), -1, **ints), torch.full((6,), -2, **ints)
    positions = torch.arange(6, **ints)
    widths = torch.tensor([1, 1, 1, 1, 1, 0], **ints)
    take_greedy(logits, token_ids, positions, widths, taken)
    wanted = greedy_reference(logits)
    assert wanted[:4].tolist() == [0, vocab - 1, vocab // 2, vocab // 3]
    assert token_ids.tolist() == [*wanted[:5].tolist(), -1]
    assert taken.tolist() == [*wanted[:5].tolist(), -2]
    assert positions.tolist() == [1, 2, 3, 4, 5, 5]

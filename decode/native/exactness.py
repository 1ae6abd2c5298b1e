"""Whether a token's logits depend on what is read beside it, seen by comparing widths at load.

The kernels behind PyTorch's products are chosen by processor, type and shape, so that equality to
the bit is found out, never assumed.
"""

from typing import Any

import torch
from torch import Tensor

from decode.native.attention import BLOCK

WIDTHS = (2, 3, 5, 9, 17)  # of one pass: up to MAX_DRAFT_TOKENS and one
NUM_ALONE = 4  # tokens whose logits are compared
# The compared tokens lie on two sides of a block of keys, past the first one.
NUM_READ = 2 * BLOCK - NUM_ALONE // 2


def width_dependence(target: Any) -> str | None:
    """In a clause what differs, for a target's `score`; None where nothing does."""
    num_read = max(1, min(NUM_READ, target.max_context - max(WIDTHS)))
    ids = [1 + i * 7919 % (target.vocab_size - 1) for i in range(num_read + max(WIDTHS))]
    row, beside = target.open(), target.open()
    target.prefill(row, ids[:num_read])
    target.prefill(beside, ids[: num_read // 2])
    text = ids[num_read : target.max_context]
    alone = torch.cat([target.score([row], [[token]])[0] for token in text[:NUM_ALONE]])
    for width in WIDTHS:
        target.rollback(row, num_read)
        together = target.score([row], [text[:width]])[0, :NUM_ALONE]
        if differs := _differs(together, alone):
            return f"{differs} when {width} tokens are read at once"
    target.rollback(row, num_read)
    batch = target.score([beside, row], [text[:3], text[:1]])[1, :1]
    differs = _differs(batch, alone)
    return differs and f"{differs} when another row is read beside it"


def _differs(found: Tensor, alone: Tensor) -> str | None:
    alone = alone[: len(found)]
    if torch.equal(found, alone):
        return None
    gap = (found.float() - alone.float()).abs().max().item()
    return f"a token's logits differ by up to {gap:.1e} from those that it has alone"

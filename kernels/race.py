"""The noise of Gumbel coupling: when each token would arrive, by its place in the text.

Token v of place t arrives after e(t, v) / p(v), where e is exponential; the first one to arrive is
the one that is drawn, and v is it with chance p(v) (with g = -ln e, the argmax of ln p(v) + g, the
Gumbel-max trick). Whoever knows t and the key draws with the same e: target and drafter then agree
as often as their laws do, and the text depends on the target's law alone.

e = -ln(1 - u), u of 53 bits from Philox 4x64 with 10 rounds (Salmon et al. 2011): block v // 4 of
the stream at counter [v // 4 + 1, 0, 0, t], word v % 4, its highest bits. The smallest e decide,
and these are fine: 2^-53 apart.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

TO_UNIT = 2.0**-53
NUM_KEPT = 64  # places; a draft's are looked at again by the next steps

Key = tuple[int, int]  # two words of 64 bits


def arrivals(key: Key, place: int, vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
    """Exponential numbers [V] float64 of one place in the text of one request.

    The tensor is shared between calls and must not be changed.
    """
    return _on_host(key, place, vocab_size).to(device)


@lru_cache(maxsize=NUM_KEPT)
def _on_host(key: Key, place: int, vocab_size: int) -> Tensor:
    drawn = uniforms(np.array(key, np.uint64), place, vocab_size)
    return torch.from_numpy(-np.log1p(-drawn))


def uniforms(key: np.ndarray, place: int, count: int) -> np.ndarray:
    """`count` numbers in [0, 1) of Philox 4x64 under a key [2] uint64, counter [0, 0, 0, place].

    A float64 there has 53 bits to fill; nothing is rounded, so 1.0 never comes out.
    """
    words = np.random.Philox(key=key, counter=[0, 0, 0, place]).random_raw(count)
    return (words >> np.uint64(11)) * TO_UNIT


def winner(probs: Tensor, exponentials: Tensor) -> Tensor:
    """Ids [N] of the first to arrive: float64 [N, V] probabilities, of any sum, and e [N, V].

    What has no probability never arrives; of two that arrive together the lower id wins.
    """
    times = torch.where(probs > 0, exponentials / probs, torch.inf)
    return times.argmin(-1)

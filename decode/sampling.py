"""The law that is kept, as tensors, and the one place where draft tokens are drawn."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from decode.types import MAX_DRAFT_TOKENS, Sampling
from kernels.race import winner
from kernels.reference import inverse_cdf, processed_probs

NO_LAW = "a drafter's logits are no law: they hold NaN or +inf, or -inf throughout"


class Law(NamedTuple):
    """Sampling parameters of N rows, named as `verify` and `processed_probs` name them."""

    temperature: Tensor  # [N] float64
    top_k: Tensor  # [N] int64
    top_p: Tensor  # [N] float64
    min_p: Tensor  # [N] float64
    repetition_penalty: Tensor  # [N] float64


@lru_cache(maxsize=256)
def law_of(samplings: tuple[Sampling, ...]) -> Law:
    """The rows' parameters side by side, on the host, where reading one waits for nothing.

    The tensors are shared between calls and must not be changed.
    """

    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(s, name) for s in samplings], dtype=dtype)

    return Law(
        column("temperature", torch.float64),
        column("top_k", torch.int64),
        column("top_p", torch.float64),
        column("min_p", torch.float64),
        column("repetition_penalty", torch.float64),
    )


class RowSampler:
    """Draws one row's draft tokens for one step, and remembers them.

    Each draw spends its own uniform (or, under Gumbel coupling, races with its place's arrivals),
    and the penalty sees the draft tokens drawn before it. A drafter that asked for a draw and then
    hid it would bias the output: `drawn` lets the loop compare.
    """

    def __init__(
        self,
        sampling: Sampling,
        uniform: Callable[[int], float],  # depth -> the draw's number in [0, 1)
        seen: Tensor
        | None,  # [V] bool, tokens of prompt and output; None where no penalty asks for it
        race: Callable[[int], Tensor] | None = None,  # depth -> [V] arrivals; None: inverse CDF
    ) -> None:
        self.greedy = sampling.greedy
        self.drawn: list[int] = []
        self._sampling = sampling
        self._uniform = uniform
        self._seen = seen
        self._race = race

    def draw(self, logits: Tensor) -> int:  # [V]
        """The next draft token. Raises ValueError where the logits are not numbers."""
        if len(self.drawn) == MAX_DRAFT_TOKENS:
            raise ValueError(f"a drafter drew more than {MAX_DRAFT_TOKENS} tokens in one step")
        row = logits.detach()
        peak, place = highest(row)
        if not math.isfinite(peak):
            raise ValueError(NO_LAW)
        plain = self.greedy and self._seen is None
        token_id = place if plain else self._draw(row)
        self.drawn.append(token_id)
        if self._seen is not None:
            self._seen[token_id] = True
        return token_id

    def _draw(self, row: Tensor) -> int:
        seen = None if self._seen is None else self._seen.to(row.device)
        ids = possible_ids(row)
        if ids is not None:  # the law of these alone: the others' mass is zero, whatever is asked
            row = row.index_select(0, ids)
            seen = None if seen is None else seen.index_select(0, ids)
        seen = None if seen is None else seen[None]
        probs = processed_probs(row[None], *law_of((self._sampling,)), seen)
        place = self._place(probs, ids)
        return place if ids is None else int(ids[place])

    def _place(self, probs: Tensor, ids: Tensor | None) -> int:
        """The column of `probs` [1, C] that chance chooses; column c stands for ids[c]."""
        if self._race is not None and not self.greedy:
            arrivals = self._race(len(self.drawn)).to(probs.device)
            return int(winner(probs, (arrivals if ids is None else arrivals[ids])[None]).item())
        uniform = 0.5 if self.greedy else self._uniform(len(self.drawn))  # one-hot: needs no chance
        uniforms = torch.tensor([uniform], dtype=torch.float64, device=probs.device)
        return int(inverse_cdf(probs, uniforms).item())


def highest(row: Tensor) -> tuple[float, int]:  # [V]
    """The largest value and its lowest place; NaN where there is one. NumPy's scan of float32 takes
    a fifth of PyTorch's time.
    """
    if _numpy_reads(row):
        values = row.numpy()
        place = int(values.argmax())
        return float(values[place]), place
    peak, at = row.max(dim=-1)
    return float(peak.item()), int(at.item())


def possible_ids(row: Tensor) -> Tensor | None:  # [V] -> [C] int64, ascending
    """The ids that have mass, where they are few (a draft vocabulary) and telling them is cheap."""
    if not _numpy_reads(row):
        return None
    finite = row.numpy() > -np.inf
    if 2 * np.count_nonzero(finite) > len(finite):
        return None
    return torch.from_numpy(np.flatnonzero(finite))


def _numpy_reads(row: Tensor) -> bool:
    return row.device.type == "cpu" and row.dtype == torch.float32


def seen_tokens(counts: Tensor | None) -> Tensor | None:
    """Which tokens a row holds, as a fresh tensor that a sampler may add to."""
    return None if counts is None else counts > 0


def count_tokens(
    sampling: Sampling, token_ids: Sequence[int], vocab_size: int, device: str
) -> Tensor | None:
    """How often each token stands in the row, [V] int32; None where no penalty asks for it."""
    if sampling.repetition_penalty == 1:
        return None
    ids = torch.tensor(token_ids, dtype=torch.int64)
    return torch.bincount(ids, minlength=vocab_size).to(torch.int32).to(device)


def count_more(counts: Tensor, token_ids: Sequence[int]) -> None:
    """Add tokens to a row's counts, in place."""
    ids = torch.tensor(token_ids, dtype=torch.int64)
    counts += torch.bincount(ids, minlength=len(counts)).to(counts)

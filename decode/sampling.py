"""The law that is kept, as tensors, and the one place where draft tokens are drawn."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

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
    and the penalty sees the draft tokens drawn before it. A
    drafter that asked for a draw and then hid it would bias the output: `drawn` lets the loop
    compare.
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
        row = logits.detach()[None]
        peak, place = row.max(dim=-1)
        if not torch.isfinite(peak).item():
            raise ValueError(NO_LAW)
        plain = self.greedy and self._seen is None
        token_id = int(place.item()) if plain else self._draw(row)
        self.drawn.append(token_id)
        if self._seen is not None:
            self._seen[token_id] = True
        return token_id

    def _draw(self, row: Tensor) -> int:
        seen = None if self._seen is None else self._seen.to(row.device)[None]
        probs = processed_probs(row, *law_of((self._sampling,)), seen)
        if self._race is not None and not self.greedy:
            return int(winner(probs, self._race(len(self.drawn)).to(row.device)[None]).item())
        uniform = 0.5 if self.greedy else self._uniform(len(self.drawn))  # one-hot: needs no chance
        uniforms = torch.tensor([uniform], dtype=torch.float64, device=row.device)
        return int(inverse_cdf(probs, uniforms).item())


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

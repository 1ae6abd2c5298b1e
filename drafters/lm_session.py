"""One row's state in an LM drafter: a cache that catches up when it is asked, and not before."""

from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from decode.types import MAX_DRAFT_TOKENS, DraftProposal, DraftSampler
from drafters.base import common_prefix
from drafters.networks import DraftNetwork


class LmParts(Protocol):
    """What a session uses of its drafter."""

    kind: ClassVar[str]
    trainable: DraftNetwork
    max_context: int

    @property
    def device(self) -> torch.device: ...
    def widen(self, logits: Tensor) -> Tensor: ...


class LmSession:
    """Holds keys and values of the tokens in `_read`.

    Whatever the row has become since, the tokens that still agree are kept and the rest is dropped
    and read again, so the next logits are those of a fresh prefill.
    """

    def __init__(self, drafter: LmParts) -> None:
        from transformers import DynamicCache

        self._drafter = drafter
        # Plain layers even for windowed attention: a sliding cache could not be rolled back.
        self._cache = DynamicCache()
        self._read: list[int] = []

    def offer(self, token_ids: Sequence[int]) -> int:
        """As many as fit its context; the last drafted token is never read."""
        room = self._drafter.max_context - len(token_ids) + 1
        return min(MAX_DRAFT_TOKENS, max(0, room)) if token_ids else 0

    @torch.no_grad()
    def propose(
        self, token_ids: Sequence[int], num_draft_tokens: int, sampler: DraftSampler
    ) -> DraftProposal:
        size = min(num_draft_tokens, self.offer(token_ids))
        pending = self._roll_back(list(token_ids)) if size else []
        tokens: list[int] = []
        rows: list[Tensor] = []
        for _ in range(size):
            rows.append(self._next_logits(pending))
            tokens.append(sampler.draw(rows[-1]))
            pending = tokens[-1:]
        logits = torch.stack(rows) if rows and not sampler.greedy else None
        return DraftProposal(tokens, logits, self._drafter.kind)

    def _roll_back(self, token_ids: list[int]) -> list[int]:
        """Forget what the row no longer holds; the tokens still to be read, the last one always."""
        kept = min(common_prefix(self._read, token_ids), len(token_ids) - 1)
        if surplus := len(self._read) - kept:
            self._cache.crop(-surplus)
            del self._read[kept:]
        return token_ids[kept:]

    def _next_logits(self, pending: list[int]) -> Tensor:  # [V] float32
        token_ids = torch.tensor([pending], device=self._drafter.device)
        logits = self._drafter.trainable.next_logits(token_ids, self._cache)
        self._read += pending
        return self._drafter.widen(logits)

"""One row's state in an LM drafter: a cache that catches up when it is asked, and not before."""

from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from decode.types import MAX_DRAFT_TOKENS, DraftProposal, DraftSampler
from drafters.base import common_prefix
from drafters.readers import Reader, RowReader


class LmParts(Protocol):
    """What a session uses of its drafter."""

    kind: ClassVar[str]
    max_context: int

    def reader(self) -> Reader: ...
    def widen(self, logits: Tensor) -> Tensor: ...


class LmSession:
    """Holds keys and values of the tokens in `_read`.

    Whatever the row has become since, the tokens that still agree are kept and the rest is dropped
    and read again, so the next logits are those of a fresh prefill. Where the drafter reads with
    other weights than it did, all is read again.
    """

    def __init__(self, drafter: LmParts) -> None:
        self._drafter = drafter
        self._reader: Reader | None = None  # until it is asked: many in a pool never are
        self._row: RowReader
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
        reader = self._drafter.reader()
        if reader is not self._reader:
            self._reader, self._row, self._read = reader, reader.open(), []
        kept = min(common_prefix(self._read, token_ids), len(token_ids) - 1)
        if surplus := len(self._read) - kept:
            self._row.forget(surplus)
            del self._read[kept:]
        return token_ids[kept:]

    def _next_logits(self, pending: list[int]) -> Tensor:  # [V] float32
        logits = self._row.next_logits(pending)
        self._read += pending
        return self._drafter.widen(logits)

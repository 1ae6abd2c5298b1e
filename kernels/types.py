"""What a verification says; the one type that leaves this room."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Verification:
    """What the target kept of each row's draft: accepted tokens, then one recovered or bonus token.

    Log-probabilities are those of the emitted tokens under the processed laws (after penalty,
    temperature and truncation), natural logarithm. They are 0 where nothing was emitted;
    `draft_logprobs` is also 0 at a bonus token, for which there was no draft, and -inf where the
    drafter could not have proposed the token.
    """

    token_ids: Tensor  # [B, K + 1] int64, padded with -1
    num_accepted: Tensor  # [B] int64, 0..num_draft_tokens; num_accepted + 1 tokens were emitted
    target_logprobs: Tensor  # [B, K + 1] float
    draft_logprobs: Tensor  # [B, K + 1] float

    @classmethod
    def blank(cls, batch: int, width: int, device: torch.device) -> "Verification":
        """Nothing emitted yet, for K + 1 = width."""
        return cls(
            torch.full((batch, width), -1, device=device),
            torch.zeros(batch, dtype=torch.int64, device=device),
            torch.zeros(batch, width, device=device),
            torch.zeros(batch, width, device=device),
        )

    @classmethod
    def unwritten(cls, batch: int, width: int, device: torch.device) -> "Verification":
        """Memory that a kernel fills, every number of it."""
        return cls(
            torch.empty(batch, width, dtype=torch.int64, device=device),
            torch.empty(batch, dtype=torch.int64, device=device),
            torch.empty(batch, width, device=device),
            torch.empty(batch, width, device=device),
        )

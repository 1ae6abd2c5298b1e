"""What a verification says; the one type that leaves this room."""

from dataclasses import dataclass

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

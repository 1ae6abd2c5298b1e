"""How a drafter is scored on a finished answer: acceptance by start and depth, without decoding.

Equation: a token x drawn from the target's law p is accepted from a drafter's law q with chance
E[min(1, q(x) / p(x))] = sum of min(p, q), so one teacher-forced pass over the target's answer tells what any
drafter would have been worth (arXiv 2510.20064).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from decode.sampling import law_of
from decode.types import Sampling
from kernels.reference import processed_probs

ROWS_AT_ONCE = 64  # 64 rows of 150,000 float64 probabilities are 77 MB


def by_start(per_token: Tensor, max_depth: int) -> Tensor:  # [A] -> [A, max_depth]
    """Acceptance by start and depth when it depends on the drafted position only: [t, d] = per_token[t + d]."""
    padded = torch.cat([per_token.float(), per_token.new_full((max_depth,), torch.nan).float()])
    return padded.unfold(0, max_depth, 1)[: len(per_token)].clone()


def realised_acceptance(
    logits: Tensor,  # [N, V] raw; row i is the law of token_ids[first + i]
    token_ids: Sequence[int],
    first: int,
    target_logprobs: Tensor,  # [N]
    sampling: Sampling,
) -> Tensor:  # [N] float32
    """min(1, draft_prob / target_prob) of each realised token; greedy: 1 where it is the drafter's choice."""
    realised = torch.tensor(token_ids[first : first + len(logits)], device=logits.device)
    draft_probs = torch.cat(
        [
            _realised_probs(
                logits[low : low + ROWS_AT_ONCE], token_ids, first + low, realised[low:], sampling
            )
            for low in range(0, len(logits), ROWS_AT_ONCE)
        ]
        or [logits.new_zeros(0)]
    ).cpu()
    if sampling.greedy:
        return draft_probs.float()
    ratios = draft_probs.double().log() - target_logprobs[: len(logits)].double().cpu()
    return ratios.exp().clamp(max=1).float()


def _realised_probs(
    logits: Tensor, token_ids: Sequence[int], first: int, realised: Tensor, sampling: Sampling
) -> Tensor:  # [n] float64
    size = len(logits)
    law = [column.expand(size) for column in law_of((sampling,), str(logits.device))]
    seen = _seen(token_ids, first, logits) if sampling.repetition_penalty != 1 else None
    probs = processed_probs(logits, *law, seen)
    return probs.gather(1, realised[:size, None]).squeeze(1)


def _seen(token_ids: Sequence[int], first: int, like: Tensor) -> Tensor:  # [n, V] bool
    """Which ids occur before each of the rows' tokens, prompt included."""
    seen = torch.zeros(like.shape, dtype=torch.bool, device=like.device)
    seen[:, list(token_ids[:first])] = True
    for row in range(1, len(like)):
        seen[row:, token_ids[first + row - 1]] = True
    return seen

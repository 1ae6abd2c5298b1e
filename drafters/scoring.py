"""How a drafter is scored on a finished answer: acceptance by start and depth, without decoding.

A token x drawn from the target's law p is accepted from a drafter's law q with chance
E[min(1, q(x) / p(x))] = sum of min(p, q), so one teacher-forced pass over the target's answer tells
what any drafter would have been worth (arXiv 2510.20064).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from decode.sampling import Law, law_of
from decode.types import Sampling
from kernels.reference import processed_probs

ROWS_AT_ONCE = 64  # 64 rows of 150,000 float64 probabilities are 77 MB


def by_start(per_token: Tensor, max_depth: int) -> Tensor:  # [A] -> [A, max_depth]
    """What depends on the drafted position only, by start and depth: [t, d] = per_token[t + d]."""
    padded = torch.nn.functional.pad(per_token.float(), (0, max_depth), value=torch.nan)
    return padded.unfold(0, max_depth, 1)[: len(per_token)].clone()


def realised_acceptance(
    logits: Tensor,  # [N, V] raw; row i is the law of token_ids[first + i]
    token_ids: Sequence[int],
    first: int,
    target_logprobs: Tensor,  # [N] or more
    sampling: Sampling,
) -> Tensor:  # [N] float32
    """min(1, draft_prob / target_prob) of each realised token; greedy: 1 where they agree or 0."""
    probs = [
        _realised_probs(logits[low : low + ROWS_AT_ONCE], token_ids, first + low, sampling)
        for low in range(0, len(logits), ROWS_AT_ONCE)
    ]
    draft_probs = torch.cat(probs) if probs else torch.zeros(0)
    if sampling.greedy:
        return draft_probs.float()
    log_ratios = draft_probs.log() - target_logprobs[: len(logits)].double().cpu()
    return log_ratios.exp().clamp(max=1).float()


def _realised_probs(
    logits: Tensor, token_ids: Sequence[int], first: int, sampling: Sampling
) -> Tensor:  # [n] float64 on the CPU
    one = law_of((sampling,))
    law = Law(*(column.expand(len(logits)) for column in one))
    seen = _seen(token_ids, first, logits) if sampling.repetition_penalty != 1 else None
    probs = processed_probs(logits, *law, seen)
    realised = torch.tensor(token_ids[first : first + len(logits)], device=logits.device)
    return probs.gather(1, realised[:, None]).squeeze(1).cpu()


def _seen(token_ids: Sequence[int], first: int, like: Tensor) -> Tensor:  # [n, V] bool
    """Which ids occur before each of the rows' tokens, prompt included."""
    seen = torch.zeros(like.shape, dtype=torch.bool, device=like.device)
    seen[:, list(token_ids[:first])] = True
    for row in range(1, len(like)):
        seen[row:, token_ids[first + row - 1]] = True
    return seen

"""The processed law: how raw logits become the probabilities that are drawn from and kept.

Processing, the same for target and drafter: penalty on tokens seen, temperature, top-k, top-p,
min-p. With z the penalised logits and w(v) = exp((z(v) - max z) / T):

    top-k   keeps z(v) >= the k-th largest z
    top-p   keeps z(v) >= the largest t such that w of {z >= t} reaches top_p of what top-k left
    min-p   keeps w(v) >= min_p

so that ties at a threshold are kept; temperature 0 puts all mass on the lowest id of the maximum.
"""

import torch
from torch import Tensor


def processed_probs(
    logits: Tensor,  # [N, V] raw
    temperature: Tensor,  # [N]
    top_k: Tensor | None = None,  # [N]; 0: off
    top_p: Tensor | None = None,  # [N]; 1: off
    min_p: Tensor | None = None,  # [N]; 0: off
    repetition_penalty: Tensor | None = None,  # [N]; 1: off
    seen: Tensor | None = None,  # [N, V] bool, tokens of the prompt and the output so far
) -> Tensor:
    """The law [N, V], float64, normalised; the one place that makes it of logits."""
    logits = penalised(logits, repetition_penalty, seen)
    temperature = temperature.to(logits.device, torch.float64)
    best = logits.argmax(-1, keepdim=True)
    weights = logits.to(torch.float64, copy=True)
    weights -= logits.gather(-1, best).double()
    greedy = temperature == 0
    weights /= temperature.masked_fill(greedy, 1)[:, None]
    weights.exp_()
    if bool(greedy.any()):
        one_hot = torch.zeros_like(weights[greedy]).scatter_(-1, best[greedy], 1)
        weights[greedy] = one_hot
    _truncate(logits, weights, top_k, top_p, min_p)
    return weights.div_(weights.sum(-1, keepdim=True))


def penalised(logits: Tensor, repetition_penalty: Tensor | None, seen: Tensor | None) -> Tensor:
    """Logits [N, V]; those of tokens seen: divided by the penalty where positive, else multiplied.

    The arithmetic is float32 for logits of 32 bits or fewer, as in transformers, so that both see
    the same ties.
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    if repetition_penalty is None or seen is None or bool((repetition_penalty == 1).all()):
        return logits
    penalty = repetition_penalty.to(logits.device, logits.dtype)[:, None]
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def inverse_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Ids [N]: the smallest whose cumulative mass exceeds u * total, never one of zero mass.

    `probs` [N, V] is float64 and need not be normalised; `uniforms` [N] lie in [0, 1).
    """
    cumulative = probs.cumsum(-1)
    wanted = uniforms.double()[:, None] * cumulative[:, -1:]
    reached = (cumulative > wanted) & (probs > 0)
    # Where a device sums in parallel, rounding may miss the total: then the last id with mass.
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).byte().argmax(-1)
    return torch.where(reached.any(-1), reached.byte().argmax(-1), last)


def _truncate(
    logits: Tensor,
    weights: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> None:
    """Set to zero, in place, the weights [N, V] that the rules leave out; a row's largest is 1."""
    device, lowest = logits.device, logits.new_full((len(logits), 1), -float("inf"))
    if (top_k := unless_neutral(top_k, 0)) is not None:
        counts = top_k.to(device, torch.int64).clamp(max=logits.shape[-1])
        asks = (counts > 0).nonzero()[:, 0]
        highest = _only(logits, asks).topk(int(counts.max()), dim=-1).values
        lowest[asks] = highest.gather(-1, counts[asks, None] - 1)
        weights.masked_fill_(logits < lowest, 0)
    if (top_p := unless_neutral(top_p, 1)) is not None:
        shares = top_p.to(device, torch.float64)
        asks = (shares < 1).nonzero()[:, 0]
        lowest[asks] = _top_p_threshold(
            _only(logits, asks), _only(weights, asks), shares[asks, None]
        )
        weights.masked_fill_(logits < lowest, 0)
    if (min_p := unless_neutral(min_p, 0)) is not None:
        weights.masked_fill_(weights < min_p.to(device, torch.float64)[:, None], 0)


def _top_p_threshold(logits: Tensor, weights: Tensor, top_p: Tensor) -> Tensor:
    """Logit [N, 1] that ends the smallest descending set whose mass reaches top_p [N, 1]."""
    total = weights.sum(-1, keepdim=True)
    # Tokens below this mass hold less than 1 - top_p together: none is needed, and few are sorted.
    enough = (1 - top_p) * total / (2 * weights.shape[-1])
    count = max(1, int((weights >= enough).sum(-1).max()))  # 0: no row has a number in it
    highest, ids = logits.topk(count, dim=-1)
    reached = weights.gather(-1, ids).cumsum(-1) >= top_p * total
    first = torch.where(reached.any(-1), reached.byte().argmax(-1), count - 1)
    return highest.gather(-1, first[:, None])


def _only(values: Tensor, rows: Tensor) -> Tensor:
    """The rows named, without a copy where that is all of them."""
    return values if len(rows) == len(values) else values[rows]


def unless_neutral(values: Tensor | None, neutral: float) -> Tensor | None:
    """The parameter, or None where no row asks for it."""
    return None if values is None or bool((values == neutral).all()) else values

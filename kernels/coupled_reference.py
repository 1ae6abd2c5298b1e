r"""The specification of verification under Gumbel coupling: PyTorch, float64 inside.

With p_i the target's processed law after the draft prefix x_0..x_{i-1} and e the exponential
numbers of kernels/race.py, the token at place t + i of the text is

    y_i = argmin_v e(t + i, v) / p_i(v),

drawn from p_i whatever was drafted. Drafts are kept while x_i = y_i; the first y_n that differs, or
comes after the last draft, ends the step. Nothing else of the drafter is asked for: from equal
logits comes the text of plain decoding under the same key.
"""

import torch
from torch import Tensor

from kernels.inputs import Inputs
from kernels.laws import penalised, processed_probs
from kernels.race import Key, arrivals, winner
from kernels.types import Verification


def couple(
    target_logits: Tensor,  # [B, K + 1, V] raw
    draft_token_ids: Tensor,  # [B, K]; the first -1 ends a row's draft
    *,
    temperature: Tensor,  # [B]; 0: greedy
    keys: list[Key],  # B of them
    places: list[int],  # B; where the token stands in its text that row 0 of the logits decides
    num_draft_tokens: Tensor | None = None,  # [B]; K
    top_k: Tensor | None = None,  # [B]
    top_p: Tensor | None = None,  # [B]
    min_p: Tensor | None = None,  # [B]
    repetition_penalty: Tensor | None = None,  # [B]
    seen_token_counts: Tensor | None = None,  # [B, V]; None: nothing was seen before the draft
) -> Verification:
    """The tokens that each row keeps, each drawn from the target's own law.

    `draft_logprobs` are 0 for kept drafts and -inf for one that was not: the drafter's law plays no
    part. Errors are those of kernels.reference.verify.
    """
    inputs = Inputs.of_target(
        target_logits,
        draft_token_ids,
        temperature,
        num_draft_tokens,
        top_k,
        top_p,
        min_p,
        repetition_penalty,
        seen_token_counts,
    )
    inputs.check_values()
    batch, width, _ = target_logits.shape
    found = Verification.blank(batch, width, target_logits.device)
    for b, length in enumerate(inputs.draft_lengths().tolist()):
        drafts = draft_token_ids[b, :length].tolist()
        seen = _seen(inputs, b)
        rules = [_one(x, b) for x in (temperature, top_k, top_p, min_p, repetition_penalty)]
        for i in range(length + 1):
            token_id, logprob = _draw(
                target_logits[b, i][None], rules, seen, keys[b], places[b] + i
            )
            found.token_ids[b, i], found.target_logprobs[b, i] = token_id, logprob
            if i == length or drafts[i] != token_id:
                found.draft_logprobs[b, i] = 0.0 if i == length else -torch.inf
                break
            found.num_accepted[b] += 1
            if seen is not None:
                seen[0, token_id] = True
    return found


def _draw(
    logits: Tensor, rules: list[Tensor | None], seen: Tensor | None, key: Key, place: int
) -> tuple[int, float]:
    """The token of one place, from raw logits [1, V], and its log-probability."""
    temperature, *_, penalty = rules
    assert temperature is not None
    if float(temperature) == 0:
        return int(penalised(logits, penalty, seen).argmax(-1)), 0.0
    probs = processed_probs(logits, *rules, seen)  # type: ignore[arg-type, call-arg]
    token = winner(probs, arrivals(key, place, logits.shape[-1], logits.device)[None])
    return int(token), float(probs[0, token].log())


def _seen(inputs: Inputs, b: int) -> Tensor | None:  # [1, V] bool, a copy
    if inputs.repetition_penalty is None:
        return None
    counts = inputs.seen_token_counts
    if counts is None:
        like = inputs.target_logits
        return torch.zeros(1, like.shape[-1], dtype=torch.bool, device=like.device)
    return (counts[b] > 0)[None]


def _one(values: Tensor | None, b: int) -> Tensor | None:
    return None if values is None else values[b : b + 1]

"""Acceptance of many answers at once, where `drafters.scoring` takes one answer after another.

For drafters with a network: what a position accepts does not depend on where drafting began, so one
number a token says all, and the passes of every answer follow together, token by token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from decode.types import Sampling
from drafters.batches import AnswerLike, Batch, collate, to_device
from drafters.chunked import each_chunk
from drafters.network_drafter import NetworkDrafter
from drafters.scoring import realised_acceptance
from drafters.vocabulary import columns_of

BATCH_TOKENS = 16384  # read at once, padding included
CHUNK_TOKENS = 1024  # rows of logits at once


def batch_acceptance(
    drafter: NetworkDrafter, answers: Sequence[AnswerLike], num_draft_tokens: int
) -> Tensor:  # [answers, 2] float64: tokens emitted, target passes
    """As `drafters.training.validation_acceptance`, in batches on the drafter's device."""
    chances = [found.nan_to_num(0.0) for found in batch_chances(drafter, answers)]
    lengths = torch.tensor([len(found) for found in chances])
    passes = expected_passes(chances, num_draft_tokens)
    return torch.stack([lengths.double(), passes], dim=1)


def batch_chances(drafter: NetworkDrafter, answers: Sequence[AnswerLike]) -> list[Tensor]:
    """[A] of each answer: the chance that a draft of each token is accepted, wherever drafting
    began; NaN where none can be drafted. `by_start` makes of it what `drafter.score` returns.
    """
    chances = [torch.zeros(0)] * len(answers)
    for law, places in _alike(drafter, answers):
        accepted = _accepted(drafter, [answers[place] for place in places], law)
        for place, found in zip(places, accepted, strict=True):
            chances[place] = found
    return chances


def expected_passes(chances: Sequence[Tensor], num_draft_tokens: int) -> Tensor:  # -> [answers]
    """Target passes that emit each answer's A tokens, of acceptance [A] token by token.

    A pass drafts num_draft_tokens tokens. at[:, d] is the chance that token t comes after d kept
    ones of its pass; a rejection, or all of them kept, begins the next pass at the token after it.
    """
    if not chances:
        return torch.zeros(0, dtype=torch.float64)
    table = torch.nn.utils.rnn.pad_sequence([c.double() for c in chances], batch_first=True)
    lengths = torch.tensor([len(c) for c in chances])
    at = torch.zeros(len(chances), num_draft_tokens + 1, dtype=torch.float64)
    at[:, 0] = 1
    passes = torch.zeros(len(chances), dtype=torch.float64)
    for token, chance in enumerate(table.unbind(1)):
        passes += at[:, 0] * (token < lengths)
        kept = at[:, :-1] * chance[:, None]
        at = torch.cat([(at.sum(1) - kept.sum(1))[:, None], kept], dim=1)
    return passes


def _alike(
    drafter: NetworkDrafter, answers: Sequence[AnswerLike]
) -> Iterator[tuple[Sampling, list[int]]]:
    """Places of answers under one law and of like lengths, as many as one batch holds."""
    order = sorted(range(len(answers)), key=lambda place: len(answers[place].token_ids))
    laws = [replace(answer.sampling, seed=0) for answer in answers]  # what was drawn is known
    for law in dict.fromkeys(laws):
        places: list[int] = []
        for place in (place for place in order if laws[place] == law):
            width = min(len(answers[place].token_ids), drafter.max_context + 1)
            if places and (len(places) + 1) * width > BATCH_TOKENS:
                yield law, places
                places = []
            places.append(place)
        if places:
            yield law, places


@torch.no_grad()
def _accepted(
    drafter: NetworkDrafter, answers: Sequence[AnswerLike], law: Sampling
) -> Iterator[Tensor]:
    """[A] of each answer: the chance that a draft of each token is accepted, NaN: no draft."""
    limit = min(drafter.max_context + 1, max(len(answer.token_ids) for answer in answers))
    batch = collate(answers, drafter.vocab_size, limit, with_teacher=False)
    counts = batch.keep.sum(1).tolist()
    lows = [max(1 - answer.num_prompt_tokens, 0) for answer in answers]
    logprobs = torch.cat(
        [a.logprobs[low : low + n] for a, low, n in zip(answers, lows, counts, strict=True)]
    )
    if not sum(counts):
        found = torch.zeros(0)
    elif _temperature_only(law):
        found = _fast(drafter, to_device(batch, drafter.device), logprobs, law)
    else:
        found = _by_reference(drafter, batch, answers, law)
    for answer, low, part in zip(answers, lows, found.split(counts), strict=True):
        num_answer = len(answer.token_ids) - answer.num_prompt_tokens
        yield torch.nn.functional.pad(part, (low, num_answer - low - len(part)), value=torch.nan)


def _temperature_only(law: Sampling) -> bool:
    whole = law.top_k == 0 and law.top_p == 1 and law.min_p == 0
    return law.repetition_penalty == 1 and (law.greedy or whole)


def _fast(drafter: NetworkDrafter, batch: Batch, logprobs: Tensor, law: Sampling) -> Tensor:  # [N]
    """Where the law is a softmax or an argmax: a reduction of each row, nothing vocabulary-wide."""
    network = drafter.trainable
    columns = columns_of(network.draft_ids, drafter.vocab_size, batch.token_ids.device)
    wanted, target = columns[batch.next_ids], logprobs.to(batch.token_ids.device)
    known = None if network.draft_ids is not None else drafter.num_real_ids

    def accepted(logits: Tensor, low: int) -> Tensor:
        rows = logits[:, :known].float()
        place = wanted[low : low + len(rows)]
        inside = (place >= 0) & (place < rows.shape[1])
        place = place.clamp(0, rows.shape[1] - 1)[:, None]
        if law.greedy:  # the lowest id of the maximum, as in kernels.reference
            ids = torch.arange(rows.shape[1], device=rows.device)
            best = ids.where(rows == rows.amax(1, keepdim=True), rows.shape[1]).amin(1)
            return (inside & (best == place[:, 0])).float()
        rows = rows / law.temperature
        draft = rows.gather(1, place)[:, 0] - rows.logsumexp(1)
        chance = (draft - target[low : low + len(rows)]).exp().clamp(max=1)
        return chance.where(inside, 0.0)

    # The last column predicts nothing, and may lie beyond the drafter's context.
    inputs = (t[:, :-1] for t in (batch.token_ids, batch.attention_mask, batch.keep))
    if network.splits:
        states, head = network.states(*inputs), network.head_weight()
        return each_chunk(states, head, accepted, CHUNK_TOKENS).cpu()
    return accepted(network(*inputs), 0).cpu()


def _by_reference(
    drafter: NetworkDrafter, batch: Batch, answers: Sequence[AnswerLike], law: Sampling
) -> Tensor:  # [N]
    """Any other law, as `drafters.scoring` has it: one answer's logits at a time."""
    batch = to_device(batch, drafter.device)
    found = []
    for row, answer in enumerate(answers):
        one = slice(row, row + 1)
        width = int(batch.attention_mask[row].sum()) - 1  # the last token predicts nothing
        if width < 1:
            continue
        inputs = batch.token_ids[one, :width], None, batch.keep[one, :width]
        logits = drafter.widen(drafter.trainable(*inputs))
        first = max(answer.num_prompt_tokens, 1)
        known = answer.logprobs[first - answer.num_prompt_tokens :]
        ids = answer.token_ids.tolist()
        found.append(realised_acceptance(logits, ids, first, known, law))
    return torch.cat(found)

"""The drafter writes, the target judges: training on the texts that drafting really leads to.

On recorded answers a drafter learns what to say after the target's own words; while drafting it
stands after its own. So it continues an answer from some place by a few tokens, and the target's
law at each of them is what it learns (arXiv 2306.13649, 2310.08461). A draft ends at its first
rejection: the token at depth j counts by the chance that all before it are kept,

    w_j = product over i < j of min(1, p(x_i) / q(x_i)),

and what lies behind a sure rejection counts nothing (arXiv 2605.29343 learns at that place, too).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from decode.sampling import law_of
from decode.types import Sampling
from drafters.batches import Batch
from drafters.networks import DraftNetwork
from drafters.teachers import AnyTeacher
from drafters.vocabulary import widen
from drafters.weights import places
from kernels.reference import inverse_cdf, processed_probs


def cut_places(batch: Batch, uniforms: Tensor) -> Tensor:  # [B] in [0, 1) -> [B] int64
    """How many tokens of each row stay: its prompt, and any number of answer tokens but all.

    Rows without a predicted token keep all their text.
    """
    counts = batch.keep.sum(1)
    firsts = torch.where(
        counts > 0, batch.keep.int().argmax(1) + 1, batch.attention_mask.sum(1)
    )  # the place of the first predicted token
    return firsts + (uniforms.to(firsts.device) * counts).long()


@torch.no_grad()
def continue_with_drafter(
    network: DraftNetwork,
    batch: Batch,
    *,
    cuts: Tensor,  # [B] tokens of each row that stay, 1 at least
    uniforms: Tensor,  # [B, n] in [0, 1): what the n new tokens are drawn with
    temperature: float,  # 0: the likeliest token, without chance
    vocab_size: int,
    num_real_ids: int,  # columns beyond are padding and are never drawn
    stop_ids: Sequence[int] = (),  # nothing is written after one of these
) -> Batch:
    """Each row up to its cut, continued by n tokens of the drafter's law; on its device.

    `keep` covers exactly the drafter's tokens, `draft_logprobs` is their chance when they were
    drawn. There is no teacher yet: let the target read the batch, then call `judged`. Rows must
    leave room for n tokens in the drafter's and the target's context.
    """
    assert batch.segments is None, "one answer a row: a packed row has no single end"
    sampling = Sampling(temperature=temperature)
    writer = _Writer(network, batch.token_ids, cuts.to(batch.token_ids.device), sampling)
    for column in uniforms.to(batch.token_ids.device).double().unbind(1):
        writer.write(column, vocab_size, num_real_ids)
    return writer.finish(torch.tensor(list(stop_ids), device=batch.token_ids.device))


class _Writer:
    """Rows that end at the same column: padded at the front, so that one cache serves all."""

    def __init__(
        self, network: DraftNetwork, token_ids: Tensor, cuts: Tensor, sampling: Sampling
    ) -> None:
        from transformers import DynamicCache

        self.network, self.cuts = network, cuts
        self.law = law_of((sampling,) * len(cuts))
        width = int(cuts.max())
        columns = torch.arange(width, device=cuts.device)[None]
        places = columns - (width - cuts)[:, None]  # of each column in its row; negative: padding
        self.mask = (places >= 0).long()
        self.prefix = token_ids[:, :width]
        self.pending = token_ids.gather(1, places.clamp(min=0)) * self.mask
        self.places = places.clamp(min=0)
        self.cache = DynamicCache()
        self.drawn: list[Tensor] = []
        self.logprobs: list[Tensor] = []

    def write(self, uniforms: Tensor, vocab_size: int, num_real_ids: int) -> None:
        """One more token of every row."""
        logits = self.network.read(self.pending, self.cache, self.mask, self.places)
        full = widen(logits, vocab_size, self.network.draft_ids, num_real_ids)
        probs = processed_probs(full, *self.law, None)
        drawn = inverse_cdf(probs, uniforms)
        self.drawn.append(drawn)
        self.logprobs.append(probs.gather(1, drawn[:, None])[:, 0].log().float())
        self.pending = drawn[:, None]
        self.places = (self.cuts + len(self.drawn) - 1)[:, None]
        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)

    def finish(self, stop_ids: Tensor) -> Batch:
        """The rows, padded at the end again; what follows a stop is taken back."""
        drawn, logprobs = torch.stack(self.drawn, 1), torch.stack(self.logprobs, 1)
        stops = torch.isin(drawn, stop_ids).long()
        written = stops.cumsum(1) - stops == 0  # [B, n]; the stop itself stays
        new = torch.arange(drawn.shape[1], device=drawn.device)[None] + self.cuts[:, None]
        size = int(self.cuts.max()) + drawn.shape[1]
        columns = torch.arange(size, device=drawn.device)[None]
        mask = (columns < (self.cuts + written.sum(1))[:, None]).long()
        token_ids = torch.nn.functional.pad(self.prefix, (0, drawn.shape[1]))
        token_ids = token_ids.scatter(1, new, drawn) * mask
        keep = torch.zeros_like(mask).scatter(1, new - 1, written.long()).bool()
        return Batch(
            token_ids=token_ids,
            attention_mask=mask,
            keep=keep,
            next_ids=drawn[written],
            teacher=None,
            draft_logprobs=logprobs[written],
        )


def judged(batch: Batch, teacher: AnyTeacher, temperature: float, chunk_tokens: int) -> Batch:
    """The batch with the target's law at each of the drafter's tokens, and how much each counts."""
    logprobs = token_logprobs(teacher, batch.next_ids, temperature, chunk_tokens)
    weights = alive_weights(batch, logprobs)
    return replace(batch, teacher=teacher, weights=weights)


@torch.no_grad()
def token_logprobs(
    teacher: AnyTeacher, token_ids: Tensor, temperature: float, chunk_tokens: int
) -> Tensor:  # [N] float32
    """log p of these tokens under the target's law at this temperature; 0 or -inf if greedy."""
    found = []
    for low in range(0, len(token_ids), chunk_tokens):
        rows = teacher.rows(low, min(low + chunk_tokens, len(token_ids)))
        assert rows.ids is None, "a truncated teacher knows no law of the drafter's own text"
        found.append(_logprobs(rows.logits, token_ids[low : low + chunk_tokens], temperature))
    return torch.cat(found) if found else torch.zeros(0, device=token_ids.device)


def _logprobs(logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:  # [n] float32
    if temperature == 0:
        chosen = logits.argmax(-1) == token_ids
        return torch.zeros_like(chosen, dtype=torch.float32).masked_fill(~chosen, -torch.inf)
    scaled = logits.float() / temperature
    return scaled.gather(1, token_ids[:, None])[:, 0] - scaled.logsumexp(-1)


def alive_weights(batch: Batch, target_logprobs: Tensor) -> Tensor:  # [N] -> [N] float32
    """The chance that verification gets to each of the drafter's tokens."""
    assert batch.draft_logprobs is not None, "only what the drafter wrote can be rejected"
    accepted = (target_logprobs - batch.draft_logprobs).exp().clamp(max=1)
    rows, place = batch.owners // batch.token_ids.shape[1], places(batch.owners)
    alive = accepted.new_ones(len(batch.token_ids), batch.token_ids.shape[1])
    alive[rows, place + 1] = accepted
    return alive.cumprod(1)[rows, place]

"""Plain decoding of many prompts at once, with a record of what the target thought at every token.

Prompts of a batch are padded on the left, so that all rows append at the same column; a row that
has ended leaves the batch, and its cache rows with it. The draw at a position depends on (seed,
key, position) alone. pipeline/slots.py does the same with fixed shapes, for a GPU.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from decode.noise import PhiloxNoise
from decode.sampling import law_of
from decode.types import Sampling
from kernels.reference import inverse_cdf, processed_probs

if TYPE_CHECKING:
    from transformers import DynamicCache

EOS, LENGTH = "eos", "length"


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to answer under one law."""

    key: str  # names the stream of random numbers: no two jobs of a run share it
    prompt_ids: list[int]
    sampling: Sampling
    max_new_tokens: int

    def uniforms(self) -> list[float]:
        """The random number of every position: the same in any batch, after any resume."""
        noise = PhiloxNoise(self.sampling.seed)
        return noise.uniforms(self.key, 0, "verify", self.max_new_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """An answer of A tokens: what was chosen at each position, and from what. On the CPU."""

    token_ids: Tensor  # [A] int64
    logprobs: Tensor  # [A] float32, under the law; 0 where it is greedy
    lse: Tensor  # [A] float32, of the raw logits
    topk_ids: Tensor  # [A, k] int64, best first
    topk_logits: Tensor  # [A, k] raw
    finish_reason: str  # EOS or LENGTH


class Choice(NamedTuple):
    """One step of a batch: Trace's columns for B rows, where the logits are."""

    token_ids: Tensor  # [B] int64
    logprobs: Tensor  # [B] float32
    lse: Tensor  # [B] float32
    topk_ids: Tensor  # [B, k] int64
    topk_logits: Tensor  # [B, k]


class Generates(Protocol):
    """What answers jobs: `Generator` or `pipeline.slots.SlotGenerator`."""

    def stream(self, shards: Iterable[Sequence[Job]]) -> Iterator[tuple[int, int, Trace]]:
        """(shard, place in it, answer) of every job, in any order; shards begin in order."""


class Generator:
    """A causal LM of transformers, ready to answer batches of jobs."""

    def __init__(
        self,
        model: torch.nn.Module,
        eos_token_ids: frozenset[int],
        num_top_logits: int,
        batch_size: int,
    ) -> None:
        self.model = model
        self.eos_token_ids = eos_token_ids
        self.num_top_logits = num_top_logits
        self.batch_size = batch_size
        self.device = next(model.parameters()).device

    def stream(self, shards: Iterable[Sequence[Job]]) -> Iterator[tuple[int, int, Trace]]:
        """Batches of one shard after another; neighbours in a shard share a batch."""
        for number, jobs in enumerate(shards):
            for start in range(0, len(jobs), self.batch_size):
                traces = self.answer(jobs[start : start + self.batch_size])
                yield from ((number, start + place, trace) for place, trace in enumerate(traces))

    @torch.inference_mode()
    def answer(self, jobs: Sequence[Job]) -> list[Trace]:
        """Answer one batch; the k-th trace belongs to the k-th job."""
        from transformers import DynamicCache

        steps: list[list[Choice]] = [[] for _ in jobs]  # of each job, [1]-rows of choices
        ended = [LENGTH for _ in jobs]
        uniforms = [() if job.sampling.greedy else job.uniforms() for job in jobs]
        live = list(range(len(jobs)))  # jobs whose rows are in the batch, in row order
        ids, mask = pad_left([job.prompt_ids for job in jobs], self.device)
        cache = DynamicCache()
        while True:
            logits = self._forward(ids, mask, cache)
            place = len(steps[live[0]])
            drawn = [row for row, job in enumerate(live) if uniforms[job]]
            choice = choose(
                logits,
                tuple(jobs[live[row]].sampling for row in drawn),
                drawn,
                [uniforms[live[row]][place] for row in drawn],
                self.num_top_logits,
            )
            refuse_no_numbers(choice.lse, [jobs[job].key for job in live])
            keep = []
            for row, (job, token) in enumerate(zip(live, choice.token_ids.tolist(), strict=True)):
                steps[job].append(_row(choice, row))
                if token in self.eos_token_ids:
                    ended[job] = EOS
                elif place + 1 < jobs[job].max_new_tokens:
                    keep.append(row)
            if not keep:
                return [joined(*pair) for pair in zip(steps, ended, strict=True)]
            ids = choice.token_ids[:, None]
            if len(keep) < len(live):
                rows = torch.tensor(keep, device=self.device)
                cache.batch_select_indices(rows)
                ids, mask, live = ids[rows], mask[rows], [live[row] for row in keep]
            mask = torch.cat([mask, mask.new_ones(len(live), 1)], dim=1)

    def _forward(self, ids: Tensor, mask: Tensor, cache: "DynamicCache") -> Tensor:  # [B, V]
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]


def pad_left(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, Tensor]:  # both [B, longest] int64
    """Token ids and mask of prompts that all end at the last column."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        if prompt:
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


def choose(
    logits: Tensor,  # [B, V]
    samplings: tuple[Sampling, ...],  # of the rows that are drawn
    drawn: Sequence[int],  # those rows
    uniforms: Sequence[float],  # one for each of them
    num_top_logits: int,
) -> Choice:
    """Each row's next token, and what it was chosen from.

    A greedy law is one-hot at the lowest id of the maximum, which is what argmax returns: its rows
    need no probabilities over the vocabulary, on a CPU a tenth of the step.
    """
    tokens = logits.argmax(dim=-1)
    logprobs = torch.zeros(len(logits), device=logits.device)
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        probs = processed_probs(logits[rows], *law_of(samplings))
        chances = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)
        ids = inverse_cdf(probs, chances)
        tokens[rows] = ids
        logprobs[rows] = probs.gather(1, ids[:, None])[:, 0].log().float()
    best = logits.topk(min(num_top_logits, logits.shape[-1]), dim=-1)
    lse = logits.float().logsumexp(dim=-1)
    return Choice(tokens, logprobs, lse, best.indices, best.values)


def refuse_no_numbers(lse: Tensor, keys: Sequence[str]) -> None:
    """Raise ValueError where a row's log-sum-exp [B] is not finite, naming its job."""
    finite = torch.isfinite(lse)
    if not finite.all():
        bad = next(key for key, ok in zip(keys, finite.tolist(), strict=True) if not ok)
        raise ValueError(
            f"the target's logits are not finite while answering {bad}; try "
            "stages.regenerate.dtype=float32, or save the target's weights again"
        )


def _row(choice: Choice, row: int) -> Choice:
    return Choice(*(column[row : row + 1].cpu() for column in choice))


def joined(parts: Sequence[Choice], finish_reason: str) -> Trace:
    """The answer that these pieces of one row, each [n, ...], make up."""
    whole = Choice(*(torch.cat(columns) for columns in zip(*parts, strict=True)))
    return Trace(*whole, finish_reason)

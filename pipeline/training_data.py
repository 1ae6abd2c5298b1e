"""What a drafter is trained on, and the batch of every step as a function of (seed, step)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.types import Sampling
from drafters.training import AnswerLike
from pipeline.chat import prompt_ids

BATCHES_PER_WINDOW = (
    16  # rows stand by length within so many batches: little padding, still shuffled
)


@dataclass(frozen=True, slots=True, eq=False)
class TextExample:
    """A prompt and a response that somebody else wrote: nothing is known of the target's law."""

    token_ids: Tensor  # [T] int64
    num_prompt_tokens: int
    sampling: Sampling
    logprobs: Tensor  # this and what follows: empty
    lse: Tensor
    topk_ids: Tensor
    topk_logits: Tensor


def from_responses(
    prompts: Iterable[Mapping[str, Any]], tokenizer: Any, eos: int | None
) -> Iterator[TextExample]:
    """The data set's own responses, where it has them, each ended by `eos`."""
    nothing = torch.zeros(0)
    for prompt in prompts:
        if prompt["response"]:
            before = prompt_ids(tokenizer, prompt)
            after = tokenizer(prompt["response"], add_special_tokens=False).input_ids
            tokens = torch.tensor([*before, *after, *([] if eos is None else [eos])])
            laws = (nothing, nothing, nothing, nothing)
            yield TextExample(tokens, len(before), Sampling(), *laws)


def fitting(answers: Iterable[AnswerLike], max_tokens: int) -> list[AnswerLike]:
    """Those that have something to learn within their first `max_tokens` tokens."""
    return [
        answer
        for answer in answers
        if min(len(answer.token_ids), max_tokens) > max(answer.num_prompt_tokens, 1)
    ]


class BatchOrder:
    """Which rows form micro-batch m: an epoch holds each row once, in an order drawn from the seed.

    Nothing is remembered between calls, so a resumed run sees what an uninterrupted one would.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self.lengths = np.asarray(lengths)
        self.batch_size = batch_size
        self.seed = seed
        self.num_batches = -(-len(lengths) // batch_size)  # of an epoch
        self._plans: dict[int, list[list[int]]] = {}  # the epoch under way

    def __getitem__(self, micro_batch: int) -> list[int]:
        epoch, place = divmod(micro_batch, self.num_batches)
        if epoch not in self._plans:
            self._plans = {epoch: self._plan(epoch)}
        return self._plans[epoch][place]

    def _plan(self, epoch: int) -> list[list[int]]:
        random = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
        order = random.permutation(len(self.lengths))
        size, window = self.batch_size, self.batch_size * BATCHES_PER_WINDOW
        batches: list[list[int]] = []
        for start in range(0, len(order), window):
            rows = order[start : start + window]
            rows = rows[np.argsort(self.lengths[rows], kind="stable")]
            batches += [rows[low : low + size].tolist() for low in range(0, len(rows), size)]
        return [batches[place] for place in random.permutation(len(batches))]

"""What a drafter is trained on, and the batch of every step as a function of (seed, step)."""

import hashlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from decode.types import Sampling
from drafters.packing import first_fit_decreasing
from drafters.training import AnswerLike
from pipeline.chat import prompt_ids

T = TypeVar("T")
BATCHES_PER_WINDOW = (
    16  # rows stand by length within so many batches: little padding, still shuffled
)
BATCHES_AHEAD = 4  # that are made while the device works
NOTHING = torch.zeros(0)


@dataclass(frozen=True, slots=True, eq=False)
class TextExample:
    """A prompt and a response; the laws are empty where nothing is known of the target's."""

    token_ids: Tensor  # [T] int64
    num_prompt_tokens: int
    sampling: Sampling
    logprobs: Tensor = NOTHING
    lse: Tensor = NOTHING
    topk_ids: Tensor = NOTHING
    topk_logits: Tensor = NOTHING


def from_responses(
    prompts: Iterable[Mapping[str, Any]], tokenizer: Any, eos: int | None
) -> Iterator[TextExample]:
    """The data set's own responses, where it has them, each ended by `eos`."""
    for prompt in prompts:
        if prompt["response"]:
            before = prompt_ids(tokenizer, prompt)
            after = tokenizer(prompt["response"], add_special_tokens=False).input_ids
            tokens = torch.tensor([*before, *after, *([] if eos is None else [eos])])
            yield TextExample(tokens, len(before), Sampling())


def lot(name: str) -> float:
    """A number in [0, 1), like a random one, and the same on every machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def rehearsal(num_own: int, num_others: int, share: float) -> Callable[[str], bool]:
    """Which prompts of others to take, by id, so that they are `share` of all that is taken.

    Where there are fewer, all of them.
    """
    wanted = share / (1 - share) * num_own
    return lambda name: lot(f"rehearsal:{name}") * num_others < wanted


class Rows(Sequence[TextExample]):
    """Those answers that have something to learn within their first `max_tokens` tokens.

    Made for millions of tokens: ids are one flat int32 tensor. What the target thought is kept only
    `with_teacher`, in its own precision.
    """

    def __init__(
        self, answers: Iterable[AnswerLike], max_tokens: int, with_teacher: bool = False
    ) -> None:
        tokens: list[Tensor] = []
        self._laws: list[tuple[Tensor, Tensor, Tensor]] = []
        prompts, self._samplings = [], []
        for answer in answers:
            if min(len(answer.token_ids), max_tokens) > max(answer.num_prompt_tokens, 1):
                tokens.append(answer.token_ids[:max_tokens].int())
                prompts.append(answer.num_prompt_tokens)
                self._samplings.append(answer.sampling)
                if with_teacher:
                    kept = slice(max_tokens - answer.num_prompt_tokens)
                    ids, logits = answer.topk_ids[kept].int(), narrowed(answer.topk_logits[kept])
                    self._laws.append((answer.lse[kept].clone(), ids, logits))
        self._tokens = torch.cat(tokens) if tokens else NOTHING.int()
        self.lengths = np.array([len(row) for row in tokens], dtype=np.int64)
        self.num_prompt_tokens = np.array(prompts, dtype=np.int64)
        self._ends = self.lengths.cumsum()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: Any) -> Any:
        end = int(self._ends[row])
        tokens = self._tokens[end - int(self.lengths[row]) : end].long()
        lse, ids, logits = self._laws[row] if self._laws else (NOTHING, NOTHING, NOTHING)
        return TextExample(
            tokens,
            int(self.num_prompt_tokens[row]),
            self._samplings[row],
            lse=lse,
            topk_ids=ids,
            topk_logits=logits,
        )

    @property
    def num_predicted(self) -> np.ndarray:  # [rows]
        """Answer tokens of each row that something is read before."""
        return self.lengths - np.maximum(self.num_prompt_tokens, 1)


def narrowed(values: Tensor) -> Tensor:
    """A copy in bfloat16 where that loses nothing, as when a bfloat16 target computed them."""
    half = values.bfloat16()
    return half if torch.equal(half.float(), values.float()) else values.clone()


class BatchOrder:
    """Which rows form micro-batch m: an epoch holds each row once, in an order drawn from the seed.

    A micro-batch has `batch_size` rows, or, where answers are packed, as many answers as fit into
    `batch_size` rows of `row_tokens` tokens. Nothing is remembered between calls but for speed, so
    a resumed run sees what an uninterrupted one would.
    """

    def __init__(
        self, lengths: Sequence[int] | np.ndarray, batch_size: int, seed: int, row_tokens: int = 0
    ) -> None:
        self.lengths = np.asarray(lengths)
        self.batch_size, self.row_tokens = batch_size, row_tokens
        self.seed = seed
        self._firsts = [0]  # the first micro-batch of each epoch that has been asked for
        self._plan = lru_cache(maxsize=2)(self._planned)  # the epoch under way and the one ahead

    def __getitem__(self, micro_batch: int) -> list[int]:
        epoch = 0
        while True:
            plan = self._plan(epoch) if epoch + 1 >= len(self._firsts) else None
            if plan is not None:
                self._firsts[epoch + 1 :] = [self._firsts[epoch] + len(plan)]
            if micro_batch < self._firsts[epoch + 1]:
                return self._plan(epoch)[micro_batch - self._firsts[epoch]]
            epoch += 1

    def _planned(self, epoch: int) -> list[list[int]]:
        random = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
        order = random.permutation(len(self.lengths))
        if self.row_tokens:
            return self._packed(order.tolist())
        size, window = self.batch_size, self.batch_size * BATCHES_PER_WINDOW
        batches: list[list[int]] = []
        for start in range(0, len(order), window):
            rows = order[start : start + window]
            rows = rows[np.argsort(self.lengths[rows], kind="stable")]
            batches += [rows[low : low + size].tolist() for low in range(0, len(rows), size)]
        return [batches[place] for place in random.permutation(len(batches))]

    def _packed(self, order: list[int]) -> list[list[int]]:
        """As many of the next answers as first-fit gets into a batch, again and again."""
        capacity = self.batch_size * self.row_tokens
        batches, start = [], 0
        while start < len(order):
            sums = self.lengths[order[start : start + capacity]].cumsum()
            count = max(1, int(np.searchsorted(sums, capacity, side="right")))
            while self._num_rows(order[start : start + count]) > self.batch_size:
                count -= 1
            batches.append(order[start : start + count])
            start += count
        return batches

    def _num_rows(self, answers: Sequence[int]) -> int:
        return len(first_fit_decreasing(self.lengths[answers].tolist(), self.row_tokens))


def ahead(
    make: Callable[[int], T], numbers: Iterable[int], begin: Callable[[], None] | None = None
) -> Generator[T, None, None]:
    """make(n) of each number in order, the next ones made in a thread while the caller works.

    The thread calls `begin` first.
    """
    with ThreadPoolExecutor(1, "batches", initializer=begin) as pool:
        waiting: deque[Future[T]] = deque()
        try:
            for number in numbers:
                waiting.append(pool.submit(make, number))
                if len(waiting) > BATCHES_AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

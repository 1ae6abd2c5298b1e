"""The batches of every step, made ahead of time by a thread of their own."""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafters.batches import Batch, collate
from drafters.packing import pack
from pipeline.throughput import Work
from pipeline.training_data import BatchOrder, Rows, ahead


@dataclass(frozen=True)
class Fed:
    """A micro-batch in the computer's memory, and what it asks for."""

    number: int
    batch: Batch
    work: Work


@dataclass(frozen=True, kw_only=True)
class Feed:
    """Deals the micro-batches of each step to `size` processes; this is number `index`.

    The same rows form a step however many processes there are, as long as they divide
    `accumulate`.
    """

    rows: Rows
    order: BatchOrder
    accumulate: int  # micro-batches of a step
    vocab_size: int
    max_tokens: int
    with_teacher: bool
    alone: Callable[[int], bool]  # whether answers of this step stand one a row though packed
    index: int
    size: int
    pinned: bool  # in memory that a GPU reads by itself

    def from_step(self, step: int) -> Generator[list[Fed], None, None]:
        """This process's micro-batches of `step` and all later steps; never ends."""

        def numbers() -> Iterator[int]:
            turn = (step - 1) * self.accumulate + self.index
            while True:
                yield turn
                turn += self.size

        begin = None
        if self.pinned:  # each thread has a current GPU of its own, which pinning would wake
            begin = partial(torch.cuda.set_device, torch.cuda.current_device())
        made = ahead(self._made, numbers(), begin)
        try:
            while True:
                yield list(islice(made, self.accumulate // self.size))
        finally:
            made.close()

    def num_steps(self, num_tokens: int) -> int:
        """Steps until `num_tokens` answer tokens of these rows have been learned from."""
        counts, seen, step = self.rows.num_predicted, 0, 0
        while seen < num_tokens:
            for number in range(step * self.accumulate, (step + 1) * self.accumulate):
                seen += int(counts[self.order[number]].sum())
            step += 1
        return step

    def uniforms(self, number: int, shape: tuple[int, ...]) -> Tensor:
        """Numbers in [0, 1) for micro-batch `number`: a function of it and the seed."""
        key = np.array([self.order.seed, 2**63 + number], dtype=np.uint64)  # epochs are small
        return torch.from_numpy(np.random.Generator(np.random.Philox(key=key)).random(shape))

    def _made(self, number: int) -> Fed:
        answers = [self.rows[row] for row in self.order[number]]
        size = self.order.row_tokens
        if size and not self.alone(number // self.accumulate + 1):
            batch = pack(answers, self.vocab_size, self.max_tokens, size, self.with_teacher)
        else:
            batch = collate(answers, self.vocab_size, self.max_tokens, self.with_teacher)
        work = Work.of(batch)
        return Fed(number, each_tensor(batch, Tensor.pin_memory) if self.pinned else batch, work)


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on another device; from pinned memory without waiting for it."""
    return each_tensor(batch, lambda tensor: tensor.to(device, non_blocking=True))


def each_tensor(record: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The record with every tensor in it changed, those of records within included."""
    changes = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Tensor):
            changes[field.name] = change(value)
        elif is_dataclass(value):
            changes[field.name] = each_tensor(value, change)
    return replace(record, **changes)

"""Plain greedy decoding on the device: a step's token is the next step's input, nobody waits.

The host queues step n + 1 before it looks at the token of step n, which came by an asynchronous
copy; a text that has ended is so noticed one step late, and what was read too much is forgotten.
What `pipeline.bench_engine` measures: the least that a step of decode.device can cost.
"""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from decode.native.kernel_forward import BATCHES, KernelForward, Step
from kernels.greedy import take_greedy


@torch.inference_mode()
def write_greedily(
    forward: KernelForward,
    prompts: Sequence[Sequence[int]],  # of at least one token each
    max_new_tokens: int,
    eos_token_ids: Collection[int] = (),
    note: Callable[[], None] = lambda: None,  # called when the tokens of a step have arrived
) -> list[list[int]]:
    """What each prompt is continued by, EOS included; at most as many rows as a pass takes."""
    assert 1 <= len(prompts) <= BATCHES[-1]
    assert max_new_tokens >= 1
    rows = [forward.open() for _ in prompts]
    for row, prompt in zip(rows, prompts, strict=True):
        row.reserve(len(prompt) + max_new_tokens)
        if len(prompt) > 1:
            forward([row], [prompt[:-1]], with_logits=False)
    step = forward.step(len(rows), 1)
    step.fill(rows, [prompt[-1:] for prompt in prompts])
    texts: list[list[int]] = [[] for _ in rows]
    arrivals = _Arrivals(forward, step, max_new_tokens)
    for number in range(max_new_tokens):
        arrivals.queue(number)
        if number and _take(texts, arrivals.wait(number - 1), eos_token_ids, note):
            return texts
    _take(texts, arrivals.wait(max_new_tokens - 1), eos_token_ids, note)
    return texts


class _Arrivals:
    """Steps that were queued, and the host's copies of their tokens."""

    def __init__(self, forward: KernelForward, step: Step, most: int) -> None:
        self._forward, self._step = forward, step
        self._on_cuda = step.inputs.is_cuda
        self._host = torch.empty(most, step.num_rows, dtype=torch.int32, pin_memory=self._on_cuda)
        self._events = [torch.cuda.Event() for _ in range(most)] if self._on_cuda else []
        forward.refresh()

    def queue(self, number: int) -> None:
        step = self._step
        # The tokens leave a graph where it computed them, at the same place in each run.
        key = ("greedy", step.num_rows)
        taken = self._forward.graphs.run(key, self._compute, changes=[step.inputs])
        self._host[number].copy_(taken, non_blocking=True)
        if self._on_cuda:
            self._events[number].record()

    def wait(self, number: int) -> list[int]:
        if self._on_cuda:
            self._events[number].synchronize()
        return self._host[number].tolist()

    def _compute(self) -> Tensor:
        step, batch = self._step, self._step.batch
        logits = self._forward.compute(step)
        assert logits is not None
        taken = torch.empty_like(batch.slots)
        take_greedy(logits, step.token_ids, batch.positions, batch.widths, taken)
        return taken


def _take(
    texts: list[list[int]],
    token_ids: Sequence[int],
    eos_token_ids: Collection[int],
    note: Callable[[], None],
) -> bool:
    """Add a step's tokens to the texts that go on; True where none does."""
    note()
    for text, token in zip(texts, token_ids, strict=False):
        if not text or text[-1] not in eos_token_ids:
            text.append(token)
    return all(text[-1] in eos_token_ids for text in texts)

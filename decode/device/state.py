"""What the device knows of every row, by the slot that the row has in the target's cache."""

from collections.abc import Sequence

import torch
from torch import Tensor

from decode.clock import Clock
from decode.native.static_cache import StaticCache
from kernels.step import stamp
from kernels.step_state import ADVANCED, BEGAN, NUM_MOMENTS, PRESENTED, Slots

START, DRAFTED, DONE = BEGAN, PRESENTED, ADVANCED  # moments of a step
NANO = 1e9


class DeviceState:
    """Tensors that steps read and change. They grow with the target's cache, and then move."""

    def __init__(
        self,
        cache: StaticCache,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        num_models: int,
        clock: Clock,
    ) -> None:
        self.device = cache.keys.device
        self.version = 0  # how often the tensors have moved
        self._cache, self._clock, self._vocab_size = cache, clock, vocab_size
        with torch.inference_mode(False):  # so that they can be written in any mode
            self.eos = torch.tensor(list(eos_token_ids), dtype=torch.int32, device=self.device)
            self.moments = torch.zeros(NUM_MOMENTS, dtype=torch.int64, device=self.device)
            shape = cache.num_rows, cache.capacity
            self.slots = Slots(
                self._zeros(*shape),
                self._zeros(shape[0]),
                self._zeros(shape[0]),
                self._zeros(shape[0]),
                self._zeros(2, shape[0]).long(),
                None,
            )
            self.read = self._zeros(num_models, shape[0])

    @property
    def changes(self) -> list[Tensor]:
        """What a step reads and then writes over."""
        s = self.slots
        kept = [s.token_ids, s.lengths, s.left, s.done, self.read]
        return kept if s.counts is None else [*kept, s.counts]

    def fit(self, with_counts: bool) -> None:
        """Have room for what the target's cache has room for, and counts where they are needed."""
        s = self.slots
        shape = self._cache.num_rows, self._cache.capacity
        counted = s.counts is not None
        if tuple(s.token_ids.shape) == shape and (counted or not with_counts):
            return
        with torch.inference_mode(False):
            counts = self._zeros(shape[0], self._vocab_size) if counted or with_counts else None
            rows = shape[0]
            new = Slots(
                self._zeros(*shape),
                self._zeros(rows),
                self._zeros(rows),
                self._zeros(rows),
                self._zeros(2, rows).long(),
                counts,
            )
            read = self._zeros(len(self.read), rows)
        for name in ("token_ids", "lengths", "left", "done", "times", "counts"):
            _copy(getattr(s, name), getattr(new, name))
        _copy(self.read, read)
        self.slots, self.read = new, read
        self.version += 1

    def admit(self, slot: int, prompt: Sequence[int], left: int, counted: bool) -> None:
        """A fresh row: its verified tokens, and how many may follow."""
        s = self.slots
        given = torch.tensor(prompt, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        s.token_ids[slot, : len(prompt)].copy_(given, non_blocking=True)
        s.lengths[slot].fill_(len(prompt))
        s.left[slot].fill_(left)
        s.done[slot].zero_()
        self.read[:, slot].zero_()
        if s.counts is not None:
            s.counts[slot].zero_()
            if counted:
                ids = s.token_ids[slot, : len(prompt)].long()
                s.counts[slot].index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    @property
    def stamped(self) -> Tensor | None:
        """The moments where kernels note them; None where the host's clock does."""
        return self.moments if self.moments.is_cuda else None

    def mark_on_host(self, moment: int) -> None:
        """Note when a step comes to this point, where no kernel does."""
        if self.stamped is None:
            self._mark(self.moments, moment)

    def mark(self, moment: int) -> None:
        """Note when the device comes to this point of the step."""
        self._mark(self.moments, moment)

    def mark_prompt(self, slot: int, end: bool) -> None:
        """Note when reading a row's prompt begins or ends."""
        self._mark(self.slots.times[int(end)], slot)

    def _mark(self, times: Tensor, place: int) -> None:
        if times.is_cuda:
            stamp(times, place)
        else:
            times[place] = int(self._clock.now() * NANO)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)


def _copy(old: Tensor | None, new: Tensor | None) -> None:
    """The old numbers in the first places of the new, larger tensor."""
    if old is not None and new is not None:
        new[tuple(slice(size) for size in old.shape)].copy_(old)

"""What is known of the target's law at N positions: all logits, the largest of them, or states."""

from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_TAIL = 1e-7  # float32 sums do not know less; a tail of zero would be an infinite reverse KL


@dataclass(frozen=True)
class Teacher:
    """The target's law at N positions; `ids` None: `logits` has a column for each of V ids.

    p_i = exp(logit_i - lse) is exact for every known id (temperature 1, nothing truncated).
    """

    logits: Tensor  # [N, k] raw, or [N, V]
    lse: Tensor  # [N] log-sum-exp of all V raw logits
    ids: Tensor | None  # [N, k] int64
    vocab_size: int

    @classmethod
    def full(cls, logits: Tensor) -> "Teacher":
        """From all logits [N, V]."""
        return cls(logits, wide(logits).logsumexp(-1), None, logits.shape[-1])

    @classmethod
    def top(cls, logits: Tensor, k: int) -> "Teacher":
        """What is kept of all logits [N, V]: the k largest and the log-sum-exp."""
        best = logits.topk(k)
        lse = wide(logits).logsumexp(-1)
        return cls(best.values, lse, best.indices, logits.shape[-1])

    @classmethod
    def lazy(cls, states: Tensor, head_weight: Tensor, vocab_size: int) -> "LazyTeacher":
        """From final hidden states [N, H] and the head [V, H]: logits exist when asked for."""
        return LazyTeacher(states, head_weight, vocab_size)

    def __len__(self) -> int:
        return len(self.lse)

    def rows(self, low: int, high: int) -> "Teacher":
        """The same, of positions low to high - 1."""
        ids = None if self.ids is None else self.ids[low:high]
        return Teacher(self.logits[low:high], self.lse[low:high], ids, self.vocab_size)

    @property
    def complete(self) -> bool:
        """Whether all logits are known, and not the largest only."""
        return self.ids is None

    def raw(self, low: int, high: int) -> Tensor:  # [high - low, V]
        """All logits of positions low to high - 1, where they are complete."""
        assert self.ids is None, "only the largest logits are known"
        return self.logits[low:high]

    def to(self, device: torch.device | str) -> "Teacher":
        ids = None if self.ids is None else self.ids.to(device)
        return Teacher(self.logits.to(device), self.lse.to(device), ids, self.vocab_size)

    def known(self, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(draft columns [N, k], 0 where outside D; probabilities [N, k]; inside D [N, k] bool)."""
        found = columns.expand(len(self.lse), -1) if self.ids is None else columns[self.ids]
        return found.clamp(min=0), self._probs(), found >= 0

    def dense(self, columns: Tensor, num_columns: int) -> Tensor:  # [N, C]
        """Probabilities of the draft columns, the tail spread evenly; rows sum to the mass in D.

        A draft column that no id of the target has gets nothing.
        """
        if self.ids is None:
            ids, exists = _ids_of(columns, num_columns)
            return self._probs()[:, ids] * exists
        found, probs, inside = self.known(columns)
        num_unknown = self.vocab_size - probs.shape[-1]
        tail = (1 - probs.sum(-1, keepdim=True)).clamp(min=LEAST_TAIL) / max(1, num_unknown)
        _, exists = _ids_of(columns, num_columns)
        spread = tail * exists if num_unknown else torch.zeros_like(tail * exists)
        # Ids outside D go to one column more, which is cut off: no data-dependent shapes.
        room = torch.nn.functional.pad(spread, (0, 1))
        return room.scatter(1, found.where(inside, num_columns), probs)[:, :num_columns]

    def _probs(self) -> Tensor:
        lse = self.lse.to(wide(self.logits).dtype)
        return (wide(self.logits) - lse[:, None]).exp()


@dataclass(frozen=True)
class LazyTeacher:
    """The target's law as hidden states before its bias-free head: [N, H] instead of [N, V]."""

    states: Tensor  # [N, H]
    head_weight: Tensor  # [V, H], the target's own: neither copied nor trained
    vocab_size: int

    def __len__(self) -> int:
        return len(self.states)

    @property
    def complete(self) -> bool:
        return True

    def rows(self, low: int, high: int) -> Teacher:
        """The law at positions low to high - 1."""
        return Teacher.full(self.raw(low, high))

    @torch.no_grad()
    def raw(self, low: int, high: int) -> Tensor:  # [high - low, V]
        """All logits of positions low to high - 1."""
        weight = self.head_weight.detach()
        with torch.autocast(weight.device.type, enabled=False):  # in the target's own precision
            logits = torch.nn.functional.linear(self.states[low:high].to(weight.dtype), weight)
        return logits[:, : self.vocab_size]

    def to(self, device: torch.device | str) -> "LazyTeacher":
        return LazyTeacher(self.states.to(device), self.head_weight.to(device), self.vocab_size)


AnyTeacher = Teacher | LazyTeacher


def wide(values: Tensor) -> Tensor:
    """In float32 at least: what sums over a vocabulary need."""
    return values if values.dtype == torch.float64 else values.float()


def _ids_of(columns: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """(the id of each draft column, 0 where there is none; whether there is one), both [C]."""
    ids = columns.new_full((num_columns + 1,), -1)
    places = columns.where(columns >= 0, num_columns)
    ids = ids.scatter(0, places, torch.arange(len(columns), device=columns.device))[:num_columns]
    return ids.clamp(min=0), ids >= 0

"""A step on the device, as its kernels hand it to one another: B rows, their state by slot.

Where the host and a kernel count alike (who drafted, the fields of a row's record, moments of a
step), the numbers stand here once.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

NONE, LOOKUP, MODEL = 0, 1, 2  # who drafted
NUM_FIELDS = 10  # of a row's record, before its tokens
LIMIT, DRAFTED, ACCEPTED, EMITTED, SOURCE, BROKEN, FAILED, LENGTH, OPENED, READ = range(NUM_FIELDS)
BEGAN, PRESENTED, ADVANCED, READING = range(4)  # moments; READING: a model reads old tokens
NUM_MOMENTS = 4
FROM_MODEL, FROM_LOOKUP = tl.constexpr(MODEL), tl.constexpr(LOOKUP)
FIELDS = tl.constexpr(NUM_FIELDS)
ONE_WARP = 1  # of each program: what one thread writes, another has read before


@dataclass(frozen=True)
class Slots:
    """The state of all rows, by slot."""

    token_ids: Tensor  # [S, capacity] int32, verified
    lengths: Tensor  # [S] int32, how many of them there are
    left: Tensor  # [S] int32, tokens that may still be emitted
    done: Tensor  # [S] int32, 1 where the text has ended
    times: Tensor  # [2, S] int64, nanoseconds: when reading the prompt began and ended
    counts: Tensor | None  # [S, V] int32, how often a token stands in token_ids


@dataclass(frozen=True)
class Asked:
    """What the host decided for the rows of a step: [B] int64 each."""

    slots: Tensor
    there: Tensor  # 0: padding
    limits: Tensor  # tokens to draft at most
    lookups: Tensor  # which lookup is asked first; -1: none
    models: Tensor  # 1: the model drafts, where no lookup matched
    model_slots: Tensor  # of the model's cache
    read: Tensor  # tokens that the model has read at least


@dataclass(frozen=True)
class Drafting:
    """The drafts of a step while they grow."""

    drafts: Tensor  # [B, K] int32, -1 past the end
    drafted: Tensor  # [B] int32
    sources: Tensor  # [B] int32: NONE, LOOKUP or MODEL
    limits: Tensor  # [B] int32, tokens that could have been drafted
    failed: Tensor  # [B] int32, 1 where the model's logits are no law

    @classmethod
    def new(cls, batch: int, width: int, device: torch.device) -> "Drafting":
        """Memory that begin() fills."""
        numbers = torch.empty(4, batch, dtype=torch.int32, device=device)
        drafts = torch.empty(batch, width, dtype=torch.int32, device=device)
        return cls(drafts, *numbers)

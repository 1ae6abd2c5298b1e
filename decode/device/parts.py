"""What a drafter hands over so that it drafts on the device: a lookup, a model, or both.

Where both are there, a row drafts with the lookup where it matches and else with the model. Two
drafters on one model hand over the same object, so that its cache reads a token once.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from decode.native.kernel_forward import KernelForward
from kernels.ngram_table import Table


@dataclass(frozen=True, slots=True)
class DeviceLookup:
    """The longest suffix that occurs earlier, at its most recent occurrence, and what followed;
    where nothing does, what a table says that follows.
    """

    min_ngram: int  # tokens of the shortest suffix looked for
    max_ngram: int  # of the longest
    max_offer: int  # tokens proposed at most
    min_match: int  # tokens that must agree before it is believed, there as in the table
    table: Table | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DeviceModel:
    """A network in the kernels' forward, over a static cache of its own."""

    forward: KernelForward
    draft_ids: Tensor | None  # [C] int64, ascending: the target's id of each logit; None: all
    max_context: int  # tokens


@dataclass(frozen=True, slots=True, eq=False)
class DeviceParts:
    """At least one of them."""

    lookup: DeviceLookup | None
    model: DeviceModel | None


@runtime_checkable
class DeviceDrafter(Protocol):
    """A drafter that can be run there."""

    def on_device(self) -> DeviceParts | None:
        """Its parts, the same ones at every call; None where it cannot draft there."""

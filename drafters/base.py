"""What every kind of drafter has: a config that builds it, and the pieces it is built from."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from decode.native.products import Product
from decode.types import Drafter


@dataclass(frozen=True)
class TargetParts:
    """The pieces of a target that a drafter may share: never copied, never changed."""

    model: nn.Module  # a Hugging Face causal LM
    tokenizer: Any
    vocab_size: int  # columns of the target's logits
    name_or_path: str
    head: Product | None = None  # the model's head as the target multiplies with it, if it may tell


@dataclass(frozen=True)
class BuildContext:
    """What a config builds from."""

    target: TargetParts
    weights: Path | None = None  # folder of a trained drafter; None: as the config initialises it
    parts: Mapping[str, Drafter] = field(default_factory=dict)  # other members of the pool, by name

    def part(self, name: str, user: str) -> Drafter:
        """The member of that name; ValueError where what `user` says it needs is not there."""
        if name not in self.parts:
            raise ValueError(
                f"the {user} needs the pool entry {name!r}, which is not among "
                f"{sorted(self.parts)}; add it to the pool or name another"
            )
        return self.parts[name]


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(ABC):
    """Settings of one kind; the subclass sits in the module named after the kind."""

    @property
    def part_names(self) -> tuple[str, ...]:
        """Pool members that must be built first."""
        return ()

    @abstractmethod
    def build(self, context: BuildContext) -> Drafter:
        """A drafter ready to guess. Raises ValueError where target and drafter do not fit."""


def target_parts(target: Any) -> TargetParts:
    """The shareable pieces of a target backend, which must hold a transformers model."""
    if isinstance(target, TargetParts):
        return target
    missing = [name for name in ("model", "tokenizer", "vocab_size") if not hasattr(target, name)]
    if missing:
        raise ValueError(
            f"{type(target).__name__} has no {', '.join(missing)}, so no drafter can share "
            "its parts; pass a target of the transformers backend, or drafters built already"
        )
    name = getattr(target, "name_or_path", None) or getattr(target.model, "name_or_path", "")
    head = getattr(target, "head", None)
    return TargetParts(target.model, target.tokenizer, target.vocab_size, str(name), head)


def common_prefix(left: list[int], right: list[int]) -> int:
    """How many first tokens two lists share; compares slices, so thousands take microseconds."""
    high = min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

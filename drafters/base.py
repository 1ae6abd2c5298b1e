"""What every kind of drafter has: a config that builds it, and the pieces it is built from."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from decode.types import Drafter


@dataclass(frozen=True)
class TargetParts:
    """The pieces of a target that a drafter may share: never copied, never changed."""

    model: nn.Module  # a Hugging Face causal LM
    tokenizer: Any
    vocab_size: int  # columns of the target's logits
    name_or_path: str


@dataclass(frozen=True)
class BuildContext:
    """What a config builds from."""

    target: TargetParts
    weights: Path | None = None  # folder of a trained drafter; None: as the config initialises it
    parts: Mapping[str, Drafter] = field(default_factory=dict)  # other members of the pool, by name


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

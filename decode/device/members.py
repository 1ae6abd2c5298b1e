"""The pool as the device sees it: who has which lookup and which model, and what each offers."""

from collections.abc import Mapping
from dataclasses import dataclass

from decode.device.parts import DeviceLookup, DeviceModel, DeviceParts
from decode.types import MAX_DRAFT_TOKENS
from kernels.step_state import LOOKUP, MODEL


@dataclass(frozen=True)
class Members:
    """Each member's parts; models told apart by identity, for two members may share one."""

    parts: Mapping[str, DeviceParts]
    models: tuple[DeviceModel, ...]

    @classmethod
    def of(cls, parts: Mapping[str, DeviceParts]) -> "Members":
        models: list[DeviceModel] = []
        for one in parts.values():
            if one.model is not None and not any(one.model is model for model in models):
                models.append(one.model)
        return cls(dict(parts), tuple(models))

    def model_of(self, name: str) -> int | None:
        """The number of a member's model."""
        model = self.parts[name].model
        return next((i for i, known in enumerate(self.models) if known is model), None)

    def offer(self, name: str, num_tokens: int, limit: int) -> int:
        """Most tokens that a member could propose after so many verified ones.

        Whether a lookup matches is known to the device alone, which may draft fewer.
        """
        lookup, model = self.parts[name].lookup, self.parts[name].model
        looked_up = 0 if lookup is None else lookup.max_offer
        # The last drafted token is never read.
        guessed = 0 if model is None else max(0, model.max_context - num_tokens + 1)
        return min(max(looked_up, min(guessed, MAX_DRAFT_TOKENS)), limit)

    @property
    def unsure(self) -> frozenset[str]:
        """Those that nothing but a lookup drafts for: they may be asked in vain."""
        return frozenset(name for name, parts in self.parts.items() if parts.model is None)

    def source(self, name: str, kind: int) -> str:
        """Who guessed: the member that is nothing but the part that a member used."""
        parts = self.parts[name]
        if parts.lookup is None or parts.model is None:
            return name
        for other, known in self.parts.items():
            if kind == MODEL and known.lookup is None and known.model is parts.model:
                return other
            if kind == LOOKUP and known.model is None and _alike(known.lookup, parts.lookup):
                return other
        return name


def _alike(one: DeviceLookup | None, other: DeviceLookup) -> bool:
    """Whether they find the same; how soon it is believed is the composite's affair."""
    settings = ("min_ngram", "max_ngram", "max_offer", "table")
    return one is not None and all(getattr(one, n) == getattr(other, n) for n in settings)

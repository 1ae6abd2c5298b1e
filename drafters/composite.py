"""Lookup where it matches, else a model: copying is free, and a model guesses what is new."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from decode.types import Drafter, DraftProposal, DraftSampler, DraftSession, Sampling
from drafters.base import BuildContext, DrafterConfig
from drafters.ngram import NgramDrafter, NgramSession

if TYPE_CHECKING:
    from decode.device.parts import DeviceParts

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CompositeConfig(DrafterConfig):
    """Two members of the pool as one drafter."""

    lookup: str  # name of a lookup drafter
    model: str  # name of the drafter that guesses where the lookup does not
    min_match: int  # tokens that must agree before the lookup is believed; 0: whatever it offers

    @property
    def part_names(self) -> tuple[str, ...]:
        return (self.lookup, self.model)

    def build(self, context: BuildContext) -> "CompositeDrafter":
        lookup, model = (context.part(name, "composite") for name in self.part_names)
        if not isinstance(lookup, NgramDrafter):
            raise ValueError(
                f"lookup={self.lookup} is a {type(lookup).__name__}, not a lookup drafter; "
                "name an ngram or retrieval entry of the pool"
            )
        if self.min_match > lookup.config.max_ngram:
            raise ValueError(
                f"min_match={self.min_match} is longer than {self.lookup} looks for "
                f"(max_ngram={lookup.config.max_ngram}); lower min_match"
            )
        return CompositeDrafter(self, lookup, model)


class CompositeSession:
    """One row in both parts. They read whole rows, so each may miss steps and still be right."""

    def __init__(self, config: CompositeConfig, lookup: NgramSession, model: DraftSession) -> None:
        self._config = config
        self._lookup = lookup
        self._model = model

    def offer(self, token_ids: Sequence[int]) -> int:
        if self._believes(token_ids):
            return self._lookup.offer(token_ids)
        return self._model.offer(token_ids)

    def propose(
        self, token_ids: Sequence[int], num_draft_tokens: int, sampler: DraftSampler
    ) -> DraftProposal:
        looked_up = self._believes(token_ids)
        part: DraftSession = self._lookup if looked_up else self._model
        name = self._config.lookup if looked_up else self._config.model
        return replace(part.propose(token_ids, num_draft_tokens, sampler), source=name)

    def _believes(self, token_ids: Sequence[int]) -> bool:
        return self._lookup.match_length(token_ids) >= max(1, self._config.min_match)


class CompositeDrafter:
    """Believes the lookup where it matches, else asks the model. All weights are its parts'."""

    num_parameters = 0
    memory_bytes = 0

    def __init__(self, config: CompositeConfig, lookup: NgramDrafter, model: Drafter) -> None:
        self.config = config
        self.lookup = lookup
        self.model = model
        self._parts: DeviceParts | None = None
        self._told = False  # that it cannot draft there

    def on_device(self) -> "DeviceParts | None":
        """Both parts, the model the very one that drafts by itself; None where it cannot."""
        from decode.device.parts import DeviceDrafter, DeviceParts  # Triton is not everywhere

        parts = self.model.on_device() if isinstance(self.model, DeviceDrafter) else None
        if parts is None or parts.model is None or parts.lookup is not None:
            if not self._told:
                log.info("a composite of %s cannot draft on the device", self.config.model)
                self._told = True
            return None
        if self._parts is None or self._parts.model is not parts.model:
            lookup = self.lookup.device_lookup(self.config.min_match)
            self._parts = DeviceParts(lookup, parts.model)
        return self._parts

    def open(self) -> CompositeSession:
        return self.open_shared({})

    def open_shared(self, sessions: Mapping[str, DraftSession]) -> CompositeSession:
        """A fresh row on the row's sessions of its parts, by pool name; opens those not given.

        A session may serve the pool and the composite at once: it is told the whole row each time.
        """
        lookup = sessions.get(self.config.lookup) or self.lookup.open()
        assert isinstance(lookup, NgramSession), "sessions must be those of the parts"
        return CompositeSession(
            self.config, lookup, sessions.get(self.config.model) or self.model.open()
        )

    def score(
        self,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        target_logprobs: Tensor,
        sampling: Sampling,
        max_depth: int,
    ) -> Tensor:
        """The row of the part that would have drafted from each start."""
        context = (token_ids, num_prompt_tokens, target_logprobs, sampling, max_depth)
        believed = self.believed(token_ids, num_prompt_tokens)
        return torch.where(
            believed[:, None], self.lookup.score(*context), self.model.score(*context)
        )

    def believed(self, token_ids: Sequence[int], num_prompt_tokens: int) -> Tensor:  # [A] bool
        """Whether the lookup, and not the model, would draft from each answer token."""
        lengths = torch.tensor(self.lookup.match_lengths(token_ids, num_prompt_tokens))
        return lengths >= max(1, self.config.min_match)

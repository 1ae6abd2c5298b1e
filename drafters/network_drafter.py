"""What every drafter with a network of its own shares: sessions, scores, and how it is measured."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from decode.types import MAX_DRAFT_TOKENS, Sampling
from drafters.base import TargetParts
from drafters.lm_session import LmSession
from drafters.networks import DraftNetwork
from drafters.readers import Reader, Watched, make_reader
from drafters.scoring import by_start, realised_acceptance
from drafters.tokenizers import num_real_ids
from drafters.vocabulary import widen

if TYPE_CHECKING:
    from decode.device.parts import DeviceParts
    from drafters.on_device import Placed

Origin = tuple[str, DraftNetwork, Watched]  # backend, network, and whether it is as it was


class NetworkDrafter(ABC):
    """Guesses token by token with a network that can be trained.

    `trainable` is that network: forward(token_ids [B, T], attention_mask [B, T], keep [B, T]) gives
    logits over draft columns, and `draft_ids` says which ids those are (None: column c is id c).
    It is in evaluation mode; a trainer that changes that changes it back.
    """

    kind: ClassVar[str]  # its name in drafter.json and in what it proposes
    num_parameters: int
    memory_bytes: int

    def __init__(self, network: DraftNetwork, parts: TargetParts) -> None:
        self.parts = parts
        self.backend = "auto"  # what drafts: our own forward where it can; or "transformers"
        self.trainable = network.eval()
        self._reader: Reader | None = None
        self._reads: Origin | None = None  # what the reader was made of
        self._placed: Placed | None = None
        self._placed_from: Origin | None = None
        self.vocab_size = parts.vocab_size
        self.num_real_ids = min(num_real_ids(parts.tokenizer), parts.vocab_size)
        limit = getattr(network.model_config, "max_position_embeddings", None)
        self.max_context = sys.maxsize if limit is None else int(limit)

    @property
    def draft_ids(self) -> Tensor | None:
        return self.trainable.draft_ids

    @property
    def device(self) -> torch.device:
        return next(self.trainable.parameters()).device

    @property
    def num_draft_vocab(self) -> int:
        """Ids to choose with set_draft_vocab() before training begins; 0: there is no choice."""
        return 0

    def set_draft_vocab(self, draft_ids: Tensor) -> None:
        """Choose what it may propose, before training."""
        raise ValueError(
            f"{len(draft_ids)} draft ids were given to a drafter of kind {self.kind}, which "
            "chooses none of its own; set num_draft_vocab where its network comes from"
        )

    def prepare_training(self) -> None:
        """Hold the weights as training wants them, in float32: small updates vanish in bfloat16."""
        self.trainable.float().eval()  # eval(): no dropout
        self._measure()

    def open(self) -> LmSession:
        return LmSession(self)

    def reader(self) -> Reader:
        """What sessions read with; a new one wherever weights, their place or `backend` changed."""
        if self._reader is None or not self._is_still(self._reads):
            self._reader = make_reader(self.trainable, self.parts, self.backend)
            self._reads = self._origin()
        return self._reader

    def on_device(self) -> "DeviceParts | None":
        """The network as passes on the device read it, a new one wherever the weights, their place
        or `backend` changed; None where it has no forward there, which is said once.
        """
        if not self._is_still(self._placed_from):
            self._placed = None if self.backend == "transformers" else self._place()
            self._placed_from = self._origin()
        return None if self._placed is None else self._placed.parts

    @property
    def device_copied_bytes(self) -> int:
        """Of weights that are there once more since it drafts on the device."""
        return 0 if self._placed is None else self._placed.copied_bytes

    def widen(self, logits: Tensor) -> Tensor:  # [..., C] -> [..., V] float32
        """The network's logits in the target's columns, -inf where it has no law."""
        return widen(logits, self.vocab_size, self.draft_ids, self.num_real_ids)

    @torch.no_grad()
    def score(
        self,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        target_logprobs: Tensor,
        sampling: Sampling,
        max_depth: int,
    ) -> Tensor:
        """One teacher-forced pass is enough: accepted drafts are the answer's own tokens, so what a
        position accepts does not depend on where drafting began.
        """
        accept = torch.full((len(token_ids) - num_prompt_tokens,), torch.nan)
        first = max(num_prompt_tokens, 1)  # nothing can be read before the first token of all
        read = torch.tensor([list(token_ids[:-1])[: self.max_context]], device=self.device)
        if read.shape[1] >= first:
            keep = torch.arange(read.shape[1], device=self.device)[None] >= first - 1
            logits = self.widen(self.trainable(read.long(), keep=keep))
            low = first - num_prompt_tokens
            known = target_logprobs[low:]
            accept[low : low + len(logits)] = realised_acceptance(
                logits, token_ids, first, known, sampling
            )
        by_depth = by_start(accept, max_depth)
        by_depth[:, MAX_DRAFT_TOKENS:] = torch.nan
        return by_depth

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write drafter.json and model.safetensors: its own tensors only, none that is shared."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Take the tensors that save() wrote."""

    @abstractmethod
    def export_pretrained(self, folder: Path) -> None:
        """Write a whole Hugging Face model that AutoModelForCausalLM loads, with the tokenizer."""

    @abstractmethod
    def _own(self) -> Iterable[Tensor]:
        """Tensors that would not be in memory without this drafter."""

    def _place(self) -> "Placed | None":
        from drafters.on_device import place  # Triton is not everywhere

        return place(self.trainable, self.vocab_size, self.num_real_ids, self.max_context)

    def _origin(self) -> Origin:
        return self.backend, self.trainable, Watched(self.trainable)

    def _is_still(self, origin: Origin | None) -> bool:
        if origin is None:
            return False
        backend, network, watched = origin
        return backend == self.backend and network is self.trainable and watched.unchanged()

    def _measure(self) -> None:
        own = list(self._own())
        self.num_parameters = sum(tensor.numel() for tensor in own)
        self.memory_bytes = sum(tensor.numel() * tensor.element_size() for tensor in own)

"""decode.types.Target over our own forward: rows of a static cache, a batch in one pass."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decode.native.architecture import read_architecture
from decode.native.cache import CacheRow
from decode.native.forward import Forward
from decode.native.products import blocked_is_possible
from decode.native.rope import RopeTable
from decode.native.weights import take_weights
from decode.targets.loading import load_causal_lm, load_tokenizer
from decode.targets.transformers import eos_token_ids
from decode.types import TargetSession

log = logging.getLogger(__name__)

PREFILL_CHUNK = 512  # tokens of a prompt that are read at once


class NativeTarget:
    """The Llama family without transformers' forward.

    The model given stays whole, its matrices views of ours, unless its weights may be taken
    (`take`): then they are laid out as the processor likes them and `.model` puts them together
    again when somebody asks for it. Raises UnsupportedModelError for any other model.
    """

    backend = "native"

    def __init__(
        self, model: Any, tokenizer: Any | None, name_or_path: str = "", *, take: bool = False
    ) -> None:
        self._model: Any = model.eval()
        self.tokenizer = tokenizer
        self.name_or_path = name_or_path or getattr(model.config, "_name_or_path", "")
        self.architecture = read_architecture(model.config, type(model).__name__)
        self.max_context = self.architecture.max_context
        self.vocab_size = model.lm_head.out_features
        self.eos_token_ids = eos_token_ids(model, tokenizer)
        weight = model.model.embed_tokens.weight
        self.dtype, self._device = weight.dtype, weight.device
        blocked = take and blocked_is_possible(weight.device, weight.dtype)
        self.layout = "blocked" if blocked else "stacked"
        rope = RopeTable(
            model.model.rotary_emb, self.architecture.head_dim, weight.dtype, num_positions=256
        )
        weights = take_weights(model, self.architecture, self.layout)
        self._forward = Forward(self.architecture, weights, rope, pinned=True)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: str | None = None,
    ) -> "NativeTarget":
        """Load a folder or Hub name; float32 on the CPU unless told otherwise."""
        name = str(name_or_path)
        model = load_causal_lm(name, dtype or torch.float32)
        return cls(model.to(device or "cpu"), load_tokenizer(name), name, take=True)

    @property
    def device(self) -> str:
        return str(self._device)

    @property
    def model(self) -> Any:
        """The transformers model, whole: for drafters that share its parts, and for training."""
        self._forward.weights.restore()
        return self._model

    def open(self) -> CacheRow:
        """A fresh row."""
        return CacheRow(self.architecture, self.dtype, self._device)

    @torch.inference_mode()
    def prefill(self, session: TargetSession, token_ids: Sequence[int]) -> None:
        """Read a prompt in chunks; the head sees none of it."""
        for first in range(0, len(token_ids), PREFILL_CHUNK):
            chunk = token_ids[first : first + PREFILL_CHUNK]
            self._forward([_row(session)], [chunk], with_logits=False)

    @torch.inference_mode()
    def score(
        self, sessions: Sequence[TargetSession], token_ids: Sequence[Sequence[int]]
    ) -> Tensor:  # [B, W, V]
        """Read each row's tokens and return their raw logits: one pass for all rows."""
        flat = self._forward([_row(session) for session in sessions], token_ids, with_logits=True)
        assert flat is not None
        widths = [len(ids) for ids in token_ids]
        if len(set(widths)) == 1:
            return flat.view(len(widths), widths[0], -1)
        logits = flat.new_zeros(len(widths), max(widths), self.vocab_size)
        for b, part in enumerate(flat.split(widths)):
            logits[b, : len(part)] = part
        return logits

    def rollback(self, session: TargetSession, length: int) -> None:
        """Forget all but the first `length` tokens."""
        row = _row(session)
        row.length = min(row.length, length)


def _row(session: TargetSession) -> CacheRow:
    assert isinstance(session, CacheRow)
    return session

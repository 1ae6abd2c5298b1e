"""Any Hugging Face causal LM as a target: a growing cache per row, cropped to roll back."""

import inspect
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from decode.targets.loading import load_causal_lm, load_tokenizer
from decode.types import TargetSession

if TYPE_CHECKING:
    from transformers import DynamicCache

log = logging.getLogger(__name__)

NO_LIMIT = 1 << 30  # context of a model that names no longest position


class CachedRow:
    """The keys and values of one row."""

    def __init__(self) -> None:
        from transformers import DynamicCache

        # Without a config every layer keeps all positions, sliding windows too, and can be cropped.
        self.cache = DynamicCache()

    @property
    def length(self) -> int:
        return self.cache.get_seq_length()


class TransformersTarget:
    """decode.types.Target over `model`, row by row; the model and tokenizer stay the caller's.

    Raises ValueError where the model's state cannot be rolled back.
    """

    backend = "transformers"

    def __init__(self, model: Any, tokenizer: Any | None, name_or_path: str = "") -> None:
        self.model: Any = model.eval()
        self.tokenizer = tokenizer
        self.name_or_path = name_or_path or getattr(model.config, "_name_or_path", "")
        text_config = model.config.get_text_config(decoder=True)
        self.max_context = int(getattr(text_config, "max_position_embeddings", None) or NO_LIMIT)
        self.eos_token_ids = eos_token_ids(model, tokenizer)
        forward = inspect.signature(model.forward).parameters
        self._one_row = {"logits_to_keep": 1} if "logits_to_keep" in forward else {}
        self.vocab_size = self._probe()

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: str | None = None,
        trust_remote_code: bool = False,
    ) -> "TransformersTarget":
        """Load a folder or Hub name; float32 and the GPU, where there is one, unless told
        otherwise.

        Only safetensors are read. Raises ValueError where no whole causal LM can be loaded.
        """
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        name = str(name_or_path)
        model = load_causal_lm(name, dtype or torch.float32, trust_remote_code)
        return cls(model.to(device), load_tokenizer(name, trust_remote_code), name)

    @property
    def device(self) -> str:
        return str(self.model.device)

    def open(self) -> CachedRow:
        """A fresh row."""
        return CachedRow()

    @torch.inference_mode()
    def prefill(self, session: TargetSession, token_ids: Sequence[int]) -> None:
        """Read a prompt; the head sees one position at most."""
        self._forward(session, token_ids, **self._one_row)

    @torch.inference_mode()
    def score(
        self, sessions: Sequence[TargetSession], token_ids: Sequence[Sequence[int]]
    ) -> Tensor:  # [B, W, V]
        """Read each row's tokens and return their raw logits, rows one after the other."""
        rows = [self._forward(s, ids) for s, ids in zip(sessions, token_ids, strict=True)]
        if len(rows) == 1:
            return rows[0]
        width = max(row.shape[1] for row in rows)
        logits = rows[0].new_zeros(len(rows), width, self.vocab_size)
        for b, row in enumerate(rows):
            logits[b, : row.shape[1]] = row[0]
        return logits

    def rollback(self, session: TargetSession, length: int) -> None:
        """Forget all but the first `length` tokens."""
        surplus = session.length - length
        if surplus > 0:
            _cache(session).crop(-surplus)

    def _forward(
        self, session: TargetSession, token_ids: Sequence[int], **options: Any
    ) -> Tensor:  # [1, W, V]
        ids = torch.tensor([list(token_ids)], dtype=torch.int64, device=self.model.device)
        return self.model(
            input_ids=ids, past_key_values=_cache(session), use_cache=True, **options
        ).logits

    @torch.inference_mode()
    def _probe(self) -> int:
        """Columns of the logits, found by one short pass that is then rolled back."""
        name = type(self.model).__name__
        refusal = (
            f"target {self.name_or_path or name} ({name}) has a state that cannot be rolled back; "
            "take a causal LM with an attention cache"
        )
        if getattr(self.model, "_is_stateful", False) or self.model.config.is_encoder_decoder:
            raise ValueError(refusal)
        row = self.open()
        try:
            logits = self._forward(row, [0, 0])
            self.rollback(row, 1)
        except (AttributeError, TypeError, NotImplementedError) as error:  # a state of another kind
            raise ValueError(refusal) from error
        if row.length != 1:
            raise ValueError(refusal)
        return logits.shape[-1]


def _cache(session: TargetSession) -> "DynamicCache":
    assert isinstance(session, CachedRow)
    return session.cache


def eos_token_ids(model: Any, tokenizer: Any | None) -> frozenset[int]:
    """The ids that end a text: as `generate` takes them, else as the tokenizer says."""
    settings = getattr(model, "generation_config", None)
    found = getattr(settings, "eos_token_id", None)
    if found is None:
        found = getattr(tokenizer, "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset(found) if isinstance(found, list | tuple) else frozenset([int(found)])

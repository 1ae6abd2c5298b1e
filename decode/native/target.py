"""decode.types.Target over our own forward: rows of a static cache, a batch in one pass."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from decode.native.architecture import UnsupportedModelError, read_architecture
from decode.native.cache import CacheRow
from decode.native.exactness import width_dependence
from decode.native.forward import Forward
from decode.native.products import Product, blocked_is_possible
from decode.native.rope import RopeTable
from decode.native.static_cache import StaticRow
from decode.native.weights import take_weights
from decode.targets.choices import EXACTNESS
from decode.targets.loading import load_causal_lm, load_tokenizer
from decode.targets.moving import moved
from decode.targets.transformers import eos_token_ids
from decode.types import Sharing, TargetSession

if TYPE_CHECKING:
    from decode.native.kernel_forward import KernelForward

log = logging.getLogger(__name__)

PREFILL_CHUNK = 512  # tokens of a prompt that are read at once


class NativeTarget:
    """The Llama family without transformers' forward.

    A model that is given stays whole, its matrices views of ours, unless its weights may be taken:
    then they are laid out as the processor likes them, and `.model` puts it together again when
    somebody asks for it. With exactness "bitwise" a token's logits depend on its row's tokens
    alone, never on how many are read at once; where this machine does not keep that in passes of up
    to 17 tokens or of two rows, a warning at load says so. "law" is a little faster. With
    `kernels`, by default on CUDA, passes run in Triton kernels over a static cache.

    Raises UnsupportedModelError for a model of another kind, before it is touched, and with
    `must_hold` where there would be a warning.
    """

    backend = "native"

    def __init__(
        self,
        model: Any,
        tokenizer: Any | None,
        name_or_path: str = "",
        *,
        take: bool = False,
        exactness: str = "bitwise",
        kernels: bool | None = None,
        must_hold: bool = False,
    ) -> None:
        if exactness not in EXACTNESS:
            raise ValueError(f"exactness={exactness} is not known; use {' or '.join(EXACTNESS)}")
        self._model: Any = model.eval()
        self.tokenizer = tokenizer
        self.name_or_path = name_or_path or getattr(model.config, "_name_or_path", "")
        self.exactness = exactness
        self.architecture = read_architecture(model.config, type(model).__name__)
        self.max_context = self.architecture.max_context
        self.vocab_size: int = model.lm_head.out_features
        self.eos_token_ids = eos_token_ids(model, tokenizer)
        self.parameter_shapes = [f"{tuple(p.shape)} {p.dtype}" for p in model.parameters()]
        weight = model.model.embed_tokens.weight
        self.dtype, self._device = weight.dtype, weight.device
        self._kernels = self._device.type == "cuda" if kernels is None else kernels
        self._forward = self._take(model, take)
        self.width_dependence = self._check(must_hold) if exactness == "bitwise" else None

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: str | None = None,
        exactness: str = "bitwise",
    ) -> "NativeTarget":
        """Load a folder or Hub name; float32 on the CPU unless told otherwise."""
        name = str(name_or_path)
        model = moved(load_causal_lm(name, dtype or torch.float32), device or "cpu")
        return cls(model, load_tokenizer(name), name, take=True, exactness=exactness)

    @property
    def device(self) -> str:
        return str(self._device)

    @property
    def model(self) -> Any:
        """The transformers model, whole: for drafters that share its parts, and for training.

        Weights that were taken are from then on held twice.
        """
        self._forward.weights.restore()
        return self._model

    @property
    def kernel_forward(self) -> "KernelForward | None":
        """The forward in Triton kernels, where passes run in them."""
        return None if isinstance(self._forward, Forward) else self._forward

    @property
    def head(self) -> Product:
        """The output head as it is laid out here, for drafters that answer with it."""
        return self._forward.weights.head

    @property
    def weight_bytes(self) -> int:
        """Of all weights that are held, whoever holds them."""
        return self._forward.weights.num_bytes(self._model)

    @property
    def cache_bytes(self) -> int:
        """Of the static cache that all rows share; 0 where each row has its own."""
        return 0 if isinstance(self._forward, Forward) else self._forward.cache.num_bytes

    def open(self) -> CacheRow | StaticRow:
        """A fresh row."""
        if isinstance(self._forward, Forward):
            return CacheRow(self.architecture, self.dtype, self._device)
        return self._forward.open()

    @torch.inference_mode()
    def prefill(self, session: TargetSession, token_ids: Sequence[int]) -> None:
        """Read a prompt in chunks; the head sees none of it."""
        for first in range(0, len(token_ids), PREFILL_CHUNK):
            chunk = token_ids[first : first + PREFILL_CHUNK]
            self._forward([_row(session)], [chunk], with_logits=False)

    @property
    def sharing(self) -> Sharing:
        """What rows share in score(): captured passes have every row as wide as the widest."""
        return Sharing(padded=self._kernels, drafts_together=False)

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

    def _take(self, model: Any, take: bool) -> "Forward | KernelForward":
        dtype, a = self.dtype, self.architecture
        rope = RopeTable(model.model.rotary_emb, a.head_dim, dtype)
        blocked = take and not self._kernels and blocked_is_possible(self._device, dtype)
        self.layout = "blocked" if blocked else "stacked"
        weights = take_weights(model, self.layout)
        pinned = self.exactness == "bitwise"
        if not self._kernels:
            return Forward(a, weights, rope, pinned)
        from decode.native.kernel_forward import KernelForward  # Triton is not everywhere

        forward = KernelForward(a, weights, rope, pinned)
        forward.prepare()
        return forward

    def _check(self, must_hold: bool) -> str | None:
        found = width_dependence(self)
        if found and must_hold:
            raise UnsupportedModelError(f"exactness=bitwise does not hold there ({found})")
        if found:
            log.warning(
                "exactness=bitwise does not hold for %s in %s on this machine: %s; greedy texts "
                "may part at near ties, or take exactness=law",
                self.name_or_path or type(self._model).__name__,
                str(self.dtype).removeprefix("torch."),
                found,
            )
        return found


def _row(session: TargetSession) -> Any:
    assert isinstance(session, CacheRow | StaticRow)
    return session

"""A small causal LM as drafter: any Hugging Face model with the target's vocabulary, or a cut.

A cut keeps a few of the target's layers and its final norm (copies, to be trained), shares its
embedding, and answers with the target's head or, much cheaper, with the head's rows for a draft
vocabulary. An untrained cut guesses nothing right; minutes of distillation make it useful.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from decode.targets.loading import load_causal_lm
from decode.types import MAX_DRAFT_TOKENS, Sampling
from drafters.base import BuildContext, DrafterConfig, TargetParts, target_parts
from drafters.checkpoint import DESCRIPTION, read_description
from drafters.lm_files import (
    PRETRAINED,
    export_lm,
    load_lm,
    read_draft_vocab,
    save_lm,
)
from drafters.lm_session import LmSession
from drafters.networks import (
    LLAMA_FAMILY,
    CutNetwork,
    DraftNetwork,
    WholeNetwork,
    is_llama_family,
)
from drafters.scoring import by_start, realised_acceptance
from drafters.tokenizers import load_tokenizer, num_real_ids, require_same_tokenizer
from drafters.vocabulary import choose_draft_ids, special_ids, widen

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class LmConfig(DrafterConfig):
    """A causal LM that drafts token by token."""

    source: str | None  # Hub name or folder of a causal LM; null: cut from the target
    layers: list[int]  # of that model, in order, negative from the end; empty: all of them
    num_draft_vocab: int  # ids it may propose; 0: every one
    train_head: bool  # the head is a trained copy; else rows of the model that it comes from
    dtype: str  # "float32", "bfloat16", "float16"; "auto": the target's

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", *DTYPES):
            raise ValueError(f"dtype={self.dtype} must be auto, {', '.join(DTYPES)}")
        if self.source is None and not self.layers:
            raise ValueError("layers=[] with source=null is the target itself; name a few layers")
        if self.num_draft_vocab < 0:
            raise ValueError(
                f"num_draft_vocab={self.num_draft_vocab} must be 0 (whole) or a number of ids"
            )

    def build(self, context: BuildContext) -> "LmDrafter":
        """The drafter; `context.weights` is a folder that LmDrafter.save wrote with these settings.

        Without weights, a draft vocabulary holds the lowest ids until training chooses better.
        """
        parts = context.target
        shared = self.source is None
        donor = parts.model if self.source is None else load_source(self.source, parts, self.dtype)
        drafter = LmDrafter(self, self._network(donor, parts, shared), parts)
        if self.num_draft_vocab:
            always = special_ids(parts.tokenizer, parts.model)
            drafter.set_draft_vocab(
                choose_draft_ids(self.num_draft_vocab, drafter.num_real_ids, always)
            )
        if context.weights is not None:
            drafter.load(context.weights)
        return drafter

    def _network(self, donor: nn.Module, parts: TargetParts, shared: bool) -> DraftNetwork:
        if is_llama_family(donor):
            dtype = _resolved(self.dtype, parts)
            return CutNetwork(
                donor, self.layers, train_head=self.train_head, dtype=dtype, shared=shared
            )
        if shared or self.layers or self.num_draft_vocab or self.train_head:
            raise ValueError(
                f"{self.source or parts.name_or_path} is a {type(donor).__name__}, which cannot be "
                f"taken apart (that needs {LLAMA_FAMILY}); name a whole model as source, with "
                "layers=[], num_draft_vocab=0 and train_head=false"
            )
        if getattr(donor, "_is_stateful", False):
            raise ValueError(
                f"{self.source} is a {type(donor).__name__}, whose recurrent state cannot be "
                "rolled back after a rejected draft; choose a source that keeps keys and values"
            )
        return WholeNetwork(donor)


class LmDrafter:
    """Guesses token by token with a network of its own.

    `trainable` is that network: forward(token_ids [B, T], attention_mask [B, T], keep [B, T]) gives
    logits over draft columns, and `draft_ids` says which ids those are (None: column c is id c).
    It is in evaluation mode; a trainer that changes that changes it back.
    """

    def __init__(self, config: LmConfig, network: DraftNetwork, parts: TargetParts) -> None:
        self.config = config
        self.parts = parts
        self.trainable = network.eval()
        self.vocab_size = parts.vocab_size
        self.num_real_ids = min(num_real_ids(parts.tokenizer), parts.vocab_size)
        limit = getattr(network.model_config, "max_position_embeddings", None)
        self.max_context = sys.maxsize if limit is None else int(limit)
        self._measure()

    @property
    def draft_ids(self) -> Tensor | None:
        return self.trainable.draft_ids

    @property
    def device(self) -> torch.device:
        return next(self.trainable.parameters()).device

    def _measure(self) -> None:
        gathered = getattr(self.trainable, "head_rows", None)
        own = [*self.trainable.parameters(), *([] if gathered is None else [gathered])]
        self.num_parameters = sum(tensor.numel() for tensor in own)
        self.memory_bytes = sum(tensor.numel() * tensor.element_size() for tensor in own)

    def set_draft_vocab(self, draft_ids: Tensor) -> None:
        """Choose what it may propose, before training: the head starts again from its model's."""
        size = self.config.num_draft_vocab
        if not isinstance(self.trainable, CutNetwork) or len(draft_ids.unique()) != size:
            raise ValueError(
                f"{len(draft_ids.unique())} different draft ids were given, but num_draft_vocab="
                f"{size}; set num_draft_vocab to the number of ids"
            )
        self.trainable.set_draft_ids(draft_ids.long().sort().values)
        self._measure()

    def open(self) -> LmSession:
        return LmSession(self)

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

    def save(self, folder: Path) -> None:
        """Write drafter.json and model.safetensors: its own tensors only, none that is shared."""
        save_lm(self, folder)

    def load(self, folder: Path) -> None:
        """Take the tensors that save() wrote, and the draft vocabulary with them."""
        load_lm(self, folder)

    def export_pretrained(self, folder: Path) -> None:
        """Write a whole Hugging Face model that AutoModelForCausalLM loads, with the tokenizer."""
        export_lm(self, folder)


def from_pretrained(name_or_path: str, target: Any) -> LmDrafter:
    """A drafter for this target: what save() or export_pretrained() wrote, or any causal LM."""
    parts = target_parts(target)
    folder = Path(name_or_path)
    stored = read_description(folder, "lm") if (folder / DESCRIPTION).exists() else None
    if stored is not None and stored.get("layout") != PRETRAINED:
        return LmConfig(**stored["config"]).build(BuildContext(parts, weights=folder))
    draft_ids = None if stored is None else read_draft_vocab(folder)
    config = LmConfig(
        source=name_or_path,
        layers=[],
        num_draft_vocab=0 if draft_ids is None else len(draft_ids),
        train_head=False,
        dtype="auto",
    )
    drafter = config.build(BuildContext(parts))
    if draft_ids is not None:
        drafter.set_draft_vocab(draft_ids)
    return drafter


def load_source(source: str, parts: TargetParts, dtype: str) -> nn.Module:
    """A causal LM with the target's tokenizer, on the target's device."""
    require_same_tokenizer(parts.tokenizer, load_tokenizer(source), source)
    model = load_causal_lm(source, _resolved(dtype, parts))
    needed, columns = num_real_ids(parts.tokenizer), model.get_output_embeddings().weight.shape[0]
    if columns < needed:
        raise ValueError(
            f"{source} has {columns} logits, fewer than the {needed} tokens of the target; "
            "choose a drafter with the target's vocabulary"
        )
    return model.to(next(parts.model.parameters()).device).eval()


def _resolved(dtype: str, parts: TargetParts) -> torch.dtype:
    return DTYPES[dtype] if dtype != "auto" else next(parts.model.parameters()).dtype

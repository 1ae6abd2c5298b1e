"""A small causal LM as drafter: any Hugging Face model with the target's vocabulary, or a cut.

A cut keeps a few of the target's layers and its final norm (copies, to be trained), shares its
embedding, and answers with the target's head or, much cheaper, with the head's rows for a draft
vocabulary. An untrained cut guesses nothing right; minutes of distillation make it useful.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from decode.targets.loading import load_causal_lm
from drafters.base import BuildContext, DrafterConfig, TargetParts, target_parts
from drafters.checkpoint import DESCRIPTION, read_description
from drafters.lm_files import (
    PRETRAINED,
    export_lm,
    lm_facts,
    load_lm,
    read_draft_vocab,
    save_lm,
)
from drafters.network_drafter import NetworkDrafter
from drafters.networks import (
    LLAMA_FAMILY,
    CutNetwork,
    DraftNetwork,
    WholeNetwork,
    is_llama_family,
)
from drafters.tokenizers import load_tokenizer, num_real_ids, require_same_tokenizer
from drafters.vocabulary import choose_draft_ids, special_ids

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


class LmDrafter(NetworkDrafter):
    """Guesses token by token with a network of its own: a whole model or a cut of one."""

    kind = "lm"

    def __init__(self, config: LmConfig, network: DraftNetwork, parts: TargetParts) -> None:
        super().__init__(network, parts)
        self.config = config
        self._measure()

    @property
    def num_draft_vocab(self) -> int:
        return self.config.num_draft_vocab

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

    def save(self, folder: Path) -> None:
        save_lm(self, folder)

    def load(self, folder: Path) -> None:
        """Take the tensors that save() wrote, and the draft vocabulary with them."""
        load_lm(self, folder)

    def export_pretrained(self, folder: Path) -> None:
        export_lm(self.trainable, self.parts, lm_facts(self, PRETRAINED), folder)

    def _own(self) -> Iterable[Tensor]:
        gathered = getattr(self.trainable, "head_rows", None)
        return [*self.trainable.parameters(), *([] if gathered is None else [gathered])]


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

"""A small causal LM as drafter: any Hugging Face model with the target's vocabulary, or a cut of the target.

The cut keeps a few of the target's layers and its final norm (copies, to be trained), shares its embedding, and
answers with the target's head or, much cheaper, with the head's rows for a draft vocabulary. An untrained cut
guesses nothing right; minutes of distillation make it useful.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from decode.types import MAX_DRAFT_TOKENS, DraftProposal, DraftSampler, Sampling
from drafters.base import BuildContext, DrafterConfig, TargetParts, common_prefix, target_parts
from drafters.checkpoint import DESCRIPTION, read_description, read_tensors, save_drafter
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
    train_head: bool  # the head is a trained copy; else the rows of the model it was cut from
    dtype: str  # "float32", "bfloat16", "float16"; "auto": the target's

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", *DTYPES):
            raise ValueError(f"dtype={self.dtype} must be auto, {', '.join(DTYPES)}")
        if self.source is None and not self.layers:
            raise ValueError(
                "layers=[] with source=null is the target itself; name a few of its layers"
            )
        if self.num_draft_vocab < 0:
            raise ValueError(
                f"num_draft_vocab={self.num_draft_vocab} must be 0 (whole) or a number of ids"
            )

    def build(self, context: BuildContext) -> "LmDrafter":
        """The cut or the model; `context.weights` is a folder written by LmDrafter.save with the same settings."""
        parts = context.target
        donor = parts.model if self.source is None else _load_source(self.source, parts, self.dtype)
        network = self._network(donor, parts)
        drafter = LmDrafter(self, network, parts)
        if self.num_draft_vocab:
            always = special_ids(parts.tokenizer, parts.model)
            drafter.set_draft_vocab(
                choose_draft_ids(self.num_draft_vocab, drafter.num_real_ids, always)
            )
        if context.weights is not None:
            drafter.load(context.weights)
        return drafter

    def _network(self, donor: nn.Module, parts: TargetParts) -> DraftNetwork:
        if is_llama_family(donor):
            dtype = _resolved(self.dtype, parts)
            return CutNetwork(
                donor, self.layers, self.train_head, dtype, shared=self.source is None
            )
        if self.source is None or self.layers or self.num_draft_vocab or self.train_head:
            name = self.source or parts.name_or_path
            raise ValueError(
                f"{name} is a {type(donor).__name__}, whose layers or head cannot be taken apart (that needs "
                f"{LLAMA_FAMILY}); name a whole model as source, with layers=[], num_draft_vocab=0, train_head=false"
            )
        if getattr(donor, "_is_stateful", False):
            raise ValueError(
                f"{self.source} is a {type(donor).__name__}, whose recurrent state cannot be rolled back after a "
                "rejected draft; choose a source that keeps keys and values"
            )
        return WholeNetwork(donor)


class LmDrafter:
    """Guesses token by token with a network of its own.

    `trainable` is that network: forward(token_ids [B, T], attention_mask [B, T], keep [B, T] | None) gives logits
    over draft columns, and `draft_ids` says which ids those are (None: column c is id c).
    """

    def __init__(self, config: LmConfig, network: DraftNetwork, parts: TargetParts) -> None:
        self.config = config
        self.trainable = network.eval()
        self.vocab_size = parts.vocab_size
        self.num_real_ids = min(num_real_ids(parts.tokenizer), parts.vocab_size)
        self.max_context = int(network.model_config.max_position_embeddings)
        self.parts = parts

    @property
    def draft_ids(self) -> Tensor | None:
        return self.trainable.draft_ids

    @property
    def device(self) -> torch.device:
        return next(self.trainable.parameters()).device

    @property
    def _owned(self) -> list[Tensor]:
        return [*self.trainable.parameters(), *self.trainable.buffers()]

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self._owned if tensor.is_floating_point())

    @property
    def memory_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._owned)

    def set_draft_vocab(self, draft_ids: Tensor) -> None:
        """Choose what it may propose, before training: a trained head starts again from the target's rows."""
        if (
            not isinstance(self.trainable, CutNetwork)
            or len(draft_ids) != self.config.num_draft_vocab
        ):
            raise ValueError(
                f"{len(draft_ids)} draft ids were given, but num_draft_vocab={self.config.num_draft_vocab}; "
                "set num_draft_vocab to the number of ids"
            )
        self.trainable.set_draft_ids(draft_ids.sort().values)

    def open(self) -> "LmSession":
        return LmSession(self)

    def widen(self, logits: Tensor) -> Tensor:  # [..., C] -> [..., V] float32
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
        """One teacher-forced pass: accepted drafts are the answer, so a token's law depends on its position only."""
        accept = torch.full((len(token_ids) - num_prompt_tokens,), torch.nan)
        first = max(num_prompt_tokens, 1)  # before the first token of all there is nothing to read
        read = torch.tensor([list(token_ids[:-1])[: self.max_context]], device=self.device)
        if read.shape[1] >= first:
            keep = torch.arange(read.shape[1], device=self.device)[None] >= first - 1
            logits = self.widen(self.trainable(read, keep=keep))
            skipped = first - num_prompt_tokens
            scored = realised_acceptance(
                logits, token_ids, first, target_logprobs[skipped:], sampling
            )
            accept[skipped : skipped + len(scored)] = scored
        by_depth = by_start(accept, max_depth)
        by_depth[:, MAX_DRAFT_TOKENS:] = torch.nan
        return by_depth

    def save(self, folder: Path) -> None:
        """Write drafter.json and model.safetensors: its own tensors only, nothing that the target shares."""
        facts = {"config": asdict(self.config), "vocab_size": self.vocab_size}
        save_drafter(folder, "lm", facts, self._stored())

    def load(self, folder: Path) -> None:
        """Take the tensors that save() wrote, and the draft vocabulary with them."""
        description = read_description(folder, "lm")
        theirs, ours = description["config"], asdict(self.config)
        for name in ("source", "layers", "num_draft_vocab", "train_head"):
            if theirs.get(name) != ours[name]:
                raise ValueError(
                    f"{folder} was trained with {name}={theirs.get(name)}, but {name}={ours[name]} is asked for; "
                    "train again or use the settings it was trained with"
                )
        if description["vocab_size"] != self.vocab_size:
            raise ValueError(
                f"{folder} was trained for {description['vocab_size']} logits, but the target has "
                f"{self.vocab_size}; use the target it was trained for"
            )
        tensors = read_tensors(folder, description)
        if "draft_ids" in tensors:
            self.set_draft_vocab(tensors["draft_ids"])
        self._take(tensors, folder)

    def _stored(self) -> dict[str, Tensor]:
        """By name, each tensor once: frozen parts come back from their donor, tied ones are the same tensor."""
        frozen = ("embedding.", "full_head.")
        stored: dict[str, Tensor] = {}
        for name, tensor in self.trainable.state_dict().items():
            if not name.startswith(frozen) and all(tensor is not t for t in stored.values()):
                stored[name] = tensor
        return stored

    def _take(self, tensors: dict[str, Tensor], folder: Path) -> None:
        ours = self._stored()
        wrong = {
            name
            for name in ours.keys() | tensors.keys()
            if _shape(ours, name) != _shape(tensors, name)
        }
        if wrong:
            raise ValueError(
                f"{folder} does not fit this drafter (first difference: {min(wrong)}); "
                "use the target and the settings it was trained with"
            )
        with torch.no_grad():
            for name, tensor in ours.items():
                tensor.copy_(tensors[name])


class LmSession:
    """One row's cache. It holds `fed` tokens; what no longer agrees with the row is dropped and read again."""

    def __init__(self, drafter: LmDrafter) -> None:
        self._drafter = drafter
        self._cache = DynamicCache()
        self._fed: list[int] = []

    def offer(self, token_ids: Sequence[int]) -> int:
        """As many as fit its context; the last drafted token is never read."""
        room = self._drafter.max_context - len(token_ids) + 1
        return min(MAX_DRAFT_TOKENS, max(0, room)) if token_ids else 0

    @torch.no_grad()
    def propose(
        self, token_ids: Sequence[int], num_draft_tokens: int, sampler: DraftSampler
    ) -> DraftProposal:
        size = min(num_draft_tokens, self.offer(token_ids))
        pending = self._roll_back(list(token_ids)) if size else []
        tokens: list[int] = []
        rows: list[Tensor] = []
        for _ in range(size):
            row = self._read(pending)
            tokens.append(sampler.draw(row))
            rows.append(row)
            pending = tokens[-1:]
        logits = torch.stack(rows) if rows and not sampler.greedy else None
        return DraftProposal(tokens, logits, "lm")

    def _roll_back(self, token_ids: list[int]) -> list[int]:
        """Drop what the row no longer holds; returns the tokens to read, at least the last one."""
        kept = min(common_prefix(self._fed, token_ids), len(token_ids) - 1)
        if surplus := len(self._fed) - kept:
            self._cache.crop(-surplus)
            del self._fed[kept:]
        return token_ids[kept:]

    def _read(self, pending: list[int]) -> Tensor:  # [V] float32
        drafter = self._drafter
        token_ids = torch.tensor([pending], device=drafter.device)
        logits = drafter.trainable.next_logits(token_ids, self._cache)
        self._fed += pending
        return drafter.widen(logits)


def from_pretrained(name_or_path: str, target: Any) -> LmDrafter:
    """A drafter for this target: a folder with drafter.json, or the name or folder of any causal LM."""
    parts = target_parts(target)
    folder = Path(name_or_path)
    if (folder / DESCRIPTION).exists():
        description = read_description(folder, "lm")
        config = LmConfig(**description["config"])
        return config.build(BuildContext(parts, weights=folder))
    config = LmConfig(
        source=name_or_path, layers=[], num_draft_vocab=0, train_head=False, dtype="auto"
    )
    return config.build(BuildContext(parts))


def _resolved(dtype: str, parts: TargetParts) -> torch.dtype:
    return DTYPES[dtype] if dtype != "auto" else next(parts.model.parameters()).dtype


def _load_source(source: str, parts: TargetParts, dtype: str) -> nn.Module:
    """A causal LM with the target's tokenizer, on the target's device; ValueError where it does not fit."""
    require_same_tokenizer(parts.tokenizer, load_tokenizer(source), source)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=_resolved(dtype, parts), use_safetensors=True
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"no causal LM could be loaded from {source} ({reason}); check source"
        ) from error
    needed, columns = num_real_ids(parts.tokenizer), model.get_output_embeddings().weight.shape[0]
    if columns < needed:
        raise ValueError(
            f"{source} has {columns} logits, fewer than the {needed} tokens of the target; "
            "choose a drafter with the target's vocabulary"
        )
    return model.to(next(parts.model.parameters()).device).eval()


def _shape(tensors: dict[str, Tensor], name: str) -> torch.Size | None:
    return tensors[name].shape if name in tensors else None

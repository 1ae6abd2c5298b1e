"""Drafters of known parts that draft both ways: on the host for decode.loop, and on the device."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.device.parts import DeviceLookup, DeviceModel, DeviceParts
from decode.native import kernel_forward
from decode.native.target import NativeTarget
from decode.types import MAX_DRAFT_TOKENS, DraftProposal, DraftSampler, DraftSession
from kernels.decode_attention import attention_reference
from kernels.heads import heads_reference
from kernels.norm import add_norm_reference, norm_reference
from kernels.product import gated_reference, parts_reference, product_reference

OFFER = 4  # of the lookup


def forward_by_reference(patch: pytest.MonkeyPatch) -> None:
    """Let passes be computed by the references of their kernels: seconds less in the interpreter,
    for tests of what happens between the passes.
    """

    def embed_norm(ids: Tensor, embedding: Tensor, weight: Tensor, eps: float) -> Any:
        residual = embedding[ids.long()].clone()
        return residual, norm_reference(residual, weight, eps)

    def add_norm(
        parts: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        new, normed = add_norm_reference(parts, bias, residual, weight, eps)
        residual.copy_(new)
        return normed

    def decode_attention(*arguments: Any) -> Tensor:
        return attention_reference(*arguments).flatten(1)

    def unless_unwanted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """What nobody wants is not computed, and holds whatever the memory held."""

        def computed(*arguments: Any, wanted: Tensor | None = None) -> Tensor:
            out = function(*arguments)
            return out if wanted is None or int(wanted) else torch.full_like(out, torch.nan)

        return computed

    for name, function in {
        "embed_norm": embed_norm,
        "add_norm": add_norm,
        "decode_attention": decode_attention,
        "split_heads": heads_reference,
        "product": unless_unwanted(product_reference),
        "product_parts": unless_unwanted(parts_reference),
        "gated_product": unless_unwanted(gated_reference),
    }.items():
        patch.setattr(kernel_forward, name, function)


class LookupDrafter:
    """The rule of kernels.lookup, on the host by brute force."""

    num_parameters = memory_bytes = 0

    def __init__(self, min_ngram: int = 1, max_ngram: int = 2, min_match: int = 1) -> None:
        self.lookup = DeviceLookup(min_ngram, max_ngram, OFFER, min_match)
        self.parts = DeviceParts(self.lookup, None)

    def on_device(self) -> DeviceParts:
        return self.parts

    def open(self) -> "LookupDrafter":
        return self

    def offer(self, token_ids: Sequence[int]) -> int:
        return OFFER if self.found(token_ids) is not None else 0

    def found(self, token_ids: Sequence[int]) -> int | None:
        """Where the longest suffix that occurs earlier ends, at its most recent occurrence."""
        text, rule = list(token_ids), self.lookup
        for size in range(rule.max_ngram, max(rule.min_ngram, rule.min_match) - 1, -1):
            for end in range(len(text) - 1, size - 1, -1):
                if text[end - size : end] == text[len(text) - size :]:
                    return end
        return None

    def propose(
        self, token_ids: Sequence[int], num_draft_tokens: int, sampler: DraftSampler
    ) -> DraftProposal:
        end = self.found(token_ids)
        if end is None:
            return DraftProposal([], None, "lookup")
        size = min(num_draft_tokens, OFFER)
        period = len(token_ids) - end
        tokens = [token_ids[end + i % period] for i in range(size)]
        return DraftProposal(tokens, None, "lookup")

    def score(self, *arguments: object) -> Tensor:
        raise NotImplementedError("no test asks for it")


class ModelDrafter:
    """A causal LM of the kernels' forward; the same passes serve both ways."""

    num_parameters = memory_bytes = 0

    def __init__(self, model: Any, vocab_size: int, draft_ids: Sequence[int] | None = None) -> None:
        self.native = NativeTarget(model, None, "drafter", exactness="law", kernels=True)
        assert self.native.kernel_forward is not None
        self.vocab_size = vocab_size
        device = self.native.device
        self.draft_ids = None if draft_ids is None else torch.tensor(draft_ids, device=device)
        self.max_context = self.native.max_context
        self.model = DeviceModel(self.native.kernel_forward, self.draft_ids, self.max_context)
        self.parts = DeviceParts(None, self.model)

    def on_device(self) -> DeviceParts:
        return self.parts

    def open(self) -> "ModelSession":
        return ModelSession(self)

    def score(self, *arguments: object) -> Tensor:
        raise NotImplementedError("no test asks for it")

    def widen(self, logits: Tensor) -> Tensor:  # [C] -> [V]
        ids = torch.arange(len(logits), device=logits.device)
        ids = ids if self.draft_ids is None else self.draft_ids
        out = torch.full((self.vocab_size,), -torch.inf, device=logits.device)
        out[ids] = logits.float()[: len(ids)]
        return out


class ModelSession:
    """Reads the whole row anew at each proposal."""

    def __init__(self, drafter: ModelDrafter) -> None:
        self.drafter = drafter

    def offer(self, token_ids: Sequence[int]) -> int:
        room = self.drafter.max_context - len(token_ids) + 1
        return min(MAX_DRAFT_TOKENS, max(0, room))

    def propose(
        self, token_ids: Sequence[int], num_draft_tokens: int, sampler: DraftSampler
    ) -> DraftProposal:
        native, drafter = self.drafter.native, self.drafter
        row, pending = native.open(), list(token_ids)
        tokens: list[int] = []
        rows: list[Tensor] = []
        for _ in range(num_draft_tokens):
            native.prefill(row, pending[:-1])
            rows.append(drafter.widen(native.score([row], [pending[-1:]])[0, 0]))
            tokens.append(sampler.draw(rows[-1]))
            pending = tokens[-1:]
        logits = None if sampler.greedy or not rows else torch.stack(rows)
        return DraftProposal(tokens, logits, "model")


class CompositeDrafter:
    """The lookup where it matches, else the model."""

    num_parameters = memory_bytes = 0

    def __init__(self, lookup: LookupDrafter, model: ModelDrafter, min_match: int = 1) -> None:
        rule = lookup.lookup
        self.lookup = LookupDrafter(rule.min_ngram, rule.max_ngram, min_match)
        self.model = model
        self.parts = DeviceParts(self.lookup.lookup, model.model)

    def on_device(self) -> DeviceParts:
        return self.parts

    def open(self) -> "CompositeSession":
        return CompositeSession(self)

    def score(self, *arguments: object) -> Tensor:
        raise NotImplementedError("no test asks for it")


class CompositeSession:
    def __init__(self, drafter: CompositeDrafter) -> None:
        self.drafter, self.model = drafter, drafter.model.open()

    def part(self, token_ids: Sequence[int]) -> DraftSession:
        matches = self.drafter.lookup.found(token_ids) is not None
        return self.drafter.lookup if matches else self.model

    def offer(self, token_ids: Sequence[int]) -> int:
        return self.part(token_ids).offer(token_ids)

    def propose(
        self, token_ids: Sequence[int], num_draft_tokens: int, sampler: DraftSampler
    ) -> DraftProposal:
        return self.part(token_ids).propose(token_ids, num_draft_tokens, sampler)

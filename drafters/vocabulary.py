"""Draft vocabularies: which of the target's ids a drafter may propose, and where its logits belong.

A drafter's own columns are called draft columns (C of them). With a reduced vocabulary, column c
stands for `draft_ids[c]`; without one, column c is id c. Ids outside the draft vocabulary, and
columns that are mere padding of a weight matrix, have probability zero.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def widen(
    logits: Tensor,  # [..., C]
    vocab_size: int,
    draft_ids: Tensor | None,  # [C]
    num_real_ids: int,
) -> Tensor:  # [..., V] float32
    """Draft logits in the target's columns, -inf wherever the drafter has no law."""
    full = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf, dtype=torch.float32)
    if draft_ids is not None:
        return full.index_copy_(-1, draft_ids, logits.float())
    columns = min(num_real_ids, logits.shape[-1], vocab_size)
    full[..., :columns] = logits[..., :columns]
    return full


def columns_of(
    draft_ids: Tensor | None, vocab_size: int, device: torch.device
) -> Tensor:  # [V] int64
    """The draft column of each of the target's ids, -1 where it has none."""
    if draft_ids is None:
        return torch.arange(vocab_size, device=device)
    columns = torch.full((vocab_size,), -1, dtype=torch.long, device=device)
    columns[draft_ids] = torch.arange(len(draft_ids), device=device)
    return columns


def count_tokens(sequences: Iterable[Tensor], vocab_size: int) -> Tensor:  # [V] int64
    """How often each id occurs in the given token ids."""
    everything = [token_ids.int().cpu() for token_ids in sequences]
    if not everything:
        return torch.zeros(vocab_size, dtype=torch.long)
    return torch.bincount(torch.cat(everything), minlength=vocab_size)


def choose_draft_ids(
    num_draft_vocab: int, num_real_ids: int, always: Iterable[int], counts: Tensor | None = None
) -> Tensor:  # [num_draft_vocab] int64, ascending
    """The `always` ids and then the most frequent; ties, or no counts at all, go to lower ids.

    Lower ids are earlier merges of a byte-pair tokenizer, hence a fair stand-in for frequency
    before any answer has been seen.
    """
    kept = sorted({token for token in always if 0 <= token < num_real_ids})
    if not len(kept) <= num_draft_vocab <= num_real_ids:
        raise ValueError(
            f"num_draft_vocab={num_draft_vocab} must lie between {len(kept)} (the special tokens, "
            f"always kept) and {num_real_ids} (the target's tokens); 0 keeps the whole vocabulary"
        )
    order = torch.zeros(num_real_ids) if counts is None else counts[:num_real_ids].double()
    order[kept] = torch.inf
    ranked = torch.sort(order, descending=True, stable=True).indices
    return ranked[:num_draft_vocab].sort().values


def special_ids(tokenizer: Any, model: Any) -> set[int]:
    """Ids that end a text or structure a chat: without them every end of a turn is a rejection."""
    found = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    for config in (model.config, getattr(model, "generation_config", None)):
        eos = getattr(config, "eos_token_id", None)
        found |= set(eos) if isinstance(eos, list) else {eos} - {None}
    return found

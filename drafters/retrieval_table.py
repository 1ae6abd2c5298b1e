"""A corpus as a table of what most often follows its n-grams: built with numpy, and on disk.

After Retrieval-Based Speculative Decoding (REST, arXiv 2311.08252), with two tensors in place of a
suffix array, so that a device finds a continuation with as many loads as there are lengths.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drafters.checkpoint import read_tensors
from kernels.ngram_table import END, MASK, MOST_BITS, MOST_TOKENS, Table, multipliers

__all__ = ["TABLE", "Table", "build_table", "read_table"]

TABLE = "table.safetensors"


def build_table(texts: Iterable[Sequence[int]], longest: int, bits: int) -> Table:
    """For every n-gram of 1 to `longest` tokens, where its commonest next token stood last.

    Of next tokens that are equally common the later one is taken; of n-grams that share one of the
    2^bits slots the one that goes on more often stays, or else the one with the later place. What
    ends a text has no next token there.
    """
    if not 1 <= longest <= MOST_TOKENS or not 1 <= bits <= MOST_BITS:
        raise ValueError(
            f"longest={longest} must lie between 1 and {MOST_TOKENS}, and bits={bits} between 1 "
            f"and {MOST_BITS}; for example longest=4 bits=20"
        )
    held = _laid_out(texts)
    places = np.zeros((longest, 1 << bits), np.int32)
    hashed = np.zeros(len(held), np.int64)  # of the n tokens in front of each place
    grams = np.concatenate([[END], held[:-1]])  # a number for these; negative: they are not whole
    for n, factor in enumerate(multipliers(longest), 1):
        hashed[n:] += held[:-n] * np.int64(factor)
        grams = _fill(places[n - 1], held, grams, (hashed & MASK) >> (32 - bits))
    return Table(torch.from_numpy(held), torch.from_numpy(places))


def _laid_out(texts: Iterable[Sequence[int]]) -> np.ndarray:
    end = np.full(1, END, np.int32)
    pieces = [end]
    for text in texts:
        token_ids = np.asarray(text, np.int64)
        if token_ids.size and not 0 <= token_ids.min() <= token_ids.max() < 1 << 28:
            raise ValueError(
                f"token ids from {token_ids.min()} to {token_ids.max()} must lie between 0 and "
                "2^28 - 1; pass what a tokenizer made of the texts"
            )
        pieces += [token_ids.astype(np.int32), end]
    return np.concatenate(pieces)


def _fill(
    places: np.ndarray,  # [2^bits], zeros, filled in
    held: np.ndarray,  # [N]
    grams: np.ndarray,  # [N], the n-gram in front of each place
    slots: np.ndarray,  # [N], and its slot
) -> np.ndarray:  # [N], the same for n + 1
    """Each n-gram's best place, by slot; counts and places are compared as one number."""
    longer = np.full(len(held), -1, np.int64)
    at = np.flatnonzero((grams >= 0) & (held >= 0))
    if not len(at):
        return longer
    vocab_size = int(held.max()) + 1
    pairs = grams[at].astype(np.int64) * vocab_size + held[at]  # an n-gram and its next token
    order = np.argsort(pairs, kind="stable")
    at, pairs = at[order], pairs[order]
    firsts = _firsts(pairs)
    counts = np.diff(firsts, append=len(at))
    longer[at + 1] = np.repeat(np.arange(len(firsts)), counts)
    latest = at[firsts + counts - 1]  # the sort is stable
    of_gram = _firsts(pairs[firsts] // vocab_size)
    best = np.maximum.reduceat(counts * len(held) + latest, of_gram) % len(held)
    seen = np.add.reduceat(counts, of_gram)
    kept = np.zeros(len(places), np.int64)
    np.maximum.at(kept, slots[best], seen * len(held) + best)
    places[:] = kept % len(held)
    return longer


def _firsts(numbers: np.ndarray) -> np.ndarray:
    """Where runs of equal numbers begin."""
    return np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 1))


def read_table(folder: Path, description: Mapping[str, Any], vocab_size: int) -> Table:
    """The table that belongs to a description; ValueError where it is none of this vocabulary."""
    tensors = read_tensors(folder, description, TABLE)
    remedy = f"delete {folder} and build the table again"
    if set(tensors) != {"texts", "places"}:
        raise ValueError(
            f"{folder / TABLE} holds {sorted(tensors)} and not texts and places; {remedy}"
        )
    table = Table(tensors["texts"], tensors["places"])
    texts, places = (tensors[name].numpy() for name in ("texts", "places"))
    highest = int(texts.max(initial=END))
    if highest >= vocab_size:
        raise ValueError(
            f"{folder / TABLE} holds token {highest}, but the target knows {vocab_size}; build the "
            "table from answers of this target"
        )
    if places.min() < 0 or places.max() >= max(1, len(texts)) or texts.min(initial=END) < END:
        raise ValueError(f"{folder / TABLE} points outside its texts; {remedy}")
    if places.any() and texts[-1] != END:
        raise ValueError(f"{folder / TABLE} ends within a text; {remedy}")
    if (texts[places[places > 0]] == END).any():
        raise ValueError(f"{folder / TABLE} points behind an end of a text; {remedy}")
    return table

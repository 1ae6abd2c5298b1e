# mypy: disallow-untyped-defs=False
r"""What followed a row's last tokens where they last stood before: lookup drafting on the device.

For a text x of n tokens and each end e in 1 .. n - 1, let m(e) be the number of tokens that agree,
x[e - j] = x[n - j] for j = 1 .. m, at most max_ngram. Of the greatest m, the greatest e is taken:

    draft[i] = x[e + i mod (n - e)],

so an occurrence may overlap the suffix, and what it predicts goes on with its period. That is the
rule of drafters/ngram.py. Two launches: the best key (m, e) of splits of the text, then of the row.
Where m < min_ngram, a table may know what follows (kernels/recall.py), as in drafters/retrieval.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launching import launch
from kernels.ngram_table import Table
from kernels.overlap import follow, options
from kernels.recall import probe, recall

BLOCK = 1024  # ends that a program of the first launch looks at
END_BITS = tl.constexpr(32)  # of a key, below the number of tokens that agree
SPLITS = tl.constexpr(64)  # keys that the second launch reads at a time


def look_up_reference(
    token_ids: Tensor,
    lengths: Tensor,
    slots: Tensor,
    wanted: Tensor,
    min_ngram: int,
    max_ngram: int,
    min_match: int,
    max_offer: int,
    drafts: Tensor,
    num_drafted: Tensor,
    table: Table | None = None,
) -> None:
    """As `look_up`, end by end on the host."""
    drafts.fill_(-1)
    num_drafted.zero_()
    for b, (slot, asked) in enumerate(zip(slots.tolist(), wanted.tolist(), strict=True)):
        text = token_ids[slot, : int(lengths[slot])].tolist()
        length = len(text)
        found = [(_agreeing(text, end, max_ngram), end) for end in range(1, length)]
        matched, end = max(found, default=(0, 0))
        size, guess = min(asked, max_offer, drafts.shape[1]), []
        if matched >= max(min_ngram, min_match):
            guess = [text[end + i % (length - end)] for i in range(size)]
        elif matched < min_ngram and table is not None:
            known, place = table.find(text)
            guess = table.following(place, size) if known >= max(1, min_match) else []
        drafts[b, : len(guess)] = torch.tensor(guess, dtype=drafts.dtype)
        num_drafted[b] = len(guess)


def _agreeing(text: list[int], end: int, most: int) -> int:
    count = 0
    while count < min(most, end) and text[end - 1 - count] == text[-1 - count]:
        count += 1
    return count


def look_up(
    token_ids: Tensor,  # [S, capacity] int32, the texts of all slots
    lengths: Tensor,  # [S] int32, tokens of each slot's text
    slots: Tensor,  # [B] int32 or int64
    wanted: Tensor,  # [B] int32, most tokens to propose; 0: none
    min_ngram: int,
    max_ngram: int,
    min_match: int,
    max_offer: int,
    drafts: Tensor,  # [B, K] int32, overwritten, -1 past what is proposed
    num_drafted: Tensor,  # [B] int32, overwritten; 0 where fewer than min_match tokens agree
    table: Table | None = None,  # on the same device; asked where fewer than min_ngram agree
) -> None:
    """Propose what followed each row's longest suffix that occurs earlier, or in the table."""
    num_rows, capacity = len(slots), token_ids.shape[1]
    assert 1 <= min_ngram <= max_ngram
    assert token_ids.is_contiguous()
    assert drafts.is_contiguous()
    splits = triton.cdiv(capacity, BLOCK)
    keys = torch.empty(num_rows, splits, dtype=torch.int64, device=token_ids.device)
    texts = token_ids, lengths, slots, wanted
    launch(
        lookup_scan_kernel,
        (splits, num_rows),
        *texts,
        keys,
        capacity,
        MAX_NGRAM=max_ngram,
        BLOCK=BLOCK,
        **options(token_ids.device),
    )
    launch(
        lookup_take_kernel,
        (num_rows,),
        *texts,
        keys,
        drafts,
        num_drafted,
        *((None, None) if table is None else (table.texts, table.places)),
        capacity,
        splits,
        0 if table is None else len(table.texts),
        FEWEST=max(min_ngram, min_match),
        **_recalling(table, min_ngram, min_match),
        MAX_OFFER=max_offer,
        DRAFTS=drafts.shape[1],
        BLOCK=triton.next_power_of_2(drafts.shape[1]),
        **options(token_ids.device),
        num_warps=1,
    )


def _recalling(table: Table | None, min_ngram: int, min_match: int) -> dict[str, int]:
    """Of the second launch; without a table all the same, whatever the lookup."""
    if table is None:
        return dict.fromkeys(("MIN_NGRAM", "FEWEST_KNOWN", "LONGEST", "PROBES", "BITS"), 0)
    assert table.texts.is_contiguous()
    assert table.places.is_contiguous()
    return {
        "MIN_NGRAM": min_ngram,
        "FEWEST_KNOWN": max(1, min_match),
        "LONGEST": table.longest,
        "PROBES": triton.next_power_of_2(table.longest),
        "BITS": table.bits,
    }


@triton.jit(do_not_specialize=["capacity"])
def lookup_scan_kernel(
    ids_ptr,
    lengths_ptr,
    slots_ptr,
    wanted_ptr,
    keys_ptr,
    capacity,
    MAX_NGRAM: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP > 0:
        follow(OVERLAP)
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    length = tl.load(lengths_ptr + slot)
    at = keys_ptr + row * tl.num_programs(0) + split
    if (tl.load(wanted_ptr + row) > 0) & (split * BLOCK < length):
        text_ptr = ids_ptr + slot * capacity
        end = split * BLOCK + tl.arange(0, BLOCK)
        inside = end < length
        agrees = inside
        matched = tl.zeros([BLOCK], dtype=tl.int32)
        for n in tl.static_range(1, MAX_NGRAM + 1):
            # No load waits for what another has found.
            reached = inside & (end >= n)
            last = tl.load(text_ptr + length - n, mask=n < length, other=-1)
            seen = tl.load(text_ptr + end - n, mask=reached, other=-2)
            agrees = agrees & (seen == last)
            matched += agrees.to(tl.int32)
        key = tl.where(matched > 0, (matched.to(tl.int64) << END_BITS) + end, 0)
        tl.store(at, tl.max(key, axis=0))
    else:
        tl.store(at, 0)


@triton.jit(do_not_specialize=["capacity", "num_splits", "num_texts"])
def lookup_take_kernel(
    ids_ptr,
    lengths_ptr,
    slots_ptr,
    wanted_ptr,
    keys_ptr,
    drafts_ptr,
    num_drafted_ptr,
    texts_ptr,
    places_ptr,
    capacity,
    num_splits,
    num_texts,
    FEWEST: tl.constexpr,
    MIN_NGRAM: tl.constexpr,
    FEWEST_KNOWN: tl.constexpr,
    LONGEST: tl.constexpr,  # of the table; 0: there is none
    PROBES: tl.constexpr,
    BITS: tl.constexpr,
    MAX_OFFER: tl.constexpr,
    DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP > 0:
        follow(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    length = tl.load(lengths_ptr + slot)
    if LONGEST > 0:
        text_ptr = ids_ptr + slot * capacity
        # Asked for before it is known whether it is needed: memory is far, a row is one program.
        place = probe(text_ptr, length, places_ptr, LONGEST, BITS, PROBES)
    s = tl.arange(0, SPLITS)
    best = tl.zeros([SPLITS], dtype=tl.int64)
    for first in range(0, num_splits, SPLITS):
        inside = first + s < num_splits
        key = tl.load(keys_ptr + row * num_splits + first + s, mask=inside, other=0)
        best = tl.maximum(best, key)
    found = tl.max(best, axis=0)
    matched = (found >> END_BITS).to(tl.int32)
    end = found.to(tl.int32)  # its low bits
    most = tl.minimum(tl.minimum(tl.load(wanted_ptr + row), MAX_OFFER), DRAFTS)
    size = tl.where(matched >= FEWEST, tl.maximum(most, 0), 0)
    i = tl.arange(0, BLOCK)
    period = tl.maximum(length - end, 1)  # nothing is read where nothing was found
    drafted = i < size
    token = tl.load(ids_ptr + slot * capacity + end + i % period, mask=drafted, other=-1)
    if LONGEST > 0:  # noqa: SIM102, what is compiled and what is run
        if (matched < MIN_NGRAM) & (most > 0):
            token, size = recall(
                text_ptr, length, texts_ptr, num_texts, place, most,
                FEWEST_KNOWN, LONGEST, PROBES, BLOCK,
            )  # fmt: skip
    tl.store(drafts_ptr + row * DRAFTS + i, token, mask=i < DRAFTS)
    tl.store(num_drafted_ptr + row, size)

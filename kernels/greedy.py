# mypy: disallow-untyped-defs=False
r"""The next token of plain greedy decoding, put where the next pass reads it.

For row b with logits z[b], t = the lowest id of max z[b]; then token_ids[b] = t, positions[b] += 1.
Two launches: maxima of splits of the vocabulary, then of the splits. Padding stays where it is.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launching import launch
from kernels.overlap import follow, options


def greedy_reference(logits: Tensor) -> Tensor:
    """The lowest id of each row's maximum [B]."""
    return (logits == logits.max(-1, keepdim=True).values).int().argmax(-1)


def take_greedy(
    logits: Tensor,  # [B, V]
    token_ids: Tensor,  # [B] int32, overwritten
    positions: Tensor,  # [B] int32, advanced by one
    widths: Tensor,  # [B] int32; 0: padding
    taken: Tensor,  # [B] int32, overwritten: the same tokens, for whoever reads them later
) -> None:
    """Choose each row's token and move the row on to it."""
    num_rows, vocab = logits.shape
    assert logits.is_contiguous()
    block = max(128, min(2048, triton.next_power_of_2(vocab)))
    splits = triton.cdiv(vocab, block)
    peaks = torch.empty(num_rows, splits, dtype=torch.float32, device=logits.device)
    ids = torch.empty_like(peaks, dtype=torch.int32)
    launch(
        greedy_split_kernel,
        (splits, num_rows),
        logits,
        peaks,
        ids,
        VOCAB=vocab,
        BLOCK=block,
        **options(logits.device),
    )
    launch(
        greedy_take_kernel,
        (num_rows,),
        peaks,
        ids,
        token_ids,
        positions,
        widths,
        taken,
        VOCAB=vocab,
        SPLITS=splits,
        BLOCK=triton.next_power_of_2(splits),
        **options(logits.device),
    )


@triton.jit
def greedy_split_kernel(
    logits_ptr,
    peaks_ptr,
    ids_ptr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP > 0:
        follow(OVERLAP)
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    v = split * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * VOCAB + v, mask=v < VOCAB, other=-float("inf")).to(tl.float32)
    peak = tl.max(x, axis=0)
    at = row * tl.num_programs(0) + split
    tl.store(peaks_ptr + at, peak)
    tl.store(ids_ptr + at, tl.min(tl.where(x == peak, v, VOCAB), axis=0))


@triton.jit
def greedy_take_kernel(
    peaks_ptr,
    ids_ptr,
    token_ids_ptr,
    positions_ptr,
    widths_ptr,
    taken_ptr,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP > 0:
        follow(OVERLAP)
    row = tl.program_id(0)
    s = tl.arange(0, BLOCK)
    peaks = tl.load(peaks_ptr + row * SPLITS + s, mask=s < SPLITS, other=-float("inf"))
    ids = tl.load(ids_ptr + row * SPLITS + s, mask=s < SPLITS, other=VOCAB)
    best = tl.min(tl.where(peaks == tl.max(peaks, axis=0), ids, VOCAB), axis=0)
    best = tl.minimum(best, VOCAB - 1)  # a row of NaN has no maximum
    if tl.load(widths_ptr + row) > 0:
        tl.store(token_ids_ptr + row, best)
        tl.store(taken_ptr + row, best)
        tl.store(positions_ptr + row, tl.load(positions_ptr + row) + 1)

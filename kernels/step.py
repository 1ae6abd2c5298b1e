# mypy: disallow-untyped-defs=False
# ruff: noqa: SIM102 (what the compiler decides stays apart from what the device decides)
r"""What happens between the passes of one step on the device: B rows, each known by its slot.

State lies by slot: the verified tokens, their number n, how many more are allowed, whether the text
has ended, and how many of its tokens each drafting model has read. A step then is

    begin    the most that a row may draft: what it asks for, cut to what could still be emitted
    draft    kernels/drafts.py
    present  the last verified token and the draft become the row of the target's pass
    advance  what verification kept is appended, up to EOS or the last token allowed

On CUDA each of them notes when it runs, so that a step tells where its time went.

One program a row. Rows that are not there, or whose text has ended, are padding: their width is 0
and nothing of theirs is written. To roll back is to lower a number: what was read past it is
written over.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.heads import Batch
from kernels.launching import launch
from kernels.overlap import follow, options
from kernels.step_state import FIELDS, FROM_MODEL, ONE_WARP, Asked, Drafting, Slots


def begin(
    slots: Slots,
    asked: Asked,
    state: Drafting,
    wanted: Tensor,  # [L, B] int32, overwritten: tokens asked of each lookup
    words: Tensor,  # [B, 3] int64: the third becomes the place of a row's next token
    moments: Tensor | None = None,  # [NUM_MOMENTS] int64, nanoseconds, here and below: on CUDA only
) -> None:
    """Nothing is drafted yet."""
    batch, width = state.drafts.shape
    launch(
        begin_kernel,
        (batch,),
        asked.slots,
        asked.there,
        asked.limits,
        asked.lookups,
        slots.lengths,
        slots.left,
        slots.done,
        state.drafts,
        state.drafted,
        state.sources,
        state.limits,
        state.failed,
        wanted,
        words,
        moments,
        len(wanted),
        width,
        BLOCK=triton.next_power_of_2(max(width, 1)),
        **options(words.device),
        num_warps=ONE_WARP,
    )


def present(
    slots: Slots,
    asked: Asked,
    state: Drafting,
    token_ids: Tensor,
    batch: Batch,
    moments: Tensor | None = None,
) -> None:
    """The target's pass: [B * (K + 1)] token ids and where they stand."""
    launch(
        present_kernel,
        (len(asked.slots),),
        asked.slots,
        asked.there,
        slots.lengths,
        slots.done,
        slots.token_ids,
        slots.token_ids.shape[1],
        state.drafts,
        state.drafted,
        token_ids,
        batch.slots,
        batch.positions,
        batch.widths,
        moments,
        state.drafts.shape[1],
        BLOCK=triton.next_power_of_2(batch.width),
        **options(token_ids.device),
        num_warps=ONE_WARP,
    )


def advance(
    slots: Slots,
    asked: Asked,
    state: Drafting,
    kept: Tensor,  # [B, K + 1] int64, -1 past the end
    num_accepted: Tensor,  # [B] int64
    errors: Tensor,  # [B] int32, 1 where verification found no law
    eos: Tensor,  # [E] int32
    read: Tensor | None,  # [S] int32 of the model that drafted
    records: Tensor,  # [B * (NUM_FIELDS + K + 1)] int64, overwritten, row after row
    moments: Tensor | None = None,  # are copied to the end of the records, which is as much longer
) -> None:
    """Append what was kept to each row that goes on, and say in its record what became of it."""
    width = kept.shape[1]
    vocab_size = 0 if slots.counts is None else slots.counts.shape[1]
    launch(
        advance_kernel,
        (len(kept),),
        asked.slots,
        asked.there,
        slots.lengths,
        slots.left,
        slots.done,
        slots.times,
        slots.token_ids,
        slots.token_ids.shape[1],
        slots.counts,
        vocab_size,
        state.drafted,
        state.sources,
        state.limits,
        state.failed,
        kept,
        num_accepted,
        errors,
        eos,
        len(eos),
        read,
        records,
        moments,
        len(slots.lengths),
        width,
        BLOCK=triton.next_power_of_2(width),
        **options(records.device),
        num_warps=ONE_WARP,
    )


def stamp(times: Tensor, place: int) -> None:
    """times[place] becomes the device's clock, in nanoseconds: int64, on CUDA only."""
    launch(stamp_kernel, (1,), times, place, num_warps=ONE_WARP)


@triton.jit(do_not_specialize=["num_lookups", "width"])
def begin_kernel(
    slots_ptr, there_ptr, asked_ptr, lookups_ptr, lengths_ptr, left_ptr, done_ptr,
    drafts_ptr, drafted_ptr, sources_ptr, limits_ptr, failed_ptr, wanted_ptr, words_ptr,
    moments_ptr, num_lookups, width, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP > 0:
        follow(OVERLAP)
    b, batch = tl.program_id(0), tl.num_programs(0)
    slot = tl.load(slots_ptr + b)
    active = (tl.load(there_ptr + b) != 0) & (tl.load(done_ptr + slot) == 0)
    asked = tl.load(asked_ptr + b).to(tl.int32)
    limit = tl.maximum(tl.minimum(asked, tl.load(left_ptr + slot) - 1), 0)
    limit = tl.where(active, limit, 0)
    tl.store(limits_ptr + b, limit)
    tl.store(drafted_ptr + b, 0)
    tl.store(sources_ptr + b, 0)
    tl.store(failed_ptr + b, 0)
    i = tl.arange(0, BLOCK)
    tl.store(drafts_ptr + b * width + i, tl.full((BLOCK,), -1, tl.int32), mask=i < width)
    lookup = tl.load(lookups_ptr + b)
    for number in range(0, num_lookups):
        tl.store(wanted_ptr + number * batch + b, tl.where(lookup == number, limit, 0))
    tl.store(words_ptr + b * 3 + 2, tl.load(lengths_ptr + slot).to(tl.int64))
    if moments_ptr is not None:
        if b == 0:
            tl.store(moments_ptr + 0, tl.extra.cuda.globaltimer())


@triton.jit(do_not_specialize=["capacity", "num_drafts"])
def present_kernel(
    slots_ptr, there_ptr, lengths_ptr, done_ptr, tokens_ptr, capacity, drafts_ptr, drafted_ptr,
    ids_ptr, row_slots_ptr, positions_ptr, widths_ptr, moments_ptr, num_drafts, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP > 0:
        follow(OVERLAP)
    b = tl.program_id(0)
    slot = tl.load(slots_ptr + b)
    active = (tl.load(there_ptr + b) != 0) & (tl.load(done_ptr + slot) == 0)
    drafted = tl.load(drafted_ptr + b)
    last = tl.maximum(tl.load(lengths_ptr + slot) - 1, 0)
    w = tl.arange(0, BLOCK)
    draft = tl.load(drafts_ptr + b * num_drafts + w - 1, mask=(w > 0) & (w <= drafted), other=0)
    token = tl.where(w == 0, tl.load(tokens_ptr + slot * capacity + last), draft)
    token = tl.where(active, token, 0)
    tl.store(ids_ptr + b * (num_drafts + 1) + w, token, mask=w <= num_drafts)
    tl.store(row_slots_ptr + b, slot.to(tl.int32))
    tl.store(positions_ptr + b, tl.where(active, last, 0))
    tl.store(widths_ptr + b, tl.where(active, drafted + 1, 0))
    if moments_ptr is not None:
        if b == 0:
            tl.store(moments_ptr + 1, tl.extra.cuda.globaltimer())


@triton.jit(do_not_specialize=["capacity", "vocab", "num_eos", "num_slots", "width"])
def advance_kernel(
    slots_ptr, there_ptr, lengths_ptr, left_ptr, done_ptr, times_ptr, tokens_ptr, capacity,
    counts_ptr, vocab, drafted_ptr, sources_ptr, limits_ptr, failed_ptr, kept_ptr, accepted_ptr,
    errors_ptr, eos_ptr, num_eos, read_ptr, records_ptr, moments_ptr, num_slots, width,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP > 0:
        follow(OVERLAP)
    b = tl.program_id(0)
    slot = tl.load(slots_ptr + b)
    active = (tl.load(there_ptr + b) != 0) & (tl.load(done_ptr + slot) == 0)
    broken = active & (tl.load(errors_ptr + b) != 0)
    length, left = tl.load(lengths_ptr + slot), tl.load(left_ptr + slot)
    drafted, source = tl.load(drafted_ptr + b), tl.load(sources_ptr + b)
    accepted = tl.load(accepted_ptr + b).to(tl.int32)
    i = tl.arange(0, BLOCK)
    emitted = tl.minimum(accepted + 1, left)
    token = tl.load(kept_ptr + b * width + i, mask=(i < width) & (i < emitted), other=-1)
    is_eos = (i < 0) & (token == token)
    for number in range(0, num_eos):
        is_eos = is_eos | (token == tl.load(eos_ptr + number))
    end = tl.min(tl.where(is_eos & (i < emitted), i, BLOCK), axis=0)  # of the first EOS
    emitted = tl.minimum(emitted, end + 1)
    emitted = tl.where(active & (broken == 0), emitted, 0)
    if active:
        new = i < emitted
        tl.store(tokens_ptr + slot * capacity + length + i, token.to(tl.int32), mask=new)
        tl.store(lengths_ptr + slot, length + emitted)
        tl.store(left_ptr + slot, left - emitted)
        ended = (end < emitted) | (emitted >= left) | broken
        tl.store(done_ptr + slot, ended.to(tl.int32))
        if counts_ptr is not None:
            tl.atomic_add(counts_ptr + slot * vocab + token, 1, mask=new)
        if read_ptr is not None:
            if source == FROM_MODEL:
                tl.store(read_ptr + slot, length + tl.minimum(drafted - 1, accepted))
    at = records_ptr + b * (FIELDS + width)
    tl.store(at + 0, tl.load(limits_ptr + b).to(tl.int64))
    tl.store(at + 1, drafted.to(tl.int64))
    tl.store(at + 2, accepted.to(tl.int64))
    tl.store(at + 3, emitted.to(tl.int64))
    tl.store(at + 4, source.to(tl.int64))
    tl.store(at + 5, broken.to(tl.int64))
    tl.store(at + 6, tl.load(failed_ptr + b).to(tl.int64))
    tl.store(at + 7, length.to(tl.int64))
    tl.store(at + 8, tl.load(times_ptr + slot))
    tl.store(at + 9, tl.load(times_ptr + num_slots + slot))
    tl.store(at + FIELDS + i, tl.where(i < emitted, token, -1), mask=i < width)
    if moments_ptr is not None:
        if b == 0:
            end_ptr = records_ptr + tl.num_programs(0) * (FIELDS + width)
            tl.store(end_ptr + 0, tl.load(moments_ptr + 0))
            tl.store(end_ptr + 1, tl.load(moments_ptr + 1))
            tl.store(end_ptr + 2, tl.extra.cuda.globaltimer())
            tl.store(end_ptr + 3, tl.load(moments_ptr + 3))


@triton.jit(do_not_specialize=["place"])
def stamp_kernel(times_ptr, place):
    tl.store(times_ptr + place, tl.extra.cuda.globaltimer())

# mypy: disallow-untyped-defs=False
r"""Where the drafts of a step come from: what lookups found, or a model, token by token.

    keep     what was found for a row that asked becomes its draft
    catch up the verified tokens that a model has not read become the rows of its first pass: of
             row b tokens read[b] .. n[b] - 1, at their positions, where nothing was found for b
    take     a drawn token becomes the draft's next one, and the row of the model's next pass

One program a row; kernels/step.py says what is before and after. The last drafted token is never
read: a model of C positions drafts at most C - n + 1 tokens.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.heads import Batch
from kernels.launching import launch
from kernels.overlap import follow, options
from kernels.step_state import FROM_LOOKUP, FROM_MODEL, ONE_WARP, Asked, Drafting, Slots


def keep_found(asked: Asked, state: Drafting, found: Tensor, num_found: Tensor) -> None:
    """Take over what lookups found for the rows that asked: [L, B, K] and [L, B] int32."""
    _, batch, width = found.shape
    launch(
        found_kernel,
        (batch,),
        asked.lookups,
        found,
        num_found,
        state.drafts,
        state.drafted,
        state.sources,
        width,
        BLOCK=triton.next_power_of_2(width),
        **options(found.device),
        num_warps=ONE_WARP,
    )


def catch_up(
    slots: Slots,
    asked: Asked,
    state: Drafting,
    read: Tensor,  # [S] int32, tokens that the model has read; all verified ones where it drafts
    wanted: Tensor,  # [B] int32, overwritten: tokens that it is to draft
    token_ids: Tensor,  # [B * width] int32 of its first pass
    batch: Batch,
    last: Tensor,  # [B] int64, overwritten: where each row's last token stands in the pass
    depths: Tensor,  # [K, n] int32 zeros; the first of those at which a row drafts become 1
    most: int,  # tokens to draft
    max_context: int,
) -> None:
    """What the model lacks of each row that it drafts for; a row that lacks more than fits has
    nothing drafted.
    """
    launch(
        catch_up_kernel,
        (len(asked.slots),),
        asked.slots,
        asked.models,
        asked.model_slots,
        asked.read,
        slots.lengths,
        slots.token_ids,
        slots.token_ids.shape[1],
        read,
        state.drafted,
        state.limits,
        wanted,
        token_ids,
        batch.slots,
        batch.positions,
        batch.widths,
        last,
        depths,
        depths.stride(0),
        batch.width,
        most,
        max_context,
        BLOCK=triton.next_power_of_2(batch.width),
        **options(token_ids.device),
        num_warps=ONE_WARP,
    )


def take(
    slots: Slots,
    asked: Asked,
    state: Drafting,
    depth: int,
    wanted: Tensor,  # [B] int32
    drawn: Tensor,  # [B, 1] int64, of the model's columns
    errors: Tensor,  # [B] int32, 1 where they come of no law
    draft_ids: Tensor | None,  # [C] int64, the target's id of each column
    token_ids: Tensor,  # [B] int32 of the model's next pass
    batch: Batch,
    seen: Tensor | None,  # [B, V] int32, the drawn token's becomes 1
) -> None:
    """The draft's token at this depth, and the model's next pass over it."""
    launch(
        take_kernel,
        (len(wanted),),
        asked.slots,
        asked.model_slots,
        slots.lengths,
        wanted,
        drawn,
        errors,
        draft_ids,
        state.drafts,
        state.drafted,
        state.sources,
        state.failed,
        token_ids,
        batch.slots,
        batch.positions,
        batch.widths,
        seen,
        0 if seen is None else seen.shape[1],
        state.drafts.shape[1],
        depth,
        **options(token_ids.device),
        num_warps=ONE_WARP,
    )


@triton.jit(do_not_specialize=["width"])
def found_kernel(
    lookups_ptr, found_ptr, num_found_ptr, drafts_ptr, drafted_ptr, sources_ptr, width,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP > 0:
        follow(OVERLAP)
    b, batch = tl.program_id(0), tl.num_programs(0)
    lookup = tl.load(lookups_ptr + b)
    if lookup >= 0:
        at = lookup * batch + b
        number = tl.load(num_found_ptr + at)
        i = tl.arange(0, BLOCK)
        token = tl.load(found_ptr + at * width + i, mask=i < width, other=-1)
        tl.store(drafts_ptr + b * width + i, tl.where(i < number, token, -1), mask=i < width)
        tl.store(drafted_ptr + b, number)
        tl.store(sources_ptr + b, tl.where(number > 0, FROM_LOOKUP, 0))


@triton.jit(do_not_specialize=["capacity", "stride", "width", "most", "max_context"])
def catch_up_kernel(
    slots_ptr, models_ptr, model_slots_ptr, at_least_ptr, lengths_ptr, tokens_ptr, capacity,
    read_ptr, drafted_ptr, limits_ptr, wanted_ptr, ids_ptr, row_slots_ptr, positions_ptr,
    widths_ptr, last_ptr, depths_ptr, stride, width, most, max_context, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP > 0:
        follow(OVERLAP)
    b = tl.program_id(0)
    slot = tl.load(slots_ptr + b)
    length = tl.load(lengths_ptr + slot)
    read = tl.maximum(tl.load(read_ptr + slot), tl.load(at_least_ptr + b).to(tl.int32))
    lacks = length - read
    limit = tl.load(limits_ptr + b)
    asked = (tl.load(models_ptr + b) != 0) & (tl.load(drafted_ptr + b) == 0)
    # The last drafted token is never read.
    most = tl.minimum(most, tl.maximum(max_context - length + 1, 0))
    wanted = tl.where(asked & (lacks <= width), tl.minimum(limit, most), 0)
    tl.store(wanted_ptr + b, wanted)
    tl.store(limits_ptr + b, tl.where(asked, wanted, limit))
    used = tl.where(wanted > 0, lacks, 0)
    w = tl.arange(0, BLOCK)
    token = tl.load(tokens_ptr + slot * capacity + read + w, mask=w < used, other=0)
    tl.store(ids_ptr + b * width + w, token, mask=w < width)
    tl.store(row_slots_ptr + b, tl.load(model_slots_ptr + b).to(tl.int32))
    tl.store(positions_ptr + b, tl.where(wanted > 0, read, 0))
    tl.store(widths_ptr + b, used)
    tl.store(last_ptr + b, (b * width + tl.maximum(used - 1, 0)).to(tl.int64))
    for depth in range(0, wanted):
        tl.store(depths_ptr + depth * stride, 1)
    if wanted > 0:
        tl.store(read_ptr + slot, length)


@triton.jit(do_not_specialize=["vocab", "width", "depth"])
def take_kernel(
    slots_ptr, model_slots_ptr, lengths_ptr, wanted_ptr, drawn_ptr, errors_ptr, draft_ids_ptr,
    drafts_ptr, drafted_ptr, sources_ptr, failed_ptr, ids_ptr, row_slots_ptr, positions_ptr,
    widths_ptr, seen_ptr, vocab, width, depth, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP > 0:
        follow(OVERLAP)
    b = tl.program_id(0)
    wanted = tl.load(wanted_ptr + b)
    asked = (depth < wanted) & (tl.load(failed_ptr + b) == 0)
    broken = asked & (tl.load(errors_ptr + b) != 0)
    taken = asked & (broken == 0)
    token = tl.load(drawn_ptr + b, mask=taken, other=0)
    if draft_ids_ptr is not None:
        token = tl.load(draft_ids_ptr + token, mask=taken, other=0)
    token = token.to(tl.int32)
    tl.store(drafts_ptr + b * width + depth, token, mask=taken)
    tl.store(drafted_ptr + b, depth + 1, mask=taken)
    tl.store(sources_ptr + b, FROM_MODEL, mask=taken)
    tl.store(failed_ptr + b, 1, mask=broken)
    if seen_ptr is not None:
        tl.store(seen_ptr + b.to(tl.int64) * vocab + token, 1, mask=taken)
    more = taken & (depth + 1 < wanted)
    length = tl.load(lengths_ptr + tl.load(slots_ptr + b))
    tl.store(ids_ptr + b, token)
    tl.store(row_slots_ptr + b, tl.load(model_slots_ptr + b).to(tl.int32))
    tl.store(positions_ptr + b, tl.where(more, length + depth, 0))
    tl.store(widths_ptr + b, more.to(tl.int32))

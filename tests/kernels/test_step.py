"""Bugs these tests would catch: what is kept written to another row, past EOS or past the budget;
padding that writes; counts that miss a token emitted twice; a model believed to have read a
rejected draft, or the last one, which it never reads; a first pass that begins a token too late or
too early; drafts past what a row may still emit, or past the model's context; a kernel that only
the interpreter accepts.

Numbers are small and whole, so everything is compared exactly.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from translated import told_by

from kernels.drafts import catch_up, keep_found, take
from kernels.heads import Batch
from kernels.step import advance, begin, present
from kernels.step_state import (
    ACCEPTED,
    BROKEN,
    DRAFTED,
    EMITTED,
    FAILED,
    LENGTH,
    LIMIT,
    LOOKUP,
    MODEL,
    NONE,
    NUM_FIELDS,
    OPENED,
    READ,
    SOURCE,
    Asked,
    Drafting,
    Slots,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_SLOTS, CAPACITY, VOCAB = 5, 16, 11


def whole(*numbers: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=DEVICE)


def long(*numbers: int) -> Tensor:
    return whole(*numbers, dtype=torch.int64)


def slots(counts: bool = True) -> Slots:
    """Slot s holds the tokens 2 + s, 3 + s, ... mod VOCAB; 3 + s of them; slot 4 has ended."""
    token = torch.arange(CAPACITY)[None] + torch.arange(NUM_SLOTS)[:, None] + 2
    lengths = torch.arange(NUM_SLOTS) + 3
    return Slots(
        (token % VOCAB).int().to(DEVICE),
        lengths.int().to(DEVICE),
        whole(6, 2, 1, 9, 5),
        whole(0, 0, 0, 0, 1),
        torch.arange(2 * NUM_SLOTS).view(2, -1).to(DEVICE),
        torch.zeros(NUM_SLOTS, VOCAB, dtype=torch.int32, device=DEVICE) if counts else None,
    )


def asked(**changes: Tensor) -> Asked:
    """Rows in slots 3, 1, 4 and 0, and one of padding, which names slot 0 too."""
    values = {
        "slots": long(3, 1, 4, 0, 0),
        "there": long(1, 1, 1, 1, 0),
        "limits": long(4, 4, 4, 0, 4),
        "lookups": long(-1, -1, -1, -1, -1),
        "models": long(1, 1, 1, 1, 1),
        "model_slots": long(7, 8, 9, 6, 0),
        "read": long(2, 0, 0, 0, 0),
    }
    return Asked(**{**values, **changes})


def batch(width: int, rows: int = 5) -> tuple[Tensor, Batch]:
    ids = torch.full((rows * width,), -7, dtype=torch.int32, device=DEVICE)
    return ids, Batch(*(torch.full_like(ids[:rows], -7) for _ in range(3)), width)


def begun(state: Slots, given: Asked, width: int = 4, lookups: int = 1) -> tuple[Drafting, Tensor]:
    drafting = Drafting.new(len(given.slots), width, DEVICE)
    wanted = torch.full((lookups, len(given.slots)), -7, dtype=torch.int32, device=DEVICE)
    words = torch.full((len(given.slots), 3), 5, dtype=torch.int64, device=DEVICE)
    begin(state, given, drafting, wanted, words)
    assert words[:, 0].tolist() == [5] * len(words)
    assert words[:, 2].tolist() == state.lengths[given.slots].tolist()
    return drafting, wanted


def test_a_step_begins_with_what_could_still_be_emitted() -> None:
    drafting, wanted = begun(slots(), asked(lookups=long(0, 1, 0, 0, 0)), lookups=2)
    assert drafting.limits.tolist() == [4, 1, 0, 0, 0]  # two left: one draft and one more
    assert wanted.tolist() == [[4, 0, 0, 0, 0], [0, 1, 0, 0, 0]]
    assert drafting.drafts.tolist() == [[-1] * 4] * 5
    assert not bool(drafting.drafted.any() or drafting.sources.any() or drafting.failed.any())


def test_each_row_takes_what_its_own_lookup_found() -> None:
    given = asked(lookups=long(1, 0, -1, -1, 0))
    drafting, _ = begun(slots(), given)
    found = torch.arange(2 * 5 * 4, dtype=torch.int32, device=DEVICE).view(2, 5, 4)
    number = whole(9, 1, 9, 9, 0, 3, 9, 9, 9, 9).view(2, 5)
    keep_found(given, drafting, found, number)
    assert drafting.drafted.tolist() == [3, 1, 0, 0, 0]
    assert drafting.sources.tolist() == [LOOKUP, LOOKUP, NONE, NONE, NONE]
    assert drafting.drafts[:2].tolist() == [[20, 21, 22, -1], [4, -1, -1, -1]]


def test_a_model_reads_the_verified_tokens_that_it_lacks() -> None:
    state, given = slots(), asked()
    drafting, _ = begun(state, given)
    read, wanted = whole(0, 3, 0, 4, 0), whole(*[-7] * 5)
    ids, places = batch(2)
    last = long(*[-7] * 5)
    depths = torch.zeros(4, 4, dtype=torch.int32, device=DEVICE)
    catch_up(state, given, drafting, read, wanted, ids, places, last, depths, 3, 100)
    assert depths.tolist() == [[1, 0, 0, 0]] * 3 + [[0] * 4]
    assert wanted.tolist() == [3, 1, 0, 0, 0]
    assert drafting.limits.tolist() == [3, 1, 0, 0, 0]
    assert places.widths.tolist() == [2, 1, 0, 0, 0]
    assert places.positions[:2].tolist() == [4, 3]
    assert places.slots[:2].tolist() == [7, 8]
    assert ids.view(5, 2)[:2].tolist() == [[9, 10], [6, 0]]
    assert last[:2].tolist() == [1, 2]
    assert read.tolist() == [0, 4, 0, 6, 0]


@pytest.mark.parametrize(
    ("read", "context", "expected"),
    [
        (3, 100, 0),  # three unread, two fit
        (4, 7, 2),  # positions 6 is the last there is: of the draft one token is read
        (4, 6, 1),
        (4, 5, 0),
    ],
)
def test_a_model_drafts_as_far_as_it_can(read: int, context: int, expected: int) -> None:
    state, given = slots(), asked()
    drafting, _ = begun(state, given)
    wanted, (ids, places) = whole(*[0] * 5), batch(2)
    held = whole(0, 0, 0, read, 0)
    last, depths = long(*[0] * 5), torch.zeros(3, 4, dtype=torch.int32, device=DEVICE)
    catch_up(state, given, drafting, held, wanted, ids, places, last, depths, 3, context)
    assert int(wanted[0]) == expected
    assert int(held[3]) == (6 if expected else read)


def test_a_draft_grows_by_what_was_drawn() -> None:
    state, given = slots(), asked()
    drafting, _ = begun(state, given)
    wanted, (ids, places) = whole(2, 1, 0, 2, 0), batch(1)
    drawn, seen = long(4, 3, 9, 1, 9)[:, None], torch.zeros(5, VOCAB, dtype=torch.int32)
    seen, columns = seen.to(DEVICE), long(*(10 - n for n in range(VOCAB)))
    errors = whole(0, 0, 1, 1, 1)
    arguments = (wanted, drawn, errors, columns, ids, places, seen)
    take(state, given, drafting, 0, *arguments)
    assert drafting.drafts[:, 0].tolist() == [6, 7, -1, -1, -1]
    assert drafting.drafted.tolist() == [1, 1, 0, 0, 0]
    assert drafting.sources.tolist() == [MODEL, MODEL, NONE, NONE, NONE]
    assert drafting.failed.tolist() == [0, 0, 0, 1, 0]
    assert places.widths.tolist() == [1, 0, 0, 0, 0]
    assert (int(ids[0]), int(places.positions[0]), int(places.slots[0])) == (6, 6, 7)
    assert seen.nonzero().tolist() == [[0, 6], [1, 7]]
    take(state, given, drafting, 1, *arguments)  # the failed row draws no more
    assert drafting.drafted.tolist() == [2, 1, 0, 0, 0]
    assert places.widths.tolist() == [0] * 5


def test_the_target_reads_the_last_token_and_the_draft() -> None:
    state, given = slots(), asked()
    drafting, _ = begun(state, given)
    drafting.drafts[0, :2] = whole(8, 9)
    drafting.drafted[0] = 2
    ids, places = batch(5)
    present(state, given, drafting, ids, places)
    assert places.widths.tolist() == [3, 1, 0, 1, 0]
    assert places.positions.tolist() == [5, 3, 0, 2, 0]
    assert places.slots[:2].tolist() == [3, 1]
    assert ids.view(5, 5)[0].tolist() == [10, 8, 9, 0, 0]
    assert int(ids[5]) == 6


def step_over(
    kept: list[list[int]],
    accepted: list[int],
    drafted: list[int],
    errors: list[int],
    eos: tuple[int, ...] = (),
    counts: bool = True,
) -> tuple[Slots, Tensor, list[list[int]]]:
    """State, what a model has read, and records after three rows in slots 3, 1, 0."""
    state = slots(counts)
    given = Asked(*(t[[0, 1, 3, 4]] for t in vars(asked()).values()))
    drafting, _ = begun(state, given, width=3)
    drafting.drafted.copy_(whole(*drafted, 0))
    drafting.sources.copy_(whole(MODEL, LOOKUP, NONE, NONE))
    read = whole(1, 1, 1, 6, 1)
    records = torch.zeros(4, NUM_FIELDS + 4, dtype=torch.int64, device=DEVICE)
    ids = torch.tensor([*kept, [7, 7, 7, 7]], device=DEVICE)
    advance(
        state,
        given,
        drafting,
        ids,
        long(*accepted, 3),
        whole(*errors, 0),
        whole(*eos),
        read,
        records,
    )
    return state, read, records.tolist()


def test_what_was_kept_is_appended() -> None:
    kept = [[8, 8, 1, -1], [5, -1, -1, -1], [9, -1, -1, -1]]
    state, read, records = step_over(kept, [2, 0, 0], [3, 1, 0], [0, 0, 0])
    untouched = slots()
    assert state.lengths.tolist() == [4, 5, 5, 9, 7]
    assert state.left.tolist() == [5, 1, 1, 6, 5]
    assert state.done.tolist() == [0, 0, 0, 0, 1]
    assert state.token_ids[3, 6:9].tolist() == [8, 8, 1]
    assert state.token_ids[1, 4:5].tolist() == [5]
    assert torch.equal(state.token_ids[3, 9:], untouched.token_ids[3, 9:])
    assert torch.equal(state.token_ids[2], untouched.token_ids[2])
    assert state.counts is not None
    assert state.counts.nonzero().tolist() == [[0, 9], [1, 5], [3, 1], [3, 8]]
    assert int(state.counts[3, 8]) == 2
    assert read.tolist() == [1, 1, 1, 8, 1]  # two drafts were right, and read
    first = dict(enumerate(records[0]))
    assert [first[n] for n in (LIMIT, DRAFTED, ACCEPTED, EMITTED)] == [4, 3, 2, 3]
    assert [first[n] for n in (SOURCE, BROKEN, FAILED, LENGTH)] == [MODEL, 0, 0, 6]
    assert [first[n] for n in (OPENED, READ)] == [3, 8]
    assert records[0][NUM_FIELDS:] == [8, 8, 1, -1]
    assert records[3][EMITTED] == 0


def test_all_drafts_right_leave_the_last_one_unread() -> None:
    kept = [[8, 8, 1, 2], [5, -1, -1, -1], [9, -1, -1, -1]]
    _, read, _ = step_over(kept, [3, 0, 0], [3, 1, 0], [0, 0, 0])
    assert int(read[3]) == 8


def test_texts_end_at_eos_and_at_their_budget() -> None:
    kept = [[8, 2, 1, 2], [5, 6, 9, -1], [9, -1, -1, -1]]
    state, _, records = step_over(kept, [3, 2, 0], [3, 2, 0], [0, 0, 0], eos=(1, 2))
    assert state.lengths.tolist() == [4, 6, 5, 8, 7]
    assert state.done.tolist() == [0, 1, 0, 1, 1]
    assert records[0][NUM_FIELDS:] == [8, 2, -1, -1]
    assert records[1][NUM_FIELDS:] == [5, 6, -1, -1]


def test_a_row_without_a_law_ends_with_nothing() -> None:
    kept = [[99, -1, -1, -1], [5, -1, -1, -1], [9, -1, -1, -1]]
    state, _, records = step_over(kept, [0, 0, 0], [0, 0, 0], [1, 0, 0], counts=False)
    assert int(state.lengths[3]) == 6
    assert int(state.done[3]) == 1
    assert (records[0][BROKEN], records[0][EMITTED]) == (1, 0)


PROGRAM = r"""
import kernels.drafts as drafts
import kernels.overlap as overlap
import kernels.step as step
from kernels.step_state import NUM_FIELDS
from kernels.heads import Batch
from kernels.launching import collected, compile_all

cpu = torch.device("cpu")

def ints(*shape): return torch.zeros(shape, dtype=torch.int32)
def longs(*shape): return torch.zeros(shape, dtype=torch.int64)

def launches(rows, most, width, counts, seen, ids, read, moments):
    with collected() as found:
        tokens = ints(8, 128), ints(8), ints(8), ints(8), longs(2, 8)
        slots, asked = step.Slots(*tokens, counts), step.Asked(*(longs(rows) for _ in range(7)))
        drafting = step.Drafting.new(rows, most, cpu)
        place = Batch(ints(rows), ints(rows), ints(rows), width)
        step.begin(slots, asked, drafting, ints(2, rows), longs(rows, 3), moments)
        drafts.keep_found(asked, drafting, ints(2, rows, most), ints(2, rows))
        drafts.catch_up(slots, asked, drafting, ints(8), ints(rows), ints(rows * width), place,
                        longs(rows), ints(3, 4), 3, 700)
        drafts.take(slots, asked, drafting, 1, ints(rows), longs(rows, 1), ints(rows), ids,
                    ints(rows), place, seen)
        step.present(slots, asked, drafting, ints(rows * most + rows), place, moments)
        step.advance(slots, asked, drafting, longs(rows, most + 1), longs(rows), ints(rows),
                     ints(2), read, longs(rows * (NUM_FIELDS + most + 1) + 4), moments)
        step.stamp(longs(4), 1)
    return found

few = launches(1, 1, 2, None, None, None, None, longs(4))
more = launches(3, 4, 8, ints(8, 99), ints(3, 99), longs(20), ints(8), None)
overlap.options = lambda device: {"OVERLAP": 1, "launch_pdl": True}
step.options = drafts.options = overlap.options
last = launches(3, 4, 8, ints(8, 99), ints(3, 99), longs(20), ints(8), longs(4))
assert len(few) == len(more) == len(last) == 7
assert sum("launch_pdl" in one.options and one.options["launch_pdl"] for one in last) == 6
assert compile_all(few + more + last, cpu, 2) >= 13
"""


def test_everything_compiles_for_a_gpu(tmp_path: Path) -> None:
    told_by(PROGRAM, tmp_path)

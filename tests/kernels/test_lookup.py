"""Would catch: an older occurrence preferred to a recent one, a short match to a long one, within a
program's share of the text and between two; a suffix that finds itself, or an end of text beyond
the row's own; a match counted past the text's beginning; a copy that stops where the text does; a
match that is believed though it is shorter than asked for; a row that reads another's slot, or that
is drafted for though nothing was wanted; more tokens than wanted, offered or held; a table that is
asked though the row itself matches, or is not though it does not; slots that host and device reckon
otherwise; a slot that another n-gram has taken; a short n-gram preferred to a long one; a guess
that runs into the next text; a kernel that a GPU has not, or has anew for another table or batch.

Everything here is exact. The host's own lookup (drafters/ngram.py) is the judge.
"""

import json
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor
from translated import told_by

from decode.types import MAX_DRAFT_TOKENS
from drafters.ngram import NgramConfig, NgramDrafter
from drafters.retrieval import RetrievalConfig, RetrievalDrafter
from drafters.retrieval_table import build_table
from kernels import lookup
from kernels.lookup import look_up, look_up_reference
from kernels.ngram_table import Table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Case = tuple[int, int, int, int]  # min_ngram, max_ngram, min_match, max_offer


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several shares of a short text."""
    monkeypatch.setattr(lookup, "BLOCK", 16)


class NoDraws:
    greedy = False

    def draw(self, logits: object) -> int:
        raise AssertionError("a lookup draws nothing")


def on_host(text: list[int], wanted: int, case: Case, table: Table | None) -> list[int]:
    """What the drafter itself proposes."""
    low, high, least, offer = case
    if table is None:
        config = NgramConfig(min_ngram=low, max_ngram=high, max_offer=offer)
        session = NgramDrafter(config).open()
    else:
        remembers = RetrievalConfig(
            min_ngram=low, max_ngram=high, max_offer=offer, longest=table.longest
        )
        session = RetrievalDrafter(remembers, table).open()
    if session.match_length(text) < max(1, least):
        return []
    return session.propose(text, wanted, NoDraws()).token_ids


def placed(texts: list[list[int]], slots: list[int], capacity: int) -> tuple[Tensor, Tensor]:
    """Texts in their slots; all other places hold a token that every text has."""
    ids = torch.zeros(max(slots) + 2, capacity, dtype=torch.int32)
    lengths = torch.zeros(len(ids), dtype=torch.int32)
    for slot, text in zip(slots, texts, strict=True):
        ids[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
        lengths[slot] = len(text)
    return ids, lengths


def found(
    how: object,
    texts: list[list[int]],
    wanted: list[int],
    case: Case,
    most: int,
    capacity: int,
    table: Table | None,
) -> tuple[Tensor, Tensor]:
    assert callable(how)
    slots = random.Random(len(texts)).sample(range(2 * len(texts)), len(texts))
    ints = [torch.tensor(numbers, dtype=torch.int32, device=DEVICE) for numbers in (slots, wanted)]
    drafts = torch.full((len(texts), most), 77, dtype=torch.int32, device=DEVICE)
    num_drafted = torch.full((len(texts),), 77, dtype=torch.int32, device=DEVICE)
    held = [tensor.to(DEVICE) for tensor in placed(texts, slots, capacity)]
    table = table and table.on(torch.device(DEVICE))
    how(*held, *ints, *case, drafts, num_drafted, table)
    return drafts, num_drafted


def check(
    texts: list[list[int]],
    wanted: list[int],
    case: Case,
    most: int,
    capacity: int,
    table: Table | None = None,
) -> int:
    """Host, reference and kernel alike; how many rows were drafted for."""
    drafts, num_drafted = found(look_up, texts, wanted, case, most, capacity, table)
    slow = found(look_up_reference, texts, wanted, case, most, capacity, table)
    assert torch.equal(drafts, slow[0])
    assert torch.equal(num_drafted, slow[1])
    for text, asked, row, count in zip(
        texts, wanted, drafts.tolist(), num_drafted.tolist(), strict=True
    ):
        guess = on_host(text, min(asked, most), case, table)
        assert row == guess + [-1] * (most - len(guess)), (text, asked, case)
        assert count == len(guess)
    return int((num_drafted > 0).sum())


def some_text(chance: random.Random, longest: int) -> list[int]:
    """Random over a few tokens, periodic, or periodic but for one token."""
    length, letters = chance.randint(0, longest), chance.randint(1, 4)
    text = [chance.randrange(letters) for _ in range(length)]
    if length and chance.random() < 0.5:
        period = chance.randint(1, length)
        text = [text[i % period] for i in range(length)]
        if chance.random() < 0.5:
            text[chance.randrange(length)] = 9
    return text


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.usefixtures("small_blocks")
def test_the_device_proposes_what_the_host_proposes(seed: int) -> None:
    chance = random.Random(seed)
    low = chance.randint(1, 3)
    high = low + chance.randint(0, 4)
    case = low, high, chance.randint(0, high + 1), chance.randint(1, MAX_DRAFT_TOKENS)
    texts = [some_text(chance, 40) for _ in range(16)]
    wanted = [chance.choice([0, 1, 3, MAX_DRAFT_TOKENS]) for _ in texts]
    check(texts, wanted, case, chance.choice([1, 5, 16]), 40)


@pytest.mark.usefixtures("small_blocks")
def test_the_cases_that_the_rule_speaks_of() -> None:
    texts = [
        [1, 2, 3, 10, 9, 3, 20, 1, 2, 3],  # a long match before a recent short one
        [1, 2, 10, 1, 2, 20, 1, 2],  # two alike
        [7, 1, 2, 1, 2, 1],  # overlapping
        [4, 4],
        [4],
        [],
        [5, 6, 7],  # nothing twice
        [8, *range(20, 50), 8],  # the occurrence in the first share, the suffix in the last
    ]
    assert check(texts, [8] * len(texts), (1, 3, 0, 8), 8, 48) == 5
    assert check(texts, [8] * len(texts), (1, 3, 3, 8), 8, 48) == 2
    assert check(texts, [0] * len(texts), (1, 3, 0, 8), 8, 48) == 0


def test_a_long_text_in_whole_blocks() -> None:
    """Of the size that a program really takes; the only occurrence lies across two of them."""
    chance = random.Random(0)
    text = [chance.randrange(1000, 9000) for _ in range(2600)]
    text[1022:1027] = text[-5:] = [1, 2, 3, 4, 5]
    assert check([text, text[:2500]], [4, 4], (2, 5, 5, 4), 4, 4096) == 1


def test_more_shares_than_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "BLOCK", 2)
    texts = [[5, 6, *range(10, 140), 5, 6], [*range(10, 140), 5, 6, 8, 5, 6]]
    assert check(texts, [3, 3], (1, 3, 2, 3), 3, 150) == 2


def some_row(chance: random.Random, corpus: list[list[int]], letters: int) -> list[int]:
    """Part of a corpus, after tokens that may repeat it or be new."""
    text = chance.choice(corpus) if corpus else []
    start = chance.randint(0, len(text))
    row = text[start : chance.randint(start, len(text))]
    before = [chance.choice([100, 101, 102, chance.randrange(letters)]) for _ in range(3)]
    return before[: chance.randint(0, 3)] + row


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.usefixtures("small_blocks")
def test_the_device_recalls_what_the_host_recalls(seed: int) -> None:
    """Few slots, so that n-grams share them; short texts, so that guesses end early."""
    chance = random.Random(seed)
    letters, longest = chance.choice([3, 20, 90]), chance.randint(1, 5)
    corpus = [
        [chance.randrange(letters) for _ in range(chance.randint(0, 12))]
        for _ in range(chance.choice([0, 3, 30]))
    ]
    table = build_table(corpus, longest, chance.choice([1, 3, 8]))
    low = chance.randint(1, 3)
    case = low, low + chance.randint(0, 2), chance.randint(0, 3), chance.randint(1, 8)
    texts = [some_row(chance, corpus, letters) for _ in range(16)]
    wanted = [chance.choice([0, 1, 3, MAX_DRAFT_TOKENS]) for _ in texts]
    check(texts, wanted, case, chance.choice([1, 5, 16]), 40, table)


def test_the_row_itself_comes_first_and_then_the_longest_n_gram() -> None:
    corpus = [[1, 2, 3, 4, 5], [9, 2, 7, 8], [9, 2, 7, 8], [60, 200_000, 61]]
    table = build_table(corpus, 3, 12)
    texts = [
        [2, 30, 2],  # its own text says 30
        [1, 2],  # two tokens agree: 3, where one alone would say 7
        [50, 2],  # one agrees
        [9, 2, 7, 8],  # nothing follows
        [50, 51],  # nowhere
        [],
        [60],  # an id past 16 bits, and the end of a text behind it
        [7, 60, 200_000],
    ]
    assert check(texts, [4] * len(texts), (1, 3, 0, 8), 4, 48, table) == 5
    assert check(texts, [4] * len(texts), (1, 3, 2, 8), 4, 48, table) == 2
    assert check(texts, [0] * len(texts), (1, 3, 0, 8), 4, 48, table) == 0
    drafts, num_drafted = found(look_up, texts, [4] * 8, (1, 3, 0, 8), 4, 48, table)
    assert drafts[:3].tolist() == [[30, 2, 30, 2], [3, 4, 5, -1], [7, 8, -1, -1]]
    assert num_drafted.tolist() == [4, 3, 2, 0, 0, 0, 2, 1]


def test_a_match_too_short_to_be_believed_is_still_the_rows_own() -> None:
    """Below min_match nothing is proposed; below min_ngram it is none, and the table is asked."""
    table = build_table([[1, 2, 3, 4]], 3, 10)
    texts = [[2, 30, 1, 2], [1, 2]]
    assert check(texts, [4, 4], (1, 3, 2, 8), 4, 48, table) == 1
    assert check(texts, [4, 4], (2, 3, 2, 8), 4, 48, table) == 2


def test_a_table_of_nothing() -> None:
    table = build_table([], 4, 1)
    assert check([[1, 2], [], [3, 3]], [3, 3, 3], (1, 3, 0, 8), 3, 16, table) == 1


PROGRAM = r"""
import json
import kernels.overlap
from kernels.launching import collected, compile_all
from kernels.lookup import look_up
from kernels.ngram_table import Table

kernels.overlap.capability = lambda device: (9, 0)
kernels.overlap.use("launch")

def ints(*shape):
    return torch.zeros(shape, dtype=torch.int32)

def launches(batch, table, min_match):
    rows = [ints(8, 4096), ints(8), ints(batch).long(), ints(batch)]
    with collected() as found:
        look_up(*rows, 1, 3, min_match, 10, ints(batch, 5), ints(batch), table)
    return found

tables = [Table(ints(size), ints(4, 256)) for size in (1000, 1601)]
cases = {
    "none": [launches(b, None, 1) for b in (1, 64)],
    "tables": [launches(b, table, 1) for b in (1, 64) for table in tables],
    "believed": [launches(1, tables[0], 2)],
}
told = {name: compile_all(sum(of, []), torch.device("cpu"), 2) for name, of in cases.items()}
told["loads"] = [
    one.kernel.warmup(*one.args, grid=one.grid, **one.options).asm["ptx"].count("ld.global")
    for of in ("none", "tables") for one in cases[of][0][1:]
]
print(json.dumps(told))
"""


def test_it_compiles_for_a_gpu_once_for_all_tables_and_batches(tmp_path: Path) -> None:
    told = json.loads(told_by(PROGRAM, tmp_path))
    assert (told["none"], told["tables"], told["believed"]) == (2, 2, 2)
    without, with_table = told["loads"]
    assert without < with_table  # nothing of a table is looked for where there is none

"""Would catch: an older occurrence preferred to a recent one, a short match to a long one, within a
program's share of the text and between two; a suffix that finds itself, or an end of text beyond
the row's own; a match counted past the text's beginning; a copy that stops where the text does; a
match that is believed though it is shorter than asked for; a row that reads another's slot, or that
is drafted for though nothing was wanted; more tokens than wanted, offered or held.

Everything here is exact. The host's own lookup (drafters/ngram.py) is the judge.
"""

import random

import pytest
import torch
from torch import Tensor

from decode.types import MAX_DRAFT_TOKENS
from drafters.ngram import NgramConfig, NgramDrafter
from kernels import lookup
from kernels.lookup import look_up, look_up_reference

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


def on_host(text: list[int], wanted: int, case: Case) -> list[int]:
    """What the drafter itself proposes."""
    low, high, least, offer = case
    config = NgramConfig(min_ngram=low, max_ngram=high, max_offer=offer)
    session = NgramDrafter(config).open()
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
    how: object, texts: list[list[int]], wanted: list[int], case: Case, most: int, capacity: int
) -> tuple[Tensor, Tensor]:
    assert callable(how)
    slots = random.Random(len(texts)).sample(range(2 * len(texts)), len(texts))
    ints = [torch.tensor(numbers, dtype=torch.int32, device=DEVICE) for numbers in (slots, wanted)]
    drafts = torch.full((len(texts), most), 77, dtype=torch.int32, device=DEVICE)
    num_drafted = torch.full((len(texts),), 77, dtype=torch.int32, device=DEVICE)
    held = [tensor.to(DEVICE) for tensor in placed(texts, slots, capacity)]
    how(*held, *ints, *case, drafts, num_drafted)
    return drafts, num_drafted


def check(texts: list[list[int]], wanted: list[int], case: Case, most: int, capacity: int) -> int:
    """Host, reference and kernel alike; how many rows were drafted for."""
    drafts, num_drafted = found(look_up, texts, wanted, case, most, capacity)
    slow = found(look_up_reference, texts, wanted, case, most, capacity)
    assert torch.equal(drafts, slow[0])
    assert torch.equal(num_drafted, slow[1])
    for text, asked, row, count in zip(
        texts, wanted, drafts.tolist(), num_drafted.tolist(), strict=True
    ):
        guess = on_host(text, min(asked, most), case)
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

"""Would catch: an older occurrence preferred to a recent one, a short match to a long one; a suffix
that finds itself; a copy that stops at the end of the text; an index that keeps n-grams of tokens
that were taken back, or loses the older occurrence that they had replaced.

Everything here is exact.
"""

import random
from pathlib import Path

import pytest

from decode.types import Sampling
from drafters.base import common_prefix
from drafters.ngram import Match, NgramConfig, NgramDrafter, NgramIndex, continuation
from drafters.ngram import from_pretrained as load_ngram

CONFIG = NgramConfig(min_ngram=1, max_ngram=3, max_offer=8)


def brute_force(tokens: list[int], min_ngram: int, max_ngram: int) -> Match | None:
    """The rule, read aloud: longest first, then the occurrence that ends last before the end."""
    for n in range(max_ngram, min_ngram - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[len(tokens) - n :]:
                return Match(end, n)
    return None


def propose(tokens: list[int], config: NgramConfig = CONFIG, asked: int = 8) -> list[int]:
    class NoDraws:
        greedy = False

        def draw(self, logits: object) -> int:
            raise AssertionError("a lookup draws nothing")

    return NgramDrafter(config).open().propose(tokens, asked, NoDraws()).token_ids


def test_the_longest_match_wins_over_a_more_recent_short_one() -> None:
    assert propose([1, 2, 3, 10, 9, 3, 20, 1, 2, 3], asked=1) == [10]


def test_the_most_recent_of_equal_matches_wins() -> None:
    assert propose([1, 2, 10, 1, 2, 20, 1, 2], asked=1) == [20]


def test_an_occurrence_may_overlap_the_suffix_and_its_copy_goes_on() -> None:
    assert propose([7, 1, 2, 1, 2, 1], asked=5) == [2, 1, 2, 1, 2]
    assert propose([4, 4], asked=3) == [4, 4, 4]
    assert propose([1, 2, 3, 1, 2, 3, 1], asked=7) == [2, 3, 1, 2, 3, 1, 2]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3]])
def test_without_an_earlier_occurrence_nothing_is_offered(tokens: list[int]) -> None:
    assert NgramDrafter(CONFIG).open().offer(tokens) == 0
    assert propose(tokens) == []


def test_shorter_matches_than_the_minimum_do_not_count() -> None:
    config = NgramConfig(min_ngram=2, max_ngram=3, max_offer=4)
    assert propose([1, 2, 9, 2], config) == []
    assert propose([1, 2, 9, 1, 2], config) == [9, 1, 2, 9]


@pytest.mark.parametrize("seed", range(30))
def test_the_index_finds_what_a_scan_finds_after_any_changes(seed: int) -> None:
    chance = random.Random(seed)
    low = chance.randint(1, 3)
    high = low + chance.randint(0, 3)
    index, text = NgramIndex(low, high), []
    for _ in range(60):
        text = text[: chance.randint(0, len(text))] if chance.random() < 0.3 else list(text)
        text += [chance.randrange(3) for _ in range(chance.randrange(5))]
        index.become(text)
        assert index.tokens == text
        assert index.match() == brute_force(text, low, high)


def test_taking_everything_back_leaves_nothing_behind() -> None:
    index = NgramIndex(1, 4)
    index.become([1, 2, 1, 2, 1, 2, 3])
    index.become([])
    assert index._last == {}
    assert index._undo == []


def test_a_copy_equals_appending_token_by_token() -> None:
    tokens, match = [5, 1, 2, 3, 1, 2], Match(3, 2)
    grown = list(tokens)
    for i in range(9):
        grown.append(grown[match.end + i])
    assert continuation(tokens, match, 9) == grown[6:]


@pytest.mark.parametrize("seed", range(5))
def test_score_replays_the_lookups(seed: int) -> None:
    """A periodic-ish text, so that hits, misses and silence all occur."""
    chance = random.Random(seed)
    text = [chance.randrange(4) for _ in range(40)] + [9, 8]
    text += [chance.randrange(4) for _ in range(20)]
    drafter, prompt = NgramDrafter(CONFIG), 11
    accept = drafter.score(text, prompt, None, Sampling(temperature=0.7), 10)
    assert drafter.match_lengths(text, prompt) == [
        match.length if (match := brute_force(text[:here], 1, 3)) else 0
        for here in range(prompt, len(text))
    ]
    for start, row in enumerate(accept.tolist()):
        here = prompt + start
        guess = propose(text[:here]) if brute_force(text[:here], 1, 3) else []
        wanted = [float(g == t) for g, t in zip(guess, text[here:], strict=False)]
        assert row[: len(wanted)] == wanted
        assert all(value != value for value in row[len(wanted) :])
    assert {0.0, 1.0} <= set(accept[accept.isfinite()].tolist())
    assert accept[:, 0].isnan().any()


@pytest.mark.parametrize(
    "changes", [{"min_ngram": 0}, {"min_ngram": 4}, {"max_offer": 0}, {"max_offer": 17}]
)
def test_impossible_settings_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must lie between"):
        NgramConfig(**{"min_ngram": 1, "max_ngram": 3, "max_offer": 8, **changes})


def test_saved_and_loaded_by_name(tmp_path: Path) -> None:
    NgramDrafter(CONFIG).save(tmp_path)
    assert load_ngram(str(tmp_path), None).config == CONFIG
    assert load_ngram("ngram", None).config.max_ngram >= 1
    with pytest.raises(ValueError, match=r"drafter\.json does not exist"):
        load_ngram(str(tmp_path / "nowhere"), None)


@pytest.mark.parametrize("seed", range(5))
def test_common_prefix_of_random_lists(seed: int) -> None:
    chance = random.Random(seed)
    left = [chance.randrange(2) for _ in range(chance.randrange(20))]
    right = left[: chance.randint(0, len(left))] + [chance.randrange(2) for _ in range(5)]
    wanted = next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )
    assert common_prefix(left, right) == wanted

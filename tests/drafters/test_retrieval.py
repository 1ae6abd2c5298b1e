"""Would catch: a table that counts n-grams across the end of a text, prefers a rarer or an earlier
next token, or lets a rare n-gram push out a frequent one; a place that another n-gram has filled
and that is believed; a row's own text passed over; a guess that goes on into the next text; a score
that is not what decoding would propose; a file that is torn, foreign or of another vocabulary and
is read.

Everything here is exact. Dictionaries of tuples are the judge of the table.
"""

import json
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from decode.device.members import Members
from decode.device.parts import DeviceLookup, DeviceModel, DeviceParts
from decode.types import Sampling
from drafters.base import BuildContext, TargetParts
from drafters.checkpoint import save_drafter
from drafters.composite import CompositeConfig
from drafters.ngram import NgramConfig, NgramDrafter
from drafters.retrieval import RetrievalConfig, RetrievalDrafter, from_pretrained
from drafters.retrieval_table import TABLE, Table, build_table
from kernels.ngram_table import FACTOR, FIRST
from kernels.step_state import LOOKUP

CONFIG = RetrievalConfig(min_ngram=1, max_ngram=3, max_offer=5, longest=3)
TEXTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [20, 2, 30], [20, 2, 31], [40, 2, 30]]
TARGET = SimpleNamespace(vocab_size=50)


class NoDraws:
    greedy = False

    def draw(self, logits: object) -> int:
        raise AssertionError("a lookup draws nothing")


def propose(drafter: NgramDrafter, tokens: list[int], asked: int = 8) -> list[int]:
    session = drafter.open()
    guess = session.propose(tokens, asked, NoDraws()).token_ids
    assert len(guess) == min(asked, session.offer(tokens))
    return guess


def drafter_of(
    texts: Sequence[Sequence[int]] = TEXTS, bits: int = 12, config: RetrievalConfig = CONFIG
) -> RetrievalDrafter:
    return RetrievalDrafter(config, build_table(texts, config.longest, bits))


def slot_of(gram: Sequence[int], bits: int) -> int:
    """As the module says it, with whole numbers of any size."""
    factors = [FIRST * FACTOR**j for j in range(len(gram))]
    total = sum(token * factor for token, factor in zip(reversed(gram), factors, strict=True))
    return total % 2**32 >> (32 - bits)


def by_dictionaries(texts: Sequence[Sequence[int]], longest: int, bits: int) -> Table:
    held = [-1]
    for text in texts:
        held += [*text, -1]
    places = torch.zeros(longest, 2**bits, dtype=torch.int32)
    for n in range(1, longest + 1):
        following: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        last: dict[tuple[tuple[int, ...], int], int] = {}
        for place in range(n, len(held)):
            gram, token = tuple(held[place - n : place]), held[place]
            if -1 not in (*gram, token):
                following[gram][token] += 1
                last[gram, token] = place
        best: dict[int, tuple[int, int]] = {}
        for gram, counts in following.items():
            _, place = max((count, last[gram, token]) for token, count in counts.items())
            slot = slot_of(gram, bits)
            best[slot] = max(best.get(slot, (0, 0)), (counts.total(), place))
        for slot, (_, place) in best.items():
            places[n - 1, slot] = place
    return Table(torch.tensor(held, dtype=torch.int32), places)


def some_texts(chance: random.Random, letters: int) -> list[list[int]]:
    ids = [chance.randrange(200_000) for _ in range(letters)]
    return [
        [chance.choice(ids) for _ in range(chance.randint(0, 15))]
        for _ in range(chance.randint(0, 20))
    ]


@pytest.mark.parametrize("seed", range(30))
def test_the_table_is_what_counting_one_by_one_gives(seed: int) -> None:
    chance = random.Random(seed)
    texts, longest = some_texts(chance, chance.choice([2, 5, 40])), chance.randint(1, 8)
    bits = chance.choice([1, 2, 6, 14])
    table, wanted = build_table(iter(texts), longest, bits), by_dictionaries(texts, longest, bits)
    assert torch.equal(table.texts, wanted.texts)
    assert torch.equal(table.places, wanted.places)
    assert (table.longest, table.bits) == (longest, bits)
    assert table.num_bytes == 4 * (len(table.texts) + longest * 2**bits)


@pytest.mark.parametrize("seed", range(20))
def test_it_finds_the_longest_n_gram_that_is_there(seed: int) -> None:
    chance = random.Random(seed)
    texts, bits = some_texts(chance, chance.choice([2, 9])), chance.choice([2, 12])
    table = build_table(texts, 4, bits)
    held = table.texts.tolist()
    for _ in range(40):
        text = chance.choice(texts) if texts else []
        text = text[: chance.randint(0, len(text))]
        found = (0, 0)
        for n in range(min(4, len(text)), 0, -1):
            place = int(table.places[n - 1, slot_of(text[-n:], bits)])
            if place and held[place - n : place] == text[-n:]:
                found = n, place
                break
        assert table.find(text) == found


def test_the_row_itself_comes_first() -> None:
    drafter = drafter_of()
    assert propose(drafter, [2, 45, 2]) == [45, 2, 45, 2, 45]
    assert propose(drafter, [2]) == [30]  # the commonest; 3 and 31 follow once each
    assert propose(drafter, [20, 2]) == [31]  # as often as 30, and later
    assert propose(drafter, [1, 2]) == [3, 4, 5, 6, 7]
    assert propose(drafter, [1, 2], 2) == [3, 4]
    assert propose(drafter, [6, 7]) == [8, 9]  # the text ends
    for nothing in ([], [9], [30], [49]):
        assert propose(drafter, nothing) == []


def test_without_a_table_it_is_a_lookup() -> None:
    bare = CONFIG.build(BuildContext(TargetParts(torch.nn.Module(), None, 50, "none")))
    plain = NgramDrafter(NgramConfig(min_ngram=1, max_ngram=3, max_offer=5))
    for text in ([1, 2], [2, 45, 2], [], [3, 3]):
        assert propose(bare, text) == propose(plain, text)
    assert bare.on_device().lookup == plain.on_device().lookup
    assert bare.memory_bytes == 0


@pytest.mark.parametrize("seed", range(5))
def test_score_replays_what_would_be_proposed(seed: int) -> None:
    chance = random.Random(seed)
    drafter, prompt = drafter_of(), 4
    text = [chance.randrange(50) for _ in range(10)] + chance.choice(TEXTS) + [45, *TEXTS[0]]
    accept = drafter.score(text, prompt, None, Sampling(temperature=0.7), 4)
    for start, row in enumerate(accept.tolist()):
        here = prompt + start
        guess = propose(drafter, text[:here], 4)
        wanted = [float(g == t) for g, t in zip(guess, text[here:], strict=False)]
        assert row[: len(wanted)] == wanted
        assert all(value != value for value in row[len(wanted) :])
    assert {0.0, 1.0} <= set(accept[accept.isfinite()].tolist())


def test_the_device_gets_the_table_once() -> None:
    drafter = drafter_of()
    assert drafter.on_device() is drafter.on_device()
    assert drafter.on_device().lookup == DeviceLookup(1, 3, 5, 1, drafter.table)
    assert drafter.on_device().lookup != drafter_of().on_device().lookup
    assert hash(drafter.on_device().lookup) == hash(drafter.device_lookup(1))
    assert len(repr(drafter.on_device().lookup)) < 300  # steps are ordered by it, at every step
    assert drafter.memory_bytes == drafter.table.num_bytes


def test_on_the_device_a_composites_table_is_its_members() -> None:
    drafter, other = drafter_of(), drafter_of()
    plain = NgramDrafter(NgramConfig(min_ngram=1, max_ngram=3, max_offer=5))
    with_model = DeviceParts(drafter.device_lookup(2), cast("DeviceModel", object()))
    lookups = {"plain": plain.on_device(), "other": other.on_device(), "ours": drafter.on_device()}
    assert Members.of({**lookups, "both": with_model}).source("both", LOOKUP) == "ours"


def test_a_composite_believes_the_table_as_it_believes_the_row() -> None:
    lookup, model = drafter_of(), drafter_of([[5, 33]])
    config = CompositeConfig(lookup="lookup", model="model", min_match=2)
    target = TargetParts(torch.nn.Module(), None, 50, "none")
    drafter = config.build(BuildContext(target, parts={"lookup": lookup, "model": model}))
    session = drafter.open()
    for text, source, guess in (
        ([1, 2], "lookup", [3, 4, 5]),  # two tokens agree with the corpus
        ([2], "model", []),  # one alone
        ([45, 5], "model", [33]),
        ([1, 45, 1], "model", [45, 1, 45]),  # one of the row's own
    ):
        found = session.propose(text, 3, NoDraws())
        assert (found.source, found.token_ids) == (source, guess)
    assert drafter.believed([1, 2, 3, 45], 1).tolist() == [False, True, True]
    assert lookup.device_lookup(2) == DeviceLookup(1, 3, 5, 2, lookup.table)


def test_saved_and_loaded(tmp_path: Path) -> None:
    drafter = drafter_of()
    drafter.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter.json", TABLE]
    parts = TargetParts(torch.nn.Module(), None, 50, "none")
    for loaded in (
        from_pretrained(str(tmp_path), TARGET),
        CONFIG.build(BuildContext(parts, weights=tmp_path)),
    ):
        assert loaded.config == CONFIG
        assert torch.equal(loaded.table.texts, drafter.table.texts)
        assert torch.equal(loaded.table.places, drafter.table.places)
    RetrievalDrafter(CONFIG, None).save(tmp_path / "bare")
    assert from_pretrained(str(tmp_path / "bare"), TARGET).table is None


def changed(folder: Path, **tensors: torch.Tensor) -> None:
    """Another table under a digest of its own."""
    held = load_file(folder / TABLE) | tensors
    save_drafter(folder, "retrieval", {"config": vars(CONFIG)}, held, TABLE)


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    drafter = drafter_of()

    def refused(told: str, vocab_size: int = 50) -> None:
        with pytest.raises(ValueError, match=told):
            from_pretrained(str(tmp_path), SimpleNamespace(vocab_size=vocab_size))

    refused(r"drafter\.json does not exist")
    drafter.save(tmp_path)
    refused("holds token 40, but the target knows 40; build the table from answers", 40)
    (tmp_path / TABLE).write_bytes((tmp_path / TABLE).read_bytes()[:-1])
    refused("damaged, truncated or replaced.*make the drafter again")
    drafter.save(tmp_path)
    (tmp_path / TABLE).unlink()
    refused("does not exist; make the drafter")
    drafter.save(tmp_path)
    places = drafter.table.places
    changed(tmp_path, places=torch.full_like(places, 1000))
    refused("points outside its texts; delete .* and build the table again")
    changed(tmp_path, places=torch.full_like(places, len(TEXTS[0]) + 1))
    refused("points behind an end of a text")
    changed(tmp_path, places=places[:, :-1].contiguous())
    refused("a power of two; build the table again")
    changed(tmp_path, places=places.long())
    refused("must be int32 tensors")
    changed(tmp_path, places=places[:2].contiguous())
    refused("up to 2 tokens, but longest=3")
    changed(tmp_path, more=places)
    refused(r"and not texts and places")
    save_file({"texts": places}, tmp_path / TABLE)
    refused("damaged, truncated or replaced")
    description = json.loads((tmp_path / "drafter.json").read_text())
    for foreign, told in (({"kind": "ngram"}, "describes kind 'ngram'"), ({"config": {}}, "other")):
        (tmp_path / "drafter.json").write_text(json.dumps(description | foreign))
        refused(told)


@pytest.mark.parametrize("changes", [{"longest": 0}, {"longest": 9}, {"min_ngram": 4}])
def test_impossible_settings_are_refused(changes: dict[str, int]) -> None:
    settings = {"min_ngram": 1, "max_ngram": 3, "max_offer": 8, "longest": 4}
    with pytest.raises(ValueError, match="must lie between"):
        RetrievalConfig(**{**settings, **changes})


@pytest.mark.parametrize(("longest", "bits"), [(0, 8), (9, 8), (4, 0), (4, 29)])
def test_impossible_tables_are_refused(longest: int, bits: int) -> None:
    with pytest.raises(ValueError, match="for example longest=4 bits=20"):
        build_table([], longest, bits)
    with pytest.raises(ValueError, match="token ids from -1 to 1 must lie between"):
        build_table([[1, -1]], 2, 2)


def test_another_longest_than_the_tables_is_refused() -> None:
    with pytest.raises(ValueError, match="set it to 2"):
        RetrievalDrafter(CONFIG, build_table(TEXTS, 2, 4))

"""Bugs these tests would catch: EOS or a stop string inside an accepted run that is decoded past; a
stop string missed because it crosses tokens, steps or a half character; text that goes on after it;
token ids that stop short of it or run on; a stream that shows half a character, or the beginning of
a stop string, or that joins to another text than generate() returns; an ending with two names.

Everything is exact. Texts are long random ones over pieces of one to four bytes that cut characters
in half, so that streams begin and end anywhere.
"""

import random

import pytest
from fakes import FakeDrafter, FakeTarget, FakeTokenizer, ScriptedPolicy, whole_prefix

from decode import Sampling, SpeculativeDecoder
from decode.clock import VirtualClock
from decode.stopping import HALF, Stopper

WAVE = "\N{WAVE DASH}".encode()  # three bytes
FACE = "\N{GRINNING FACE}".encode()  # four bytes
PIECES = [
    *(bytes([c]) for c in b"abc .\n"),
    b"ab",
    b" the",
    WAVE,
    WAVE[:1],
    WAVE[1:2],
    WAVE[2:],
    FACE[:2],
    FACE[2:],
    b"<eos>",
]
EOS = len(PIECES) - 1
TOKENIZER = FakeTokenizer(PIECES, special=[EOS])


def stopper(stop: list[str], max_new_tokens: int = 1000, max_context: int = 2000) -> Stopper:
    return Stopper(
        tokenizer=TOKENIZER,
        stop=stop,
        eos_token_ids=frozenset([EOS]),
        max_new_tokens=max_new_tokens,
        num_prompt_tokens=3,
        max_context=max_context,
        follow_text=True,
    )


def ids(text: str) -> list[int]:
    return [PIECES.index(bytes([byte])) for byte in text.encode()]


def test_each_ending_has_one_name_and_its_own_tokens() -> None:
    eos = stopper([])
    assert eos.push([*ids("ab"), EOS, *ids("c")]) == 3
    assert (eos.finish_reason, eos.token_ids, eos.text()) == ("eos", [*ids("ab"), EOS], "ab")
    length = stopper([], max_new_tokens=2)
    assert length.push(ids("abc")) == 2
    assert (length.finish_reason, length.text()) == ("length", "ab")
    context = stopper([], max_context=3 + 4)
    assert context.push(ids("abcabc")) == 4
    assert (context.finish_reason, context.text()) == ("context", "abca")
    stop = stopper(["ca"], max_new_tokens=4)  # completed by the last token there is room for
    assert stop.push(ids("abcab")) == 4
    assert (stop.finish_reason, stop.token_ids, stop.text()) == ("stop", ids("abca"), "ab")
    both = stopper([], max_new_tokens=1)
    both.push([EOS])
    assert (both.finish_reason, both.text()) == ("eos", "")


def test_drafts_leave_room_for_the_last_token() -> None:
    rows = stopper([], max_new_tokens=5), stopper([], max_context=3 + 5)
    for row in rows:
        assert row.most_draft_tokens == 4
        row.push(ids("abc"))
        assert row.most_draft_tokens == 1
        row.push(ids("a"))
        assert row.most_draft_tokens == 0


@pytest.mark.parametrize("run", [1, 2, 5, 50])
def test_a_stop_string_is_found_across_tokens_and_steps(run: int) -> None:
    tokens = ids("abc .\nabc.")
    row = stopper(["c .\na", "nothing"])
    taken = 0
    while row.finish_reason is None:
        taken += row.push(tokens[taken : taken + run])
    assert row.token_ids == ids("abc .\na")
    assert row.text() == "ab"


def test_a_stop_string_inside_one_token_cuts_the_text_inside_it() -> None:
    row = stopper([" t"])
    assert row.push([0, PIECES.index(b" the"), 0]) == 2
    assert row.text() == "a"


def test_the_stop_string_that_begins_first_cuts() -> None:
    row = stopper(["he", " t"])
    row.push([0, PIECES.index(b" the")])
    assert row.text() == "a"


def test_a_stop_string_before_half_a_character_is_not_missed() -> None:
    """The half may stay pending for long; the stop string before it counts at once."""
    row = stopper(["b"])
    assert row.push([*ids("a"), PIECES.index(WAVE[:1])]) == 2
    assert row.finish_reason is None
    row = stopper([WAVE.decode()])
    halves = [PIECES.index(WAVE[i : i + 1]) for i in range(3)]
    assert row.push([*halves, *ids("a")]) == 3
    assert (row.finish_reason, row.text()) == ("stop", "")


@pytest.mark.parametrize("seed", range(40))
def test_chunks_join_to_the_text_and_never_show_too_much(seed: int) -> None:
    rng = random.Random(seed)
    stops = rng.choice([[], ["ab."], [".\n", "a a"], [WAVE.decode(), "a" + HALF]])
    row, shown = stopper(stops, max_new_tokens=120), ""
    while row.finish_reason is None:
        row.push(
            [rng.randrange(len(PIECES) - (rng.random() < 0.98)) for _ in range(rng.randrange(1, 6))]
        )
        shown += row.take()
    assert shown == row.text()  # what was shown too early cannot be taken back, so it would differ
    assert row.take() == ""
    kept = row.token_ids[:-1] if row.finish_reason == "eos" else row.token_ids
    whole = TOKENIZER.decode(kept, skip_special_tokens=True)
    assert whole.startswith(shown)
    assert (whole == shown) == (row.finish_reason != "stop")


@pytest.mark.parametrize("seed", range(6))
def test_streamed_and_generated_texts_are_the_same(seed: int) -> None:
    """Through the decoder: accepted runs, endings inside them, chunks of several tokens."""
    context = whole_prefix(len(PIECES), sharpness=1.5)
    pool = {"same": FakeDrafter(whole_prefix(len(PIECES), sharpness=1.5))}
    target = FakeTarget(context, len(PIECES), eos_token_ids=[EOS], max_context=200)

    def decoder() -> SpeculativeDecoder:
        policy = ScriptedPolicy([("same", 4), ("off", 0), ("same", 9)])
        return SpeculativeDecoder(target, pool, policy, clock=VirtualClock(), tokenizer=TOKENIZER)

    law = Sampling(temperature=1.0, seed=seed)
    stop = [".a", "b" + WAVE.decode()]
    whole = decoder().generate([[1, 2]], 60, law, stop)
    chunks = list(decoder().stream([1, 2], 60, law, stop))
    assert "".join(chunk.text for chunk in chunks) == whole.texts[0]
    assert [t for chunk in chunks for t in chunk.token_ids] == whole.token_ids[0]
    assert [c.num_accepted for c in chunks] == [r.num_accepted for r in whole.records[0]]
    assert chunks[-1].metrics == whole.metrics[0]
    assert chunks[-1].finish_reason == whole.metrics[0].finish_reason
    assert all(c.finish_reason is None and c.metrics is None for c in chunks[:-1])
    assert sum(r.num_accepted for r in whole.records[0]) > 0


@pytest.mark.parametrize("ending", ["eos", "stop"])
def test_endings_inside_an_accepted_run_equal_plain_decoding(ending: str) -> None:
    """The drafter is right, so the ending arrives in the middle of an accepted draft."""
    context = whole_prefix(len(PIECES))
    tokens = [3]
    for _ in range(40):
        tokens.append(int(context(tokens).argmax()))
    end = tokens[10]
    first = tokens.index(end, 1)
    eos = [end] if ending == "eos" else []
    stop = (
        [PIECES[end].decode()] if ending == "stop" and HALF not in TOKENIZER.decode([end]) else []
    )
    if ending == "stop":
        assert stop, "the token must be whole text; choose another prompt"
    results = []
    for choices in ([("same", 16)], [("off", 0)]):
        target = FakeTarget(context, len(PIECES), eos_token_ids=eos)
        pool = {"same": FakeDrafter(context)}
        decoder = SpeculativeDecoder(target, pool, ScriptedPolicy(choices), tokenizer=TOKENIZER)
        results.append(decoder.generate([3], 40, stop=stop))
    drafted, plain = results
    assert drafted.token_ids == plain.token_ids
    assert drafted.texts == plain.texts
    assert drafted.metrics[0].finish_reason == plain.metrics[0].finish_reason == ending
    if ending == "eos":
        assert drafted.token_ids[0] == tokens[1 : first + 1]
    assert drafted.metrics[0].num_target_passes == 1
    assert drafted.records[0][0].num_emitted < drafted.records[0][0].num_accepted + 1

"""Would catch: a span shifted by a token, or longer than K, than what was offered or than what was
accepted; the token after a draft counted as drafted; text lost, doubled or torn inside a character;
a refusal not told from a draft that was accepted whole; more prompts or drafters than asked for.
"""

from typing import Any

import numpy as np
import pytest
import torch

from decode.types import Sampling
from pipeline import spans
from pipeline.answers import Answer
from pipeline.replay import Case, arm_totals
from pipeline.spans import ACCEPTED, REFUSED, TARGET, merged, samples, texts_between, walk

NAN = np.nan


def case(
    accept: dict[str, list[list[float]]],
    prompt: str = "p",
    domain: str = "chat",
    law: str = "greedy",
) -> Case:
    arrays = {name: np.array(rows, dtype=np.float64) for name, rows in accept.items()}
    num_tokens = len(next(iter(arrays.values())))
    sampling = Sampling(temperature=0.0 if law == "greedy" else 0.8)
    return Case(prompt, "test", domain, f"ask {prompt}", law, sampling, 5, num_tokens, arrays)


def answer(prompt: str, law: str, num_tokens: int) -> Answer:
    ids = torch.arange(100, 105 + num_tokens)
    none = torch.zeros(num_tokens, 0)
    facts: dict[str, Any] = {"split": "test", "domain": "chat", "family": "f", "text": "ask"}
    return Answer(
        id=prompt,
        law=law,
        sampling=Sampling(),
        token_ids=ids,
        num_prompt_tokens=5,
        logprobs=torch.zeros(num_tokens),
        lse=torch.zeros(num_tokens),
        topk_ids=none.long(),
        topk_logits=none,
        finish_reason="length",
        **facts,
    )


def words(token_ids: Any) -> str:
    return "".join(f"{token} " for token in token_ids)


# 8 tokens, depth 3: accepted two, then refused; nothing proposed; all three accepted; the end
ROWS = [
    [1, 1, 0],
    [0, 0, 0],
    [0, 0, 0],
    [NAN, NAN, NAN],
    [1, 1, 1],
    [0, 0, 0],
    [0, 0, 0],
    [1, 1, 1],
]


def test_a_walk_is_what_the_arm_would_do() -> None:
    assert walk(case({"d": ROWS}), "d", 3, seed=0) == [
        (ACCEPTED, 0, 2),
        (REFUSED, 2, 3),
        (TARGET, 3, 4),
        (ACCEPTED, 4, 7),
        (TARGET, 7, 8),  # the last token is never drafted
    ]
    assert walk(case({"d": ROWS}), "d", 1, seed=0)[:4] == [
        (ACCEPTED, 0, 1),
        (TARGET, 1, 2),  # K was reached: nothing was refused
        (REFUSED, 2, 3),
        (TARGET, 3, 4),
    ]


@pytest.mark.parametrize("length", [1, 2, 3, 9])
def test_passes_are_those_of_replay(length: int, costs: Any) -> None:
    """Greedy chances are 0 or 1, so the expected passes of an arm are those of the walk."""
    random = np.random.default_rng(4)
    rows = np.where(random.random((37, 3)) < 0.6, 1.0, 0.0)
    rows[random.random(37) < 0.2] = NAN
    one = case({"d": rows.tolist()})
    runs = walk(one, "d", length, seed=0)
    passes = sum(kind != ACCEPTED for kind, _, _ in runs)
    assert passes == arm_totals(one, costs, [length])[("d", length)].passes
    assert [first for _, first, _ in runs] == [0, *(end for _, _, end in runs[:-1])]
    assert runs[-1][2] == 37


@pytest.fixture
def costs() -> Any:
    from decode.costs import Costs

    table = {1: 1.0, 17: 1.0}
    return Costs(key="", verify_seconds=table, draft_seconds={"d": table}, host_seconds=0.0)


def test_samples_hold_the_beginning_of_the_targets_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "NUM_TOKENS", 6)
    cases = [
        case({"d": ROWS, "e": ROWS}, prompt, domain, law)
        for domain, prompt in (("chat", "p"), ("chat", "q"), ("code", "r"), ("code", "gone"))
        for law in ("greedy", "sampled")
    ]
    answers = [answer(p, law, 8) for p in ("p", "q", "r") for law in ("greedy", "sampled")]
    lengths = {("d", "greedy"): 3, ("e", "greedy"): 1, ("d", "sampled"): 3}  # e: no arm there
    rows = samples(cases, answers, words, lengths, per_domain=1, seed=0)
    assert [(r["id"], r["law"], r["drafter"]) for r in rows] == [
        (prompt, law, drafter)
        for prompt in ("p", "r")
        for law, drafter in (("greedy", "d"), ("greedy", "e"), ("sampled", "d"))
    ]
    for row in rows:
        assert "".join(text for _, text in row["spans"]) == words(range(105, 111))
        assert row["is_cut"]
    assert rows[0]["spans"] == [
        [ACCEPTED, "105 106 "],
        [REFUSED, "107 "],
        [TARGET, "108 "],
        [ACCEPTED, "109 "],
        [TARGET, "110 "],
    ]
    assert rows[0]["acceptance_length"] == pytest.approx(6 / 3)
    assert samples(cases, answers, words, lengths, per_domain=0, seed=0) == []


def test_a_character_of_several_tokens_is_not_torn() -> None:
    """Byte by byte, as a byte-level tokenizer may cut: pieces put together are the text."""
    data = "aé€𝄞b".encode()

    def decode(token_ids: Any) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")

    ends = list(range(1, len(data) + 1))
    pieces = list(texts_between(list(data), ends, decode))
    assert "".join(pieces) == "aé€𝄞b"
    assert [piece for piece in pieces if piece] == ["a", "é", "€", "𝄞", "b"]
    assert "".join(texts_between(list(data), [2, 7, len(data)], decode)) == "aé€𝄞b"
    cut = list(data[:5])  # ends inside a character: what is left of it is shown at the end
    assert "".join(texts_between(cut, [1, 5], decode)) == decode(cut)


def test_only_the_targets_own_tokens_are_put_together() -> None:
    marked = [(TARGET, "a"), (TARGET, "b"), (ACCEPTED, "c"), (ACCEPTED, "d"), (REFUSED, "")]
    assert merged(marked) == [[TARGET, "ab"], [ACCEPTED, "c"], [ACCEPTED, "d"]]

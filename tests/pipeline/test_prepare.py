"""Prompts of every format become rows, and no split has seen another's.

Would catch: a family on two sides; a duplicate that differs in case or spacing; a leak between
files that were given as splits; a split that depends on the order of the data; a row without a
prompt that is skipped in silence; an error that does not name file and line; an identity that
follows the path instead of the content; a text whose continuation stands in its own prompt; a
benchmark's question among the prompts to learn from; boilerplate taken for a leak, or a leak for
boilerplate; a passage that two domains share and two splits see; a dropped row that nobody is told
of; a split emptied by one large group; a later turn that does not find its first;
a text to be worked on that a benchmark holds.
"""

import gzip
import json
import re
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import load_from_disk
from toys import RUNTIME

from pipeline.compose import compose_config
from pipeline.config import typed
from pipeline.data import FileData, HubData
from pipeline.embedded import EmbeddedData
from pipeline.leaks import HeldOut, Rule, leaks_against, refuse_leaks, related
from pipeline.prepare import Prepare
from pipeline.rows import SPLITS, folded, make_row, normalise, words
from pipeline.stage import Workspace
from pipeline.text_tasks import among, is_prose
from pipeline.turns import num_awaited

SETTINGS = {
    "router_train_percent": 25,
    "validation_percent": 12,
    "test_percent": 18,
    "min_prompts": 2,
    "max_prompt_chars": 4000,
    "leak_words": 13,
    "boilerplate_rows": 20,
    "benches": [],
    "leaking_rows": "refuse",
    "follow_up_percent": 0,
    "follow_ups": ["Why?", "Shorter."],
    "text_task_percent": 0,
    "text_tasks": ["Sum up:", "Translate:"],
}
RULE = Rule(num_words=13, most_rows=20)
FORMAT = {
    "format": "prompt_response",
    "prompt_column": "prompt",
    "response_column": "response",
    "messages_column": "messages",
    "text_column": "text",
    "domain_column": "domain",
    "family_column": "family",
    "source_column": "source",
    "license_column": "license",
    "prefix_words": 6,
    "max_rows_per_domain": 0,
}
LONG = " ".join(f"word{n}" for n in range(14))


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path_factory.mktemp("cache")))


def files(train: object, **changes: object) -> FileData:
    return FileData(**{**FORMAT, "train": train, "validation": [], "test": [], **changes})


def write(path: Path, rows: list[dict]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.write(text)
    return path


def prompts(count: int, name: str = "p") -> list[dict]:
    return [{"prompt": f"{name} number {n} asks for {n * n}"} for n in range(count)]


def prepare(data: object, out: Path, seed: int = 0, **changes: object) -> dict:
    stage = Prepare(**{**SETTINGS, **changes})
    out.mkdir(parents=True, exist_ok=True)
    metrics = stage.run(Workspace({"data": data}, {}, out, seed, RUNTIME))
    splits = load_from_disk(str(out / "datasets"))
    return {"metrics": metrics, **{name: splits[name].to_list() for name in splits}}


def test_rows_have_every_column_and_each_prompt_is_in_one_split(tmp_path):
    path = write(tmp_path / "mine.jsonl", prompts(40))
    found = prepare(files(str(path)), tmp_path / "out")
    rows = [row for name in SPLITS for row in found[name]]
    assert sorted(row["text"] for row in rows) == sorted(row["prompt"] for row in prompts(40))
    assert set(rows[0]) == {"id", "domain", "family", "text", "messages_json", "response"}
    assert {row["domain"] for row in rows} == {"mine"}, "the file's name, where a row has none"
    assert len({row["id"] for row in rows}) == 40
    assert json.loads(rows[0]["messages_json"]) == [{"role": "user", "content": rows[0]["text"]}]
    assert found["metrics"]["test"] == 8
    assert found["metrics"]["validation"] == 5
    assert found["metrics"]["router_train"] == 10
    assert "mine" in (tmp_path / "out" / "summary.txt").read_text()


def test_the_split_depends_on_the_seed_and_not_on_the_order(tmp_path):
    rows = prompts(40)
    one = prepare(files(str(write(tmp_path / "d.jsonl", rows))), tmp_path / "1")
    (tmp_path / "b").mkdir()
    two = prepare(files(str(write(tmp_path / "b/d.jsonl", rows[::-1]))), tmp_path / "2")
    three = prepare(files(str(tmp_path / "d.jsonl")), tmp_path / "3", seed=1)

    def texts(found: dict) -> set[str]:
        return {row["text"] for row in found["test"]}

    assert texts(one) == texts(two) != texts(three)


def test_no_family_and_no_shared_passage_straddles_a_split(tmp_path):
    rows = [{**row, "family": f"f{n % 9}"} for n, row in enumerate(prompts(45))]
    rows += [{"prompt": f"{LONG} then {n}", "family": f"long{n}"} for n in range(12)]
    found = prepare(files(str(write(tmp_path / "d.jsonl", rows))), tmp_path / "out")
    sides: dict[str, set[str]] = {}
    for name in SPLITS:
        for row in found[name]:
            family = "long" if row["family"].startswith("long") else row["family"]
            sides.setdefault(family, set()).add(name)
    assert all(len(side) == 1 for side in sides.values()), sides
    assert len(sides) == 10


def test_boilerplate_in_many_prompts_does_not_join_them(tmp_path):
    rows = [{"prompt": f"{LONG} {n} {n * 3}"} for n in range(60)]
    found = prepare(files(str(write(tmp_path / "d.jsonl", rows))), tmp_path / "out")
    assert all(found[name] for name in SPLITS)


def test_duplicates_and_overlong_prompts_are_dropped_and_counted(tmp_path):
    rows = [*prompts(30), {"prompt": "P  NUMBER 3 asks\nfor 9 "}, {"prompt": "x" * 5000}]
    found = prepare(files(str(write(tmp_path / "d.jsonl", rows))), tmp_path / "out")
    assert found["metrics"]["dropped_duplicates"] == 1
    assert found["metrics"]["dropped_too_long"] == 1
    assert sum(len(found[name]) for name in SPLITS) == 30
    assert "dropped duplicates: 1" in (tmp_path / "out" / "summary.txt").read_text()


def test_files_can_be_splits_of_their_own(tmp_path):
    train = write(tmp_path / "code.jsonl", prompts(20, "train"))
    test = write(tmp_path / "held.jsonl.gz", [{**r, "domain": "code"} for r in prompts(6, "test")])
    found = prepare(files([str(train)], test=str(test)), tmp_path / "out")
    assert {row["text"].split()[0] for row in found["test"]} == {"test"}
    assert {row["text"].split()[0] for row in found["drafter_train"]} == {"train"}


@pytest.mark.parametrize("leak", ["p NUMBER 3 asks for 9", LONG])
def test_a_leak_between_given_splits_is_refused_by_name(tmp_path, leak):
    train = write(tmp_path / "d.jsonl", [*prompts(30), {"prompt": f"first {LONG}"}])
    (tmp_path / "t").mkdir()
    test = write(tmp_path / "t/d.jsonl", [*prompts(4, "other"), {"prompt": leak}])
    with pytest.raises(ValueError, match=r"shares the words .* with test \(.*line 5\)") as caught:
        prepare(files(str(train), test=str(test)), tmp_path / "out")
    assert re.search(rf"\({train}, line (4|31)\).*; take such prompts out", str(caught.value))
    assert "leaking_rows=drop" in str(caught.value)
    assert not (tmp_path / "out" / "datasets").exists()


def test_messages_end_at_the_last_question(tmp_path):
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": " What is 2+2? "},
        {"role": "assistant", "content": "4"},
    ]
    (row,) = files(str(write(tmp_path / "d.jsonl", [{"messages": turns}])), format="messages").load(
        0
    )["train"]
    assert row.text == "What is 2+2?"
    assert row.response == "4"
    assert [turn["role"] for turn in json.loads(row.messages_json)] == [
        "system",
        "user",
        "assistant",
        "user",
    ]


def test_a_text_is_cut_into_prefix_and_continuation(tmp_path):
    text = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    path = str(write(tmp_path / "d.jsonl", [{"text": text}, {"text": "a b c d"}]))
    long, short = files(path, format="text").load(0)["train"]
    assert long.text == "one two three four five six"
    assert long.text + " " + (long.response or "") == text
    assert (short.text, short.response) == ("a b", "c d"), "at most half of it"
    assert long.messages_json == "[]"


def test_parquet_and_several_files(tmp_path):
    pq.write_table(pa.Table.from_pylist(prompts(3, "parquet")), tmp_path / "chat.parquet")
    write(tmp_path / "code.jsonl", [{"q": "other column"}])
    rows = files(str(tmp_path / "chat.parquet")).load(0)["train"]
    assert [row.domain for row in rows] == ["chat"] * 3
    (row,) = files(str(tmp_path / "code.jsonl"), prompt_column="q").load(0)["train"]
    assert row.domain == "code"
    both = files(str(tmp_path / "c*")).files()["train"]
    assert [path.name for path, _ in both] == ["chat.parquet", "code.jsonl"]


def test_the_identity_follows_content_and_settings_not_the_path(tmp_path):
    (tmp_path / "b").mkdir()
    one = files(str(write(tmp_path / "d.jsonl", prompts(3))))
    two = files(str(write(tmp_path / "b/d.jsonl", prompts(3))))
    other = files(str(write(tmp_path / "e.jsonl", prompts(4))))
    assert one.identity() == two.identity() != other.identity()
    assert one.identity() != files(str(tmp_path / "d.jsonl"), prompt_column="q").identity()


def test_at_most_so_many_rows_of_each_domain(tmp_path):
    rows = [{**row, "domain": "ab"[n % 2]} for n, row in enumerate(prompts(20))]
    data = files(str(write(tmp_path / "d.jsonl", rows)), max_rows_per_domain=3)
    assert Counter(row.domain for row in data.load(0)["train"]) == {"a": 3, "b": 3}
    assert data.load(0) == data.load(0)
    assert data.load(0) != data.load(5)


BAD_LINES = {
    b'{"prompt": "   "}': "line 2 has an empty prompt",
    b'{"prompt": null}': "line 2 has no prompt (it has prompt)",
    b'{"question": "x"}': "line 2 has no prompt (it has question); add it, or name the column with",
    b'{"prompt": "\xff"}': "line 2, is not valid UTF-8 (byte 12)",
    b'{"prompt": "x"': "line 2, is not JSON",
    b'["x"]': "line 2, is not an object",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=repr)
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n' + line + b"\n")
    with pytest.raises(ValueError, match="line 2") as caught:
        prepare(files(str(path)), tmp_path / "out")
    assert BAD_LINES[line] in str(caught.value)
    assert str(path) in str(caught.value)


BAD_MESSAGES = {
    "[]": "has no messages",
    '[{"role": "robot", "content": "x"}]': "role robot",
    '[{"role": "user"}]': "a message without text",
    '[{"role": "assistant", "content": "x"}]': "no message of role user",
    '[{"role": "user", "content": "\\u0000 "}]': "an empty prompt",
    '"[{"': "has messages that are no JSON (",
}


@pytest.mark.parametrize("messages", BAD_MESSAGES)
def test_bad_messages_are_named(tmp_path, messages):
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"messages": json.loads(messages)}) + "\n")
    with pytest.raises(ValueError, match=r"line 1 ") as caught:
        files(str(path), format="messages").load(0)
    assert BAD_MESSAGES[messages] in str(caught.value)


def test_files_that_cannot_be_read_are_named(tmp_path):
    for name, content in [("d.jsonl.gz", b"no gzip"), ("d.parquet", b"no parquet")]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name}.* cannot be read .* again"):
            files(str(tmp_path / name)).load(0)
    whole = write(tmp_path / "cut.jsonl.gz", prompts(500)).read_bytes()
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut.jsonl.gz, line \d+, cannot be read"):
        files(str(tmp_path / "cut.jsonl.gz")).load(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": "none.jsonl"}, "data.train=none.jsonl is not a file; check the path"),
        ({"train": 3}, "data.train=3 is no path"),
        ({"train": {"a": ["d.jsonl", 3]}}, r"data.train=\['d.jsonl', 3\] is no path"),
        ({"train": {"a": "d.jsonl", "b": "none"}}, "data.train=none is not a file"),
        ({"train": {}}, "data.train names no file"),
        ({"train": []}, "data.train names no file"),
        ({"format": "chatml"}, "data.format=chatml is not known; use messages, prompt_response"),
        ({"prefix_words": 0}, "data.prefix_words=0"),
        ({"max_rows_per_domain": -1}, "data.max_rows_per_domain=-1"),
    ],
)
def test_wrong_settings_are_named(tmp_path, monkeypatch, change, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "d.jsonl", prompts(3))
    with pytest.raises(ValueError, match=message):
        files(**{"train": "d.jsonl", **change}).load(0)


def test_an_unknown_ending_and_short_texts_are_named(tmp_path):
    (tmp_path / "d.csv").write_text("prompt")
    with pytest.raises(
        ValueError, match=r"d.csv has a format that is not known; use one of \.jsonl"
    ):
        files(str(tmp_path / "d.csv")).load(0)
    path = str(write(tmp_path / "d.jsonl", [{"text": "too short"}]))
    with pytest.raises(ValueError, match="line 1 has a text of 2 words; 4 are needed"):
        files(path, format="text").load(0)


def test_too_few_prompts_are_refused_with_domain_and_split(tmp_path):
    path = write(tmp_path / "few.jsonl", prompts(6))
    with pytest.raises(ValueError, match="domain few has 0 prompts in split drafter_train, and 2"):
        prepare(files(str(path)), tmp_path / "out")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="the data holds no prompt"):
        prepare(files(str(tmp_path / "empty.jsonl")), tmp_path / "out")


@pytest.mark.parametrize(
    "wrong",
    [
        {"test_percent": 80},
        {"validation_percent": 0},
        {"min_prompts": 0},
        {"boilerplate_rows": 0},
        {"leaking_rows": "keep"},
    ],
)
def test_wrong_shares_are_refused(wrong):
    with pytest.raises(ValueError, match=r"stages\.prepare"):
        Prepare(**{**SETTINGS, **wrong})


def test_conversations_go_on_after_an_answer_that_is_yet_to_come(tmp_path):
    data = files([str(write(tmp_path / "a.jsonl", prompts(120)))])
    plain = prepare(data, tmp_path / "plain")
    prepare(data, tmp_path / "more", follow_up_percent=40)
    splits = load_from_disk(str(tmp_path / "more" / "datasets"))
    rows = {row["id"]: row for row in splits["drafter_train"]}
    later = [row for row in rows.values() if num_awaited(row)]
    share = len(later) / len(plain["drafter_train"])
    assert len(rows) == len(plain["drafter_train"]) + len(later)
    assert 0.15 < share < 0.65, share  # of 53 rows: four standard deviations of 6.7% around 40%
    assert {row["text"] for row in later} == {"Why?", "Shorter."}
    for row in later:
        first = rows[row["id"].removesuffix("/2")]
        asked, answer, request = json.loads(row["messages_json"])
        assert [asked] == json.loads(first["messages_json"])
        assert answer == {"role": "assistant", "content": None}
        assert (request["role"], request["content"]) == ("user", row["text"])
        assert row["response"] is None
        assert row["family"] == first["family"]
    for name in SPLITS[1:]:
        assert not any(num_awaited(row) for row in splits[name])
    summary = (tmp_path / "more" / "summary.txt").read_text()
    assert f"later turns, asked after the target's own answer: {len(later)}" in summary


def test_a_text_to_be_continued_does_not_go_on(tmp_path):
    rows = [{"text": f"w{n} of so many words as a text must have {n}"} for n in range(80)]
    data = files([str(write(tmp_path / "a.jsonl", rows))], format="text")
    assert prepare(data, tmp_path / "out", follow_up_percent=100) == prepare(data, tmp_path / "no")


def prose(number: int) -> str:
    return " ".join(f"w{chr(97 + place % 26)}{'x' * (number % 9)}" for place in range(50 + number))


def test_responses_in_prose_become_texts_to_be_worked_on(tmp_path):
    code = "x = [f(3) for _ in range(9)]; " * 12
    rows = [
        {"prompt": f"asks number {n}", "response": (prose(n), code, "Short.")[n % 3]}
        for n in range(120)
    ]
    data = files([str(write(tmp_path / "a.jsonl", rows))], max_rows_per_domain=0)
    plain = prepare(data, tmp_path / "plain")
    more = prepare(data, tmp_path / "more", text_task_percent=100)
    before = {row["id"]: row for row in plain["drafter_train"]}
    made = [row for row in more["drafter_train"] if row["id"] not in before]
    texts = {row["response"]: row for row in before.values() if is_prose(row["response"])}
    assert len(made) == len(texts) == more["metrics"]["num_texts"] > 5
    summary = (tmp_path / "more" / "summary.txt").read_text()
    assert f"texts to be worked on, made of responses: {len(made)}" in summary
    for row in made:
        task, text = row["text"].split("\n\n")
        assert task in SETTINGS["text_tasks"]
        assert row["family"] == texts[text]["family"]
        assert json.loads(row["messages_json"]) == [{"role": "user", "content": row["text"]}]
        assert row["response"] is None
    for name in SPLITS[1:]:
        assert more[name] == plain[name]
    half = prepare(data, tmp_path / "half", text_task_percent=50)
    assert 0 < len(half["drafter_train"]) - len(before) < len(made)


def test_a_task_says_where_texts_and_their_question_go(tmp_path):
    rows = [{"prompt": f"asks number {n}", "response": f"{prose(n)} {{text}}"} for n in range(60)]
    data = files([str(write(tmp_path / "a.jsonl", rows))], max_rows_per_domain=0)
    tasks = ["{question} {text}", "{texts} ({question})", "Plain"]
    out = prepare(data, tmp_path / "out", text_task_percent=100, text_tasks=tasks)["drafter_train"]
    text_of = {row["text"]: row["response"] for row in out if row["response"]}
    made = [row["text"] for row in out if row["response"] is None]
    first = [text for text in made if text.startswith("asks")]
    assert first
    for text in first:
        question = " ".join(text.split()[:3])
        assert text == f"{question} {text_of[question]}"
    several = [text for text in made if text.endswith(")")]
    places = set()
    for text in several:
        texts, _, question = text[:-1].rpartition(" (")
        parts = texts.split("\n\n")
        assert set(parts) <= set(text_of.values())
        places.add((parts.index(text_of[question]), len(parts)))
    assert places >= {(0, 3), (1, 3), (2, 3)}
    assert any(text.startswith("Plain\n\n") for text in made)


def test_texts_that_are_searched_stay_of_usual_length():
    long, short = "w " * 200, "w " * 90
    assert among([long, long, short], 0.99) == [short, long]
    assert among([short, short + "x", short + "y"], 0.5) == [short + "x", short, short + "y"]


def test_a_text_that_a_benchmark_holds_is_no_task(tmp_path):
    rows = [{"prompt": f"asks number {n}", "response": f"{LONG} {prose(n)}"} for n in range(60)]
    data = files([str(write(tmp_path / "a.jsonl", rows))], max_rows_per_domain=0)
    asked = bench(tmp_path / "b.jsonl", {"prompt": f"Say this: {LONG}"})
    settings = {"text_task_percent": 100, "boilerplate_rows": 200}
    free = prepare(data, tmp_path / "free", **settings)
    held = prepare(data, tmp_path / "held", benches=[asked], **settings)
    assert len(free["drafter_train"]) > len(held["drafter_train"])
    assert not any(LONG in row["text"] for row in held["drafter_train"])
    num_more = len(free["drafter_train"]) - len(held["drafter_train"])
    assert held["metrics"]["dropped_leaking_texts"] == num_more


def test_a_response_that_stands_twice_is_one_text(tmp_path):
    rows = [{"prompt": f"asks number {n}", "response": prose(0)} for n in range(60)]
    data = files([str(write(tmp_path / "a.jsonl", rows))], max_rows_per_domain=0)
    made = prepare(data, tmp_path / "out", text_task_percent=100)["drafter_train"]
    assert len({row["id"] for row in made}) == len(made)
    assert sum("\n\n" in row["text"] for row in made) == len(SETTINGS["text_tasks"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"text_task_percent": -1}, r"text_task_percent=-1 must be from 0 to 100"),
        ({"follow_up_percent": 101}, r"follow_up_percent=101 must be from 0 to 100"),
        ({"follow_up_percent": 5, "follow_ups": []}, r"follow_up_percent=5 needs something to say"),
    ],
)
def test_follow_ups_that_cannot_be_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        Prepare(**{**SETTINGS, **wrong})


def bench(path: Path, *rows: dict) -> str:
    return str(write(path, list(rows)))


def test_no_question_of_a_benchmark_is_learned_from(tmp_path):
    """Whole texts whatever their punctuation, runs of words, and every turn."""
    asked = {
        "a": {"id": 1, "prompt": "P number 3, asks for 9!"},
        "b": {"prompt": "first turn", "turns": ["first turn", f"{LONG} and so on"]},
    }
    path = write(tmp_path / "d.jsonl", [*prompts(40), {"prompt": f"now {LONG}"}])
    benches = [bench(tmp_path / f"{name}.jsonl.gz", row) for name, row in asked.items()]
    with pytest.raises(
        ValueError, match=r"d.jsonl, line 4\) shares .* with a \(.*line 1\)"
    ) as error:
        prepare(files(str(path)), tmp_path / "out", benches=benches)
    assert "(and 1 more prompts do so)" in str(error.value)
    found = prepare(files(str(path)), tmp_path / "two", benches=benches, leaking_rows="drop")
    assert found["metrics"]["dropped_leaks"] == 2
    texts = {row["text"] for name in SPLITS for row in found[name]}
    assert texts == {row["prompt"] for row in prompts(40)} - {"p number 3 asks for 9"}
    lines = (tmp_path / "two" / "leaks.jsonl").read_text().splitlines()
    assert {(leak["where"], leak["with"]) for leak in map(json.loads, lines)} == {
        (f"{path}, line 4", "a"),
        (f"{path}, line 41", "b"),
    }
    summary = (tmp_path / "two" / "summary.txt").read_text()
    assert "dropped leaks: 2\n  shared text with a: 1\n  shared text with b: 1\n" in summary
    assert "warning: 2 prompts leak and are left out, listed in leaks.jsonl: the prompt" in summary


def test_clean_prompts_pass_beside_a_benchmark(tmp_path):
    path = write(tmp_path / "d.jsonl", prompts(40))
    other = bench(tmp_path / "b.jsonl", {"prompt": LONG}, {"prompt": "p number 3 asks for"})
    found = prepare(files(str(path)), tmp_path / "out", benches=[other])
    assert sum(len(found[name]) for name in SPLITS) == 40
    assert not (tmp_path / "out" / "leaks.jsonl").exists()
    assert found["metrics"]["num_warnings"] == 0


def test_a_benchmark_may_be_the_test_split_but_not_validation(tmp_path):
    train = str(write(tmp_path / "d.jsonl", prompts(40)))
    held = bench(tmp_path / "h.jsonl", *({**row, "domain": "d"} for row in prompts(4, "held")))
    found = prepare(files(train, test=held), tmp_path / "out", benches=[held])
    assert len(found["test"]) == 4
    with pytest.raises(ValueError, match=r"h.jsonl, line 1\) shares .* with h \("):
        prepare(files(train, validation=held), tmp_path / "two", benches=[held])


def test_a_benchmark_without_questions_is_named(tmp_path):
    train = str(write(tmp_path / "d.jsonl", prompts(40)))
    for row in ({"question": "x"}, {"turns": "x"}, {"turns": [3]}):
        path = bench(tmp_path / "b.jsonl", row)
        with pytest.raises(ValueError, match=r"b.jsonl, line 1 has neither a prompt nor turns"):
            prepare(files(train), tmp_path / "out", benches=[path])
    with pytest.raises(ValueError, match=r"stages.prepare.benches=none is not a file"):
        prepare(files(train), tmp_path / "out", benches=["none"])


def test_the_identity_names_what_benchmarks_hold(tmp_path):
    def identity(name: str, *rows: dict) -> dict:
        (tmp_path / name).mkdir(exist_ok=True)
        path = bench(tmp_path / name / "b.jsonl", *rows)
        return Prepare(**{**SETTINGS, "benches": [path]}).identity()

    assert identity("1", {"prompt": "x"}) == identity("2", {"prompt": "x"})
    assert identity("1", {"prompt": "x"}) != identity("3", {"prompt": "y"})
    assert identity("1", {"prompt": "x"})["leak_words"] == 13


def test_a_run_is_boilerplate_where_more_prompts_hold_it_than_may():
    """20 with the held-out one: a leak of each; 21: none."""
    held = [HeldOut(f"{LONG} held", "test")]
    rows = [row(f"{LONG} {n}") for n in range(20)]
    assert len(leaks_against(rows[:19], held, RULE)) == 19
    assert leaks_against(rows, held, RULE) == []
    assert len(related(rows, RULE)) == 1
    assert len(related([*rows, row(f"{LONG} more")], RULE)) == 21
    common = refuse_leaks({"test": [row(f"{LONG} x")], "drafter_train": rows}, RULE)
    assert (common.num_runs, common.num_rows) == (2, 21)
    assert common.example in LONG
    assert leaks_against(rows, [], RULE) == leaks_against([], held, RULE) == []


def test_a_passage_that_two_domains_share_stays_on_one_side(tmp_path):
    """Ten passages, each in one prompt of either domain; many seeds, so that luck runs out."""
    passages = [" ".join(f"p{n}w{place}" for place in range(13)) for n in range(10)]
    rows = [{"prompt": f"{d} {text}", "domain": d} for d in ("a", "b") for text in passages] + [
        {**row, "domain": d} for d in ("a", "b") for row in prompts(20, d)
    ]
    path = str(write(tmp_path / "d.jsonl", rows))
    for seed in range(5):
        found = prepare(files(path), tmp_path / str(seed), seed=seed, min_prompts=1)
        for text in passages:
            sides = [name for name in SPLITS for r in found[name] if text in r["text"]]
            assert len(sides) == 2
            assert len(set(sides)) == 1


def test_a_group_that_is_too_large_for_a_split_waits(tmp_path):
    """Of 60 prompts 20 are one family: more than validation (8) or test (11) asks for."""
    rows = [{**row, "family": "f"} for row in prompts(20, "one")] + prompts(40)
    path = str(write(tmp_path / "d.jsonl", rows))
    for seed in range(5):
        found = prepare(files(path), tmp_path / str(seed), seed=seed)
        assert (len(found["validation"]), len(found["test"])) == (8, 11)
    assert found["metrics"]["num_warnings"] == 1
    summary = (tmp_path / "4" / "summary.txt").read_text()
    assert "33% of the prompts of domain d share a family or a passage" in summary


def test_files_may_be_given_by_domain(tmp_path):
    """The name of the file, the row's own column and the mapping: the mapping wins."""
    one = write(tmp_path / "chat.jsonl", prompts(20))
    two = write(tmp_path / "chat_sa.jsonl.gz", [{**r, "domain": "x"} for r in prompts(20, "q")])
    three = write(tmp_path / "code.jsonl", prompts(20, "c"))
    data = files({"talk": [str(one), str(two)], "code": str(three)})
    assert Counter(row.domain for row in data.load(0)["train"]) == {"talk": 40, "code": 20}
    assert data.identity() != files([str(one), str(two), str(three)]).identity()
    fixed, own = (files(value).identity() for value in ({"chat": str(one)}, str(one)))
    assert fixed != own, "a domain that wins over the column is another reading of the same file"
    assert len(files([str(one), str(tmp_path / "chat.*")]).load(0)["train"]) == 20, "each file once"


def test_files_by_domain_on_the_command_line(tmp_path):
    one = write(tmp_path / "a.jsonl", prompts(3))
    two = write(tmp_path / "b.jsonl.gz", prompts(3, "q"))
    given = (f"data.train={{chat:[{one},{two}]}}", f"data.validation={{chat:{one}}}")
    data = typed(compose_config(["data=jsonl", *given]).data, "data")
    assert data.files()["train"] == [(one, "chat"), (two, "chat")]
    assert data.files()["validation"] == [(one, "chat")]


def test_the_summary_fits_a_screen_and_says_where_prompts_come_from(tmp_path):
    sources = [{"source": f"s{n % 14}", "license": "MIT"} for n in range(40)]
    rows = [{**p, **s, "response": "yes"} for p, s in zip(prompts(40), sources, strict=True)]
    path = write(tmp_path / "d.jsonl", [*rows, *prompts(2, "unknown")])
    prepare(files(str(path)), tmp_path / "out")
    lines = (tmp_path / "out" / "summary.txt").read_text().splitlines()
    assert "licences: MIT 40, not said 2" in lines
    assert any(line.startswith("sources: s0 3, s1 3, s10 3, s11 3, s2") for line in lines)
    assert any(line.endswith(" s9 3, 2 more 4, not said 2") for line in lines)
    assert "with a response of the data's own: 40 of 42" in lines
    assert "words: median (95%)  drafter_train  router_train  validation  test" in lines
    assert len(lines) <= 24


def test_much_that_is_left_out_is_a_warning(tmp_path, capsys):
    path = str(write(tmp_path / "d.jsonl", [*prompts(30), *prompts(4)]))
    found = prepare(files(path), tmp_path / "out")
    assert found["metrics"]["num_warnings"] == 1
    shown = capsys.readouterr().out
    assert shown.count("warning: of 34 prompts 4 are left out (dropped duplicates: 4)") == 1
    assert shown == (tmp_path / "out" / "summary.txt").read_text()


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "d.jsonl").write_bytes(b"\xef\xbb\xbf" + b'{"prompt": "x"}\n')
    assert [row.text for row in files(str(tmp_path / "d.jsonl")).load(0)["train"]] == ["x"]


def test_messages_may_stand_in_parquet_or_as_text(tmp_path):
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
    pq.write_table(pa.Table.from_pylist([{"messages": turns}]), tmp_path / "m.parquet")
    write(tmp_path / "t.jsonl", [{"messages": json.dumps(turns)}])
    for name in ("m.parquet", "t.jsonl"):
        (row,) = files(str(tmp_path / name), format="messages").load(0)["train"]
        assert (row.text, row.response) == ("Hello", "Hi.")
    pq.write_table(pa.table({"prompt": ["x", None]}), tmp_path / "null.parquet")
    with pytest.raises(ValueError, match=r"null.parquet, row 2 has no prompt"):
        files(str(tmp_path / "null.parquet")).load(0)


def hub(folder: Path, **changes: object) -> HubData:
    values = {"name_or_path": str(folder), "config": None, "revision": None, "train": "train"}
    return HubData(**{**FORMAT, **values, "validation": None, "test": None, **changes})


def test_a_data_set_is_loaded_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "toys"
    folder.mkdir()
    write(folder / "train.jsonl", prompts(30))
    data = hub(folder)
    found = prepare(data, tmp_path / "out")
    assert {row["domain"] for row in found["test"]} == {"toys"}
    assert data.identity() == hub(folder).identity()
    with pytest.raises(ValueError, match="split nope, cannot be loaded"):
        hub(folder, train="nope").load(0)


def test_a_data_set_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"cannot be loaded .* or use data=jsonl") as caught:
        hub(tmp_path / "none").load(0)
    assert "\n" not in str(caught.value)


def embedded(**changes: object) -> EmbeddedData:
    return EmbeddedData(**{"domains": ["code"], "prompts_per_family": 2, **changes})


def test_embedded_prompts_fill_every_split_and_paraphrases_are_of_held_out_families(tmp_path):
    data = EmbeddedData(domains=["code", "chat", "reasoning"], prompts_per_family=2)
    found = prepare(data, tmp_path / "out")
    assert set(found) == {*SPLITS, "mixed", "paraphrase", "metrics"}
    families = {name: {row["family"] for row in found[name]} for name in SPLITS}
    for name in SPLITS:
        others = set().union(*(families[other] for other in SPLITS if other != name))
        assert not families[name] & others
    assert {row["family"] for row in found["paraphrase"]} == families["test"]
    assert {row["domain"] for row in found["mixed"]} == {"mixed"}
    texts = [folded(row["text"]) for name in found if name != "metrics" for row in found[name]]
    assert len(texts) == len(set(texts))


def test_embedded_prompts_follow_the_seed_and_the_settings():
    assert embedded().load(0) == embedded().load(0) != embedded().load(1)
    assert embedded().identity() != embedded(prompts_per_family=3).identity()
    assert len(embedded(prompts_per_family=3).load(0)["train"]) > len(embedded().load(0)["train"])
    for wrong in ({"domains": ["cod"]}, {"domains": []}, {"prompts_per_family": 0}):
        with pytest.raises(ValueError, match=r"data\."):
            embedded(**wrong)


def row(text: str, family: str = ""):
    return make_row(text=text, messages=[], response=None, domain="d", family=family)


def test_rows_are_related_through_chains():
    first, second = [f"a{n}" for n in range(13)], [f"b{n}" for n in range(13)]
    texts = [" ".join(first), " ".join(first + second), " ".join(second), "something else"]
    groups = related([row(text) for text in texts], RULE)
    assert sorted(map(len, groups)) == [1, 3]
    whole = Rule(num_words=0, most_rows=20)
    assert len(related([row(text) for text in texts], whole)) == 4, "0 compares whole texts only"


def test_other_wordings_of_a_test_prompt_may_share_its_passages():
    test, other = row(f"Explain {LONG}"), row(f"Tell me about {LONG}")
    refuse_leaks({"test": [test], "paraphrase": [other]}, RULE)
    with pytest.raises(ValueError, match=r"\(drafter_train\)"):
        refuse_leaks({"test": [test], "drafter_train": [other]}, RULE)
    with pytest.raises(ValueError, match=r"\(paraphrase\)"):
        refuse_leaks({"drafter_train": [test], "paraphrase": [other]}, RULE)
    with pytest.raises(ValueError, match="stands in the splits test and validation"):
        refuse_leaks({"test": [test], "validation": [row(f"explain  {LONG}")]}, RULE)


def test_texts_are_normalised():
    assert normalise(" a\r\nb\x00\tc\rd ") == "a\nb\tc\nd"
    assert normalise("e\u0301") == "\u00e9"
    assert folded("A  b\nC") == "a b c"
    assert words("It's 3.5, ok?") == ["it", "s", "3", "5", "ok"]

"""Prompts of every format become rows, and no split has seen another's.

Would catch: a family on two sides; a duplicate that differs in case or spacing; a leak between
files that were given as splits; a split that depends on the order of the data; a row without a
prompt that is skipped in silence; an error that does not name file and line; an identity that
follows the path instead of the content; a text whose continuation stands in its own prompt.
"""

import gzip
import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import load_from_disk
from toys import RUNTIME

from pipeline.data import FileData, HubData
from pipeline.embedded import EmbeddedData
from pipeline.leaks import refuse_leaks, related
from pipeline.prepare import Prepare
from pipeline.rows import SPLITS, folded, make_row, normalise, words
from pipeline.stage import Workspace

SETTINGS = {
    "router_train_percent": 25,
    "validation_percent": 12,
    "test_percent": 18,
    "min_prompts": 2,
    "max_prompt_chars": 4000,
    "leak_words": 13,
}
FORMAT = {
    "format": "prompt_response",
    "prompt_column": "prompt",
    "response_column": "response",
    "messages_column": "messages",
    "text_column": "text",
    "domain_column": "domain",
    "family_column": "family",
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
    with pytest.raises(ValueError, match=r"stands in the splits|share 13 words in a row") as caught:
        prepare(files(str(train), test=str(test)), tmp_path / "out")
    assert "take" in str(caught.value)
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
    assert [path.name for path in both] == ["chat.parquet", "code.jsonl"]


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
    "wrong", [{"test_percent": 80}, {"validation_percent": 0}, {"min_prompts": 0}]
)
def test_wrong_shares_are_refused(wrong):
    with pytest.raises(ValueError, match=r"stages\.prepare"):
        Prepare(**{**SETTINGS, **wrong})


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
    groups = related([row(text) for text in texts], 13)
    assert sorted(map(len, groups)) == [1, 3]
    assert len(related([row(text) for text in texts], 0)) == 4, "0 compares whole texts only"


def test_other_wordings_of_a_test_prompt_may_share_its_passages():
    test, other = row(f"Explain {LONG}"), row(f"Tell me about {LONG}")
    refuse_leaks({"test": [test], "paraphrase": [other]}, 13)
    with pytest.raises(ValueError, match=r"\(drafter_train\)"):
        refuse_leaks({"test": [test], "drafter_train": [other]}, 13)
    with pytest.raises(ValueError, match=r"\(paraphrase\)"):
        refuse_leaks({"drafter_train": [test], "paraphrase": [other]}, 13)


def test_texts_are_normalised():
    assert normalise(" a\r\nb\x00\tc\rd ") == "a\nb\tc\nd"
    assert normalise("e\u0301") == "\u00e9"
    assert folded("A  b\nC") == "a b c"
    assert words("It's 3.5, ok?") == ["it", "s", "3", "5", "ok"]

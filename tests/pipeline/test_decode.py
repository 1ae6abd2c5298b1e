"""Bugs these tests would catch: a stream on the terminal that is not the text that is kept; a
prompt that skips the chat template, or a continuation that goes through it; lines of a file read as
another kind; two sources of prompts of which one is silently ignored; an empty file that decodes
nothing.
"""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_target_folder

from pipeline.config import ConfigError
from pipeline.decode import Decode, read_lines
from pipeline.runtime import Runtime
from pipeline.stage import Workspace

RUNTIME = Runtime(device="cpu", threads=1, clock="virtual")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target_folder(tmp_path_factory.mktemp("target"))


@pytest.fixture
def stage(folder: Path) -> Decode:
    return Decode(
        prompt="w1 w2 w3",
        file=None,
        target=str(folder),
        backend=None,
        drafter="ngram",
        policy=None,
        coupling="rejection",
        chat=True,
        max_new_tokens=24,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        stop=[],
    )


def run(stage: Decode, out: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    out.mkdir(exist_ok=True)
    metrics = stage.run(Workspace({}, {}, out, 0, RUNTIME))
    rows = [json.loads(line) for line in (out / "texts.jsonl").read_text().splitlines()]
    return metrics, rows


def test_the_stream_is_the_text_that_is_kept(
    stage: Decode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics, rows = run(stage, tmp_path / "a")
    assert capsys.readouterr().out == rows[0]["text"] + "\n"
    assert rows[0]["text"]
    assert metrics["new_tokens"] == rows[0]["metrics"]["num_new_tokens"] <= 24
    assert metrics["acceptance_length"] >= 1
    _, bare_rows = run(replace(stage, chat=False), tmp_path / "b")
    assert bare_rows[0]["metrics"]["num_prompt_tokens"] == 3
    assert rows[0]["metrics"]["num_prompt_tokens"] > 3
    plain, plain_rows = run(replace(stage, drafter=None), tmp_path / "c")
    assert plain_rows[0]["text"] == rows[0]["text"]
    assert plain["acceptance_length"] == 1


def test_two_model_folders_suffice(stage: Decode, tmp_path: Path) -> None:
    other = tiny_target_folder(tmp_path / "other", seed=1)
    named = replace(stage, drafter=str(other), policy="ucb1")
    metrics, rows = run(named, tmp_path / "a")
    _, plain = run(replace(stage, drafter=None), tmp_path / "b")
    assert rows[0]["text"] == plain[0]["text"]
    assert rows[0]["metrics"]["num_drafted"] > 0
    assert metrics["prompts"] == 1


def test_gumbel_coupling_writes_what_plain_decoding_writes_at_any_temperature(
    stage: Decode, tmp_path: Path
) -> None:
    other = tiny_target_folder(tmp_path / "other", seed=1)
    sampled = replace(stage, coupling="gumbel", temperature=0.9)
    _, drafted = run(replace(sampled, drafter=str(other), policy="ucb1"), tmp_path / "a")
    _, plain = run(replace(sampled, drafter=None), tmp_path / "b")
    assert drafted[0]["text"] == plain[0]["text"]
    assert drafted[0]["metrics"]["num_drafted"] > 0


def test_standard_input_is_one_prompt(
    stage: Decode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("w1\nw2 w3\n"))
    _, rows = run(replace(stage, prompt=None), tmp_path)
    assert [row["prompt"] for row in rows] == ["w1\nw2 w3"]
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    with pytest.raises(ValueError, match="holds no prompt"):
        run(replace(stage, prompt=None), tmp_path)


def test_each_line_of_a_file_is_a_prompt(stage: Decode, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "w5"}]
    lines = [
        "w1 w2",
        "",
        json.dumps("w1 [w2"),
        json.dumps({"prompt": "w3"}),
        json.dumps({"text": "w4", "id": 7}),
        json.dumps({"messages": messages}),
        "[w6] w7",
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    wanted = ["w1 w2", "w1 [w2", "w3", "w4", messages, "[w6] w7"]
    assert list(read_lines(path)) == wanted
    metrics, rows = run(
        replace(stage, prompt=None, file=str(path), max_new_tokens=3), tmp_path / "o"
    )
    assert [row["prompt"] for row in rows] == wanted
    assert metrics["prompts"] == 6


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\n\n", "holds no prompt"), (b'{"id": 3}\n', "line 1 has no prompt"), (b"\xff", "UTF-8")],
)
def test_a_bad_file_is_one_sentence(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        list(read_lines(path))
    with pytest.raises(ValueError, match="cannot be read"):
        list(read_lines(tmp_path / "absent"))


def test_settings_that_contradict_each_other_are_refused(stage: Decode) -> None:
    with pytest.raises(ConfigError, match="drop one"):
        replace(stage, file="x")
    with pytest.raises(ConfigError, match=r"needs stages\.decode\.target"):
        replace(stage, target=None)


def test_without_a_target_it_needs_the_export(stage: Decode) -> None:
    assert stage.needs({}) == {}
    assert replace(stage, target=None, drafter=None).needs({})["export"].stage == "export"

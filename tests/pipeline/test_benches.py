"""Would catch: a benchmark that retrains a drafter or the router; data=<bench> that trains on it; a
prompt, turn or task family that is lost or filed wrong; a second turn asked without the target's
own first answer, or after that of another law; a killed run that asks it otherwise; passes that are
not those of the slow count; comparisons that are not in pairs.

Tolerances: sums in float64 in two orders, 1e-9.
"""

import gzip
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from test_regenerate import stage as regenerate_stage
from tiny import tiny_overrides, tiny_target_folder, tiny_tokenizer
from toys import RUNTIME
from workspace import tiny_config

from drafters.training import expected_passes
from pipeline.__main__ import build_pipeline
from pipeline.answers import INDEX, Answers
from pipeline.benches import BENCH, SCORED, BenchData, bench_of, question_of
from pipeline.chat import load_prompts, prompt_ids
from pipeline.compose import compose_config
from pipeline.config import ConfigError, typed, typed_settings
from pipeline.families import (
    Sums,
    acceptance_rows,
    acceptance_tables,
    by_domain,
    check_laws,
    check_names,
    paired_gain,
    sums_of,
    with_best_of,
)
from pipeline.prepare import Prepare
from pipeline.scores import Resampling
from pipeline.scoring import passes_of
from pipeline.stage import Workspace

HOW = Resampling(200, 0)
QUIZ = [
    {"id": "a", "domain": "reasoning", "category": "math", "prompt": "w1 w2", "answer": "3"},
    {"id": "b", "domain": "reasoning", "category": "math", "prompt": "w5 w6 w7", "response": "r"},
    {"id": 3, "domain": "code", "prompt": "w8", "test": "def check(f): pass", "entry_point": "f"},
]
TALK = [
    {"id": n, "category": "writing", "task": "multi_turn", "turns": [f"w{n} w2", f"w3 w{n} w9"]}
    for n in range(3)
]


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path_factory.mktemp("cache")))


def data(folder: Path, **changes: Any) -> BenchData:
    settings: dict[str, Any] = {
        "folder": str(folder),
        "files": ["quiz.jsonl", "talk.jsonl.gz"],
        "turns": "all",
        "prompts_per_bench": 0,
        "laws": "both",
        "max_new_tokens": 7,
        "max_prompt_tokens": 60,
    }
    return BenchData(**{**settings, **changes})


def write(folder: Path) -> Path:
    (folder / "quiz.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUIZ))
    with gzip.open(folder / "talk.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in TALK))
    return folder


# ------------------------------------------------------------------------------------------ as data


def test_every_turn_is_a_prompt_with_its_family(tmp_path):
    rows = data(write(tmp_path)).load(0)[BENCH]
    assert [row.id for row in rows] == [
        *("quiz/a/1", "quiz/b/1", "quiz/3/1"),
        *("talk/0/1", "talk/0/2", "talk/1/1", "talk/1/2", "talk/2/1", "talk/2/2"),
    ]
    assert [row.family for row in rows[:4]] == [
        *("quiz/math", "quiz/math", "quiz/all", "talk/multi_turn")
    ]
    assert [row.domain for row in rows[1:4]] == ["reasoning", "code", "talk"]
    assert (bench_of(rows[4].family), question_of(rows[4].id)) == ("talk", "talk/0")
    assert rows[1].response == "r"
    assert rows[4].text == "w3 w0 w9"
    assert json.loads(rows[4].messages_json) == [
        {"role": "user", "content": "w0 w2"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "w3 w0 w9"},
    ]
    first = data(tmp_path, turns="first").load(0)[BENCH]
    assert [row.id for row in first if row.id.startswith("talk")] == [
        *("talk/0/1", "talk/1/1", "talk/2/1")
    ]


def test_a_few_questions_are_always_the_same_ones_with_all_their_turns(tmp_path):
    few = data(write(tmp_path), prompts_per_bench=2)
    ids = [row.id for row in few.load(0)[BENCH]]
    assert ids == [row.id for row in few.load(5)[BENCH]]
    questions = {question_of(name) for name in ids}
    assert sum(name.startswith("talk") for name in questions) == 2
    assert sum(name.startswith("talk") for name in ids) == 4


def test_what_is_asked_twice_is_found_with_its_earlier_turns(tmp_path):
    one = data(write(tmp_path))
    assert one.repeats(0) == {"talk/1/1"}  # its first turn is that of talk/0
    other = {"turns": ["w1 w1", TALK[0]["turns"][1]]}  # the same second turn after another first
    rows = [{"turns": TALK[0]["turns"]}, other]
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    three = data(tmp_path, files=["quiz.jsonl", "talk.jsonl.gz", "more.jsonl"])
    assert three.repeats(0) == {"talk/1/1", "more/0/1", "more/0/2"}


def test_problems_belong_to_prompts(tmp_path):
    problems = data(write(tmp_path)).problems()
    assert set(problems) == {"quiz/a/1", "quiz/3/1"}
    assert problems["quiz/a/1"].answer == "3"
    assert problems["quiz/3/1"].prompt == "w8"


def test_identity_follows_prompts_and_not_how_they_are_answered(tmp_path):
    one = data(write(tmp_path))
    (tmp_path / "copy").mkdir()
    shutil.copy(tmp_path / "quiz.jsonl", tmp_path / "copy")
    shutil.copy(tmp_path / "talk.jsonl.gz", tmp_path / "copy")
    assert data(tmp_path / "copy", max_new_tokens=9).identity() == one.identity()
    assert data(tmp_path, turns="first").identity() != one.identity()
    assert data(tmp_path, files="quiz.jsonl").identity() != one.identity()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": "none.jsonl"}, r"none\.jsonl is not there; .*bench\.folder=FOLDER"),
        ({"files": "quiz.txt"}, r"format that is not known; use \.jsonl"),
        ({"files": ["quiz.jsonl", "more/quiz.parquet"]}, "names quiz twice"),
        ({"files": [3]}, "is no path"),
        ({"turns": "second"}, r"bench\.turns=second is not known; use first or all"),
        ({"prompts_per_bench": -1}, "must be 0 or more"),
    ],
)
def test_wrong_settings_are_named(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        data(write(tmp_path), **change).load(0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": 1}, r"line 2 has neither a prompt nor a list of turns"),
        ({"turns": ["a", 3]}, "line 2 has neither"),
        ({"turns": ["a", "  "]}, "line 2 has an empty turn"),
        ({"id": "a", "prompt": "again"}, r"several rows of the id quiz/a"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, message):
    rows = [{"id": "a", "prompt": "w1"}, row]
    (tmp_path / "quiz.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    with pytest.raises(ValueError, match=message):
        data(tmp_path, files="quiz.jsonl").load(0)


# ------------------------------------------------------------------------------- in the pipeline


def test_data_named_after_a_benchmark_is_measured_on(caplog, monkeypatch, tmp_path):
    monkeypatch.setenv("OUTRIDER_BENCHES", str(tmp_path))
    with caplog.at_level(logging.INFO):
        config = compose_config(["data=jsonl", "data.train=mine.jsonl", "data=gsm8k"])
    assert "data=gsm8k is a benchmark, so bench=gsm8k is what is meant" in caplog.text
    assert config.data.train == "mine.jsonl"
    bench = typed(config.bench, "bench")
    assert (bench.folder, bench.names) == (str(tmp_path), ["gsm8k"])
    with pytest.raises(ConfigError, match="data=none is not known"):
        compose_config(["data=none"])
    with pytest.raises(ConfigError, match="bench=gsm9k is not known; did you mean bench=gsm8k"):
        compose_config(["bench=gsm9k"])


def test_choosing_a_benchmark_builds_nothing_else_again(tmp_path):
    write(tmp_path)
    overrides = tiny_overrides(tmp_path / "tiny")
    chosen = ["bench=files", f"bench.files={tmp_path / 'quiz.jsonl'}"]

    def pipeline(*more: str) -> Any:
        config = compose_config([*overrides, *more])
        return build_pipeline(config, typed_settings(config), [*overrides, *more])

    bare, with_bench = pipeline(), pipeline(*chosen)
    for stage in ("prepare", "regenerate", "collect", "profile", "train_router", "export"):
        assert with_bench.locate(stage).identity == bare.locate(stage).identity, stage
    inputs = with_bench.locate("evaluate").identity["inputs"]
    before = bare.locate("evaluate").identity["inputs"]
    changed = {name for name in before if inputs[name] != before[name]}
    assert changed == {"comparison"}
    assert set(inputs) - set(before) == {"bench_answers"}
    compared, alone = (p.locate("compare").identity["inputs"] for p in (with_bench, bare))
    assert set(compared) - set(alone) == {"bench_acceptance"}
    assert {name: compared[name] for name in alone} == alone
    bench = with_bench.groups["bench"]
    scored = with_bench.locate("collect", {**with_bench.groups, SCORED: bench}).identity
    assert scored["inputs"]["answers"] == inputs["bench_answers"]
    trained = {name: key for name, key in before.items() if name.startswith("drafter:")}
    assert trained
    assert trained.items() <= scored["inputs"].items(), "drafters that the benchmark trained"
    other = pipeline(*chosen, "bench.max_new_tokens=9").locate("evaluate").identity["inputs"]
    assert other["bench_answers"] != inputs["bench_answers"]
    assert {name for name in before if other[name] != before[name]} == {"comparison"}


# ---------------------------------------------------------------------------------------- answered


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("answered")
    bench = data(write(root))
    groups = {"data": bench, "target": tiny_config(tiny_target_folder(root / "target"))}
    prompts = root / "prompts"
    prompts.mkdir()
    prepare = typed(compose_config([]).stages.prepare, "stages.prepare")
    assert isinstance(prepare, Prepare)
    assert prepare.run(Workspace(groups, {}, prompts, 3, RUNTIME)) == {BENCH: 9}
    regenerate = regenerate_stage(shard_rows=2).for_groups(groups)
    out = root / "answers"
    out.mkdir()
    inputs = {"prompts": prompts}
    metrics = regenerate.run(Workspace(groups, inputs, out, 3, RUNTIME))
    return {"groups": groups, "inputs": inputs, "out": out, "run": regenerate, "metrics": metrics}


def test_all_turns_are_answered_under_both_laws(answered):
    rows = list(Answers(answered["out"]).rows())
    prompts = load_prompts(answered["inputs"]["prompts"])[BENCH]
    assert len(rows) == answered["metrics"]["num_answers"] == 18
    assert {(a.id, a.law) for a in rows} == {
        (prompt["id"], law) for prompt in prompts for law in ("greedy", "sampled")
    }
    assert {a.split for a in rows} == {BENCH}
    assert rows[0].topk_ids.shape[1] == 0


def test_a_second_turn_follows_the_targets_own_first_answer_of_the_same_law(answered):
    tokenizer = tiny_tokenizer()
    rows = {(a.id, a.law): a for a in Answers(answered["out"]).rows()}
    for number in range(3):
        histories = []
        for law in ("greedy", "sampled"):
            first, second = rows[f"talk/{number}/1", law], rows[f"talk/{number}/2", law]
            said = tokenizer.decode(first.answer_ids, skip_special_tokens=True).strip()
            messages = [
                {"role": "user", "content": TALK[number]["turns"][0]},
                {"role": "assistant", "content": said},
                {"role": "user", "content": TALK[number]["turns"][1]},
            ]
            wanted = prompt_ids(tokenizer, {"messages_json": json.dumps(messages), "text": ""})
            assert second.token_ids[: second.num_prompt_tokens].tolist() == wanted
            histories.append(said)
        assert histories[0] != histories[1], "the laws must differ for this test to see a mix-up"


@pytest.mark.parametrize("kept", [1, 6, 7])
def test_a_run_that_was_killed_between_turns_goes_on(answered, tmp_path, kept):
    """18 answers in shards of two: six shards of first turns, three of second ones."""
    out = tmp_path / "out"
    shutil.copytree(answered["out"], out)
    index = json.loads((out / INDEX).read_text())
    assert len(index["shards"]) == 9
    index["shards"] = index["shards"][:kept]
    (out / INDEX).write_text(json.dumps(index))
    answered["run"].run(Workspace(answered["groups"], answered["inputs"], out, 3, RUNTIME))
    whole, again = (list(Answers(folder).rows()) for folder in (answered["out"], out))
    assert [(a.id, a.law) for a in whole] == [(a.id, a.law) for a in again]
    assert all(torch.equal(a.token_ids, b.token_ids) for a, b in zip(whole, again, strict=True))


def test_a_turn_whose_earlier_one_was_left_out_is_left_out(answered, tmp_path):
    """The first turns take 5 and 6 tokens with the template, the second ones more than 12."""
    run = replace(answered["run"], max_prompt_tokens=12)
    metrics = run.run(Workspace(answered["groups"], answered["inputs"], tmp_path, 3, RUNTIME))
    assert metrics["num_answers"] == 12
    assert metrics["prompts_left_out"] == 6
    run = replace(answered["run"], max_prompt_tokens=5)
    (tmp_path / "less").mkdir()
    less = Workspace(answered["groups"], answered["inputs"], tmp_path / "less", 3, RUNTIME)
    run.run(less)
    assert not any(a.id.endswith("/2") for a in Answers(less.out).rows())


# ------------------------------------------------------------------------------------- in sums


def tables(draw: np.random.Generator) -> list[np.ndarray]:
    """Acceptance of every shape: empty, short, with gaps, certain, impossible."""
    found = []
    for rows, depth in ((0, 3), (1, 3), (2, 3), (7, 3), (41, 3), (13, 3), (5, 3)):
        table = draw.random((rows, depth))
        table[draw.random((rows, depth)) < 0.2] = np.nan
        table[draw.random((rows, depth)) < 0.2] = 1
        table[draw.random((rows, depth)) < 0.2] = 0
        found.append(table)
    return found


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 9])
def test_passes_of_many_are_the_passes_of_each(num_draft_tokens):
    many = tables(np.random.default_rng(0))
    alone = [expected_passes(torch.from_numpy(t[:, :num_draft_tokens])) for t in many]
    np.testing.assert_allclose(passes_of(many, num_draft_tokens), alone, atol=1e-9)
    assert passes_of([], 3).shape == (0,)


def entry(question: str, drafter: str, passes: float, **changes: Any) -> Sums:
    values: dict[str, Any] = {
        "prompt_id": f"{question}/1",
        "question": question,
        "is_bench": True,
        "split": "talk",
        "domain": "chat",
        "family": "writing",
        "law": "greedy",
        "drafter": drafter,
        "tokens": 12.0,
        "passes": passes,
    }
    return Sums(**{**values, **changes})


def test_frames_become_sums_of_what_chose_nothing():
    table = np.array([[1.0, 0.0], [1.0, np.nan], [0.0, 0.0]], dtype=np.float32)
    raw = [
        {
            "prompt_id": f"{split}/q{number}/{turn}",
            "split": split,
            "domain": "chat",
            "family": "talk/writing",
            "law": law,
            "drafter": "ngram",
            "num_tokens": 3,
            "accept": table,
        }
        for split in ("validation", "router_train", "test", BENCH)
        for number in range(2)
        for turn in (1, 2)
        for law in ("greedy", "sampled")
    ]
    sums = sums_of(pd.DataFrame(raw), 2, ["greedy"])
    assert {(s.split, s.family, s.law) for s in sums} == {
        ("test", "talk/writing", "greedy"),
        ("talk", "writing", "greedy"),
    }
    assert {s.question for s in sums if s.is_bench} == {"bench/q0", "bench/q1"}
    assert {s.passes for s in sums} == {2.0}
    bench = [
        row for row in acceptance_rows(sums, by_domain, "domain", HOW) if row["split"] != "test"
    ]
    assert bench == [
        {
            "drafter": "ngram",
            "domain": "talk",
            "split": "talk",
            "law": "greedy",
            "tokens": 12.0,
            "passes": 8.0,
            "num_prompts": 2,  # questions, of two turns each
            "acceptance_length": 1.5,
            "low": 1.5,
            "high": 1.5,
        }
    ]


def test_gains_are_paired():
    """Questions differ widely, the drafters by a tenth everywhere: only pairs can tell."""
    draw = np.random.default_rng(1)
    sums = []
    for number in range(40):
        passes = float(draw.uniform(3, 12))
        sums += [entry(f"q{number}", "generic", passes), entry(f"q{number}", "code", passes / 1.1)]
    gain = paired_gain(sums, "code", "generic", HOW)
    assert gain["ratio"].value == pytest.approx(1.1)
    assert (gain["ratio"].low, gain["ratio"].high) == pytest.approx((1.1, 1.1))
    assert 0 < gain["difference"].low < gain["difference"].value < gain["difference"].high
    alone = acceptance_rows(sums, by_domain, "domain", HOW)
    assert alone[0]["high"] > alone[1]["low"], "intervals of their own overlap"
    back = paired_gain(sums, "generic", "code", HOW)
    assert back["ratio"].value == pytest.approx(1 / 1.1)
    with pytest.raises(ValueError, match="drafter chat has no answers to compare on"):
        paired_gain(sums, "chat", "code", HOW)


def test_the_best_of_several_is_chosen_on_every_answer():
    sums = [
        *(entry("q0", "code", 4.0), entry("q0", "chat", 6.0), entry("q0", "ngram", 2.0)),
        *(entry("q1", "code", 8.0), entry("q1", "chat", 3.0), entry("q1", "ngram", 12.0)),
    ]
    best = [s for s in with_best_of(sums, {"best": ["code", "chat"]}) if s.drafter == "best"]
    assert [s.passes for s in best] == [4.0, 3.0]
    found = acceptance_tables(sums, {"best": ["code", "chat"]}, ["code"], HOW)
    rows = {row["drafter"]: row for row in found["acceptance_by_family"]}
    assert rows["best"]["acceptance_length"] == pytest.approx(24 / 7)
    assert {(row["drafter"], row["against"]) for row in found["gains"]} == {
        *(("chat", "code"), ("ngram", "code"), ("best", "code"))
    }
    assert acceptance_tables(sums, {}, [], HOW)["gains"] == []


def test_comparisons_that_cannot_be_made_are_named():
    check_names(["a", "b"], {"best": ["a", "b"]}, ["best"])
    with pytest.raises(ValueError, match="names the drafter c, which is not in the pool"):
        check_names(["a", "b"], {"best": ["a", "c"]}, [])
    with pytest.raises(ValueError, match="names the drafter d"):
        check_names(["a", "b"], {}, ["b", "d"])
    frame = pd.DataFrame({"law": ["sampled", "greedy"], "temperature": [1.0, 0.0]})
    check_laws(frame, {"greedy": 0.0, "sampled": 1.0})
    with pytest.raises(ValueError, match=r"sampled was answered at temperature 1 and .* 0\.8"):
        check_laws(frame, {"greedy": 0.0, "sampled": 0.8})

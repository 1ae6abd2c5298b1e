"""Would catch: a way of drafting that is not the one named; a K that is not the one decoded with;
plain decoding that drafts; a ratio over other prompts than plain's; prompts that are not the
benchmark's.
"""

import json
from pathlib import Path

import pytest
from tiny import tiny_target_folder

from decode.resolve import resolve_target
from pipeline.bench_pair import drafting_by, main, side_by_side


def test_two_folders_are_compared_side_by_side(tmp_path: Path, capsys) -> None:
    target = tiny_target_folder(tmp_path / "target")
    rows = [{"id": n, "prompt": f"w{n} w{n + 1} w2"} for n in range(5)]
    prompts = tmp_path / "quiz.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out" / "pair.json"
    words = [str(target), str(target), "--prompts", str(prompts), "--num-prompts", "3"]
    words += ["--max-new-tokens", "10", "--draft-lengths", "1", "4", "--dtype", "float32"]
    main([*words, "--out", str(out)])
    results = json.loads(out.read_text())
    plain, one, four = results["rows"]
    assert [row["method"] for row in results["rows"]] == ["plain", "K=1", "K=4"]
    assert plain["acceptance_length"] == 1
    # The drafter is the target itself: everything is accepted, so a pass emits K + 1 tokens.
    assert 1.6 < one["acceptance_length"] <= 2
    assert 3 < four["acceptance_length"] <= 5
    assert {row["num_prompts"] for row in results["rows"]} == {3}
    assert results["prompts"] == {"quiz.jsonl": 3}
    assert results["audit"]["different"] == {"K=1": 0, "K=4": 0}
    assert "speed over plain" in capsys.readouterr().out


def test_two_ways_of_drafting_race(tmp_path: Path) -> None:
    target = tiny_target_folder(tmp_path / "target")
    prompts = tmp_path / "quiz.jsonl"
    prompts.write_text(json.dumps({"id": 1, "prompt": "w1 w2"}) + "\n")
    settings = {"num_prompts": 1, "max_new_tokens": 8, "draft_lengths": [2], "temperature": 0.0}
    ways = ("auto", "transformers")
    results = side_by_side(target, target, prompts, **settings, drafting=ways, backend="native")
    methods = [row["method"] for row in results["rows"]]
    assert methods == ["plain", "K=2, auto", "K=2, transformers"]
    assert results["backend"] == "native"
    loaded = resolve_target(target, tokenizer=None, device="cpu", dtype=None)
    readers = [drafting_by(way, target, loaded).reader().name for way in ways]
    assert readers == ["native", "transformers"]
    with pytest.raises(ValueError, match="drafting=transformers needs"):
        drafting_by("transformers", "ngram", loaded)

"""Would catch: texts that part and are not counted, or counted past where they part; an arm that
does not draft as it is called; company that is not there; a seed that differs between arms.
"""

import json
from pathlib import Path

import pytest
from tiny import tiny_target_folder

from pipeline import bench_equality
from pipeline.bench_equality import compare, main, totals


def test_texts_count_up_to_where_they_part() -> None:
    wanted = [[1, 2, 3, 4], [5, 6], [7, 8, 9]]
    found = compare(wanted, [[1, 2, 9, 4], [5, 6], [7, 8]])
    assert found == {"tokens": 3 + 2 + 3, "texts": 3, "parted": 2, "where": {0: 2, 2: 2}}
    same = compare(wanted, wanted)
    assert (same["tokens"], same["parted"]) == (9, 0)


def bench(folder: Path) -> list[str]:
    """Words of a call on a tiny target."""
    target = tiny_target_folder(folder / "target")
    rows = [{"id": n, "prompt": f"w{n} w{n + 1} w2"} for n in range(3)]
    prompts = folder / "quiz.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [str(target), "ngram", str(target), "--prompts", str(prompts), "--num-prompts", "3"]
    words += ["--max-new-tokens", "8", "--draft-lengths", "1", "3", "--batches", "1", "3"]
    return [*words, "--backend", "native", "--dtype", "float32", "--out", str(folder / "out.json")]


def test_every_arm_writes_the_text_of_plain_decoding(tmp_path: Path, capsys) -> None:
    main(bench(tmp_path))
    results = json.loads((tmp_path / "out.json").read_text())
    drafting = ["ngram, K=1", "ngram, K=3", "target, K=1", "target, K=3", "ucb1"]
    expected = [(1, arm) for arm in drafting] + [(3, arm) for arm in ["plain", *drafting]]
    for temperature in (0.0, 0.8):
        rows = [row for row in results["rows"] if row["temperature"] == temperature]
        assert [(row["batch"], row["arm"]) for row in rows] == expected
    sums = totals(results["rows"])
    assert all(row["parted"] == 0 and row["texts"] == 33 for row in sums.values())
    assert min(row["tokens"] for row in sums.values()) > 33
    assert "rows at once" in capsys.readouterr().out


def test_another_law_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under rejection coupling a text depends on what was drafted: it must be found to part."""
    whole = bench_equality.SpeculativeDecoder
    monkeypatch.setattr(
        bench_equality,
        "SpeculativeDecoder",
        lambda *given, **named: whole(*given, **{**named, "coupling": "rejection"}),
    )
    main([*bench(tmp_path), "--temperatures", "0.8"])
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert sum(row["parted"] for row in rows) > 0

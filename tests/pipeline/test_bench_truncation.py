"""Would catch: a bias of other tokens than the answer's; rows of one law or k under another's name;
means that weigh a short answer like a long one.
"""

import json
from pathlib import Path

import pytest
import torch
from tiny import VOCAB_SIZE, tiny_target_folder

from drafters.losses import DIVERGENCES
from drafters.truncation import TruncationBias
from pipeline.bench_truncation import _means, main

NAMES = list(DIVERGENCES)


def test_what_is_left_out_is_measured_on_the_answers(tmp_path: Path, capsys) -> None:
    target = tiny_target_folder(tmp_path / "target")
    rows = [{"id": n, "prompt": f"w{n} w{n + 1} w2"} for n in range(4)]
    prompts = tmp_path / "quiz.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "bias.json"
    torch.manual_seed(0)
    words = [str(target), str(target), "--prompts", str(prompts), "--num-prompts", "3"]
    main([*words, "--max-new-tokens", "5", "--top", "2", str(VOCAB_SIZE), "--out", str(out)])
    found = {(r["temperature"], r["loss"], r["k"]): r for r in json.loads(out.read_text())["rows"]}
    for temperature in (0, 1):
        all_known = found[temperature, "tv", VOCAB_SIZE]
        assert all_known["mean_error"] == pytest.approx(0, abs=1e-6)
        assert all_known["num_tokens"] <= 15
        # The drafter is the target, so nothing is lost but what the truncated tail seems to be.
        assert found[temperature, "tv", 2]["mean_loss"] == pytest.approx(0, abs=1e-5)
        assert found[temperature, "tv", 2]["mean_error"] > 0.01
    assert "cosine" in capsys.readouterr().out


def test_answers_count_by_their_tokens() -> None:
    one, other = ({7: {n: TruncationBias(v, 2 * v, 0.5, 1.0) for n in NAMES}} for v in (1.0, 4.0))
    rows = _means([(1, one), (3, other)], 0.5, [7])
    assert {row["mean_error"] for row in rows} == {(1 + 3 * 4) / 4}
    assert [row["loss"] for row in rows] == NAMES
    assert {row["num_tokens"] for row in rows} == {4}


def test_a_drafter_without_logits_is_refused(tmp_path: Path) -> None:
    target = tiny_target_folder(tmp_path / "target")
    with pytest.raises(ValueError, match="NgramDrafter has no logits"):
        main([str(target), "ngram", "--prompts", str(tmp_path / "none.jsonl")])
    with pytest.raises(ValueError, match=r"--top names .98.; give values from 1 to 97"):
        main([*map(str, (target, target)), "--prompts", "none.jsonl", "--top", "98"])

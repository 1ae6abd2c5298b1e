"""Would catch: a router folder that is not what was trained, a report on the wrong split, a missing
baseline, a control that learned from true labels, runs that differ with equal seeds, a split that
is missing until training fails, numbers that JSON cannot hold.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from workspace import workspace
from world import HashEncoder, make_rows

from decode.types import Sampling
from pipeline import train_router
from pipeline.acceptance import AcceptanceWriter
from pipeline.models import EncoderConfig
from pipeline.train_router import TrainRouter
from router.checkpoint import load_router
from router.examples import collect_examples
from router.head import HeadSettings

SETTINGS = {
    "hidden": 24,
    "penalties": [0.01, 0.1],
    "learning_rate": 0.02,
    "max_steps": 80,
    "patience": 20,
    "neighbours": [5, 20],
    "num_resamples": 100,
}


@pytest.fixture(autouse=True)
def _hash_encoder(monkeypatch):
    monkeypatch.setattr(train_router, "SentenceEncoder", lambda folder, device: HashEncoder())
    monkeypatch.setattr(train_router, "resolve_encoder", lambda config: Path("unused"))


def write_acceptance(folder: Path, *, without: tuple[str, ...] = ()) -> Path:
    rows = [row for row in make_rows(0, informative=True) if row.split not in without]
    rows += [  # the test prompts in other words, and a prompt on which nothing was proposed
        dataclasses.replace(row, split="paraphrase", prompt_id=f"again-{row.prompt_id}")
        for row in rows
        if row.split == "test" and row.law == "greedy"
    ]
    rows.append(
        dataclasses.replace(
            rows[0], prompt_id="silent", split="test", accept=np.full((4, 4), np.nan)
        )
    )
    folder.mkdir(parents=True)
    with AcceptanceWriter(folder) as writer:
        writer.write([vars(row) for row in rows])
    return folder


def groups() -> dict[str, object]:
    config = EncoderConfig(
        name_or_path="some/encoder", revision=None, wheel=None, wheel_sha256=None
    )
    return {"encoder": config}


def run(folder: Path, acceptance: Path, **changes: object) -> dict[str, object]:
    stage = TrainRouter(**{**SETTINGS, **changes})  # type: ignore[arg-type]
    return stage.run(workspace(groups(), {"acceptance": acceptance}, folder))


def test_the_folder_holds_the_router_its_history_and_what_it_is_worth(tmp_path):
    metrics = run(tmp_path / "out", write_acceptance(tmp_path / "acceptance"))
    assert (
        metrics["test_nll_router_minus_population_high"] < -0.02
    )  # world.py: 0.06 can be explained
    assert metrics["paraphrase_nll_router"] < metrics["paraphrase_nll_population"] - 0.02
    assert abs(metrics["test_nll_shuffled"] - metrics["test_nll_population"]) < 0.006
    assert metrics["prior_milliseconds"] > 0

    report = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert set(report["splits"]) == {"validation", "test", "paraphrase"}
    test = report["splits"]["test"]
    assert test["num_prompts"] == 90  # 30 a topic; the silent one is not among them
    assert set(test["methods"]) == {"router", "population", "neighbours", "shuffled"}
    assert set(test["domains"]) == {"code", "chat", "reasoning"}
    assert test["methods"]["router"]["nll"] == metrics["test_nll_router"]
    bins = test["reliability"]["router"]
    assert sum(row["tokens"] for row in bins) == pytest.approx(test["num_tokens"])

    router = load_router(tmp_path / "out", HashEncoder())
    lookup = [
        router.prior(text, 20, Sampling()).mean["lookup"] for text in ("def loop", "dinner story")
    ]
    assert lookup[0] > lookup[1] + 0.5
    lines = [
        json.loads(line) for line in (tmp_path / "out" / "history.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == list(range(len(lines)))
    assert min(line["validation_nll"] for line in lines) < lines[0]["validation_nll"]

    rows = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert {row["split"] for row in rows} == {"validation", "test", "paraphrase"}
    one = rows[0]
    prior = {"router", "population", "neighbours", "shuffled", "acceptance"}
    assert all(0 <= one[name] <= 1 for name in prior)


def test_equal_seeds_write_equal_files(tmp_path):
    acceptance = write_acceptance(tmp_path / "acceptance")
    for name in ("one", "two"):
        run(tmp_path / name, acceptance)
    for file in ("model.safetensors", "config.json", "predictions.json", "history.jsonl"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), (
            file
        )


@pytest.mark.parametrize("split", ["router_train", "validation"])
def test_a_missing_split_is_named(tmp_path, split):
    acceptance = write_acceptance(tmp_path / "acceptance", without=(split,))
    with pytest.raises(ValueError, match=f"no draft on a prompt of split {split}.*data config"):
        run(tmp_path / "out", acceptance)


def test_no_test_split_is_no_obstacle(tmp_path):
    metrics = run(tmp_path / "out", write_acceptance(tmp_path / "acceptance", without=("test",)))
    assert "validation_nll_router" in metrics
    assert "test_nll_router" not in metrics


def test_the_yaml_lists_the_fields_and_fits_the_head():
    import yaml

    text = Path(train_router.__file__).parents[1] / "conf" / "stages" / "train_router.yaml"
    values = yaml.safe_load(text.read_text())
    assert values.pop("_target_") == "pipeline.train_router.TrainRouter"
    assert set(values) == {field.name for field in dataclasses.fields(TrainRouter)}
    shared = {field.name for field in dataclasses.fields(HeadSettings)}
    assert shared <= set(values)


def test_collected_rows_survive_the_disk(tmp_path):
    acceptance = write_acceptance(tmp_path / "acceptance")
    ours = collect_examples(make_rows(0, informative=True)).split("validation")
    theirs = train_router.read_examples(acceptance).split("validation")
    assert (ours.trials == theirs.trials).all()
    assert (ours.successes == theirs.successes).all()

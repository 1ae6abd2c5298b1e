"""Would catch: one drafter's curve drawn as another's; a curve by law taken for one of a domain; a
thinned curve that loses its end; a resumed run's steps counted once only, or twice; an older
artifact that breaks the report; an ancestor listed twice or not at all; an idle GPU praised.
"""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline import learning
from pipeline.learning import behind, curves, processor, stage_seconds, thinned, training_costs
from pipeline.manifest import finish

METRICS = {"num_steps": 20, "best_step": 10, "num_tokens": 900, "tokens_per_second": 50.0}
HISTORY = [
    {"step": 0, "acceptance_length": 1.0, "acceptance_length/chat": 1.1},
    {"step": 10, "loss": 2.0, "learning_rate": 0.1, "step_seconds": 0.5},
    {"step": 20, "loss": 1.0, "step_seconds": 9.0},  # killed, and done again
    {"step": 20, "loss": 1.5, "step_seconds": 0.25, "acceptance_length@greedy": 1.3},
]


def artifact(root: Path, name: str, inputs: dict[str, str], **metrics: Any) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    stage = folder.parent.name
    finish(folder, {"stage": stage, "inputs": inputs}, metrics, time.time() - 3)
    return folder


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Path]:
    answers = artifact(tmp_path, "regenerate/a", {"prompts": "prepare/p"})
    artifact(tmp_path, "prepare/p", {})
    parent = artifact(tmp_path, "distill/g", {"answers": "regenerate/a"}, **METRICS)
    text = "".join(json.dumps(entry) + "\n" for entry in HISTORY)
    (parent / "history.jsonl").write_text(text)
    needs = {"answers": "regenerate/a", "parent": "distill/g"}
    child = artifact(tmp_path, "finetune/c", needs)  # as an older version left it
    return {"answers": answers, "drafter:generic": parent, "drafter:code": child}


def test_curves_are_overall_and_by_domain(inputs: dict[str, Path]) -> None:
    rows = curves({"generic": inputs["drafter:generic"], "code": inputs["drafter:code"]})
    assert {row["drafter"] for row in rows} == {"generic"}
    assert [(row["curve"], row["step"], row["value"]) for row in rows] == [
        ("acceptance_length", 0, 1.0),
        ("acceptance_length/chat", 0, 1.1),
        ("loss", 10, 2.0),
        ("loss", 20, 1.5),
    ]


@pytest.mark.parametrize("number", [0, 1, 150, 151, 449, 1000])
def test_long_curves_are_thinned_to_their_end(number: int) -> None:
    points = [(step, float(step % 2)) for step in range(number)]
    found = thinned(points)
    assert len(found) <= learning.MOST_POINTS
    assert found[-1:] == points[-1:] or found[-1][0] == number - 1
    if number <= learning.MOST_POINTS:
        assert found == points
    if number == 1000:
        assert {round(value, 9) for _, value in found[:-1]} <= {round(3 / 7, 9), round(4 / 7, 9)}


def test_costs_are_those_of_the_artifact_and_what_is_unknown_is_none(
    inputs: dict[str, Path],
) -> None:
    new, old = training_costs({n: inputs[f"drafter:{n}"] for n in ("generic", "code")}, timed=True)
    assert {name: new[name] for name in METRICS} == METRICS
    assert new["step_seconds"] == pytest.approx(0.75)
    assert new["seconds"] >= 3
    assert (new["stage"], old["stage"]) == ("distill", "finetune")
    assert old["step_seconds"] is old["num_tokens"] is old["flop_utilisation"] is None
    assert old["seconds"] >= 3


def test_every_artifact_behind_is_listed_once_its_own_inputs_first(inputs: dict[str, Path]) -> None:
    rows = stage_seconds(inputs.values(), timed=True)
    assert [row["stage"] for row in rows] == ["prepare", "regenerate", "distill", "finetune"]
    assert rows[0]["signature"] == "p"
    assert all(row["seconds"] >= 3 for row in rows)


def test_nothing_trained_is_nothing_to_tell(inputs: dict[str, Path]) -> None:
    found = behind({"answers": inputs["answers"]}, timed=False)
    assert (found["curves"], found["training"], found["training_cost"]) == ([], [], [])
    assert len(found["stage_seconds"]) == 2
    assert len(behind(inputs, timed=False)["training_cost"]) == 2


def test_two_runs_under_a_virtual_clock_tell_the_same(inputs: dict[str, Path]) -> None:
    """The system's seconds are in the manifests all the same."""
    before = behind(inputs, timed=False)
    for folder in inputs.values():
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps({**manifest, "seconds": 99.0}))
    assert behind(inputs, timed=False) == before
    assert behind(inputs, timed=True) != before


@pytest.mark.parametrize(
    ("gpu", "metrics", "name"),
    [
        (None, {}, "EPYC (2 cores)"),
        ("H200", {}, "H200"),
        ("H200", {"device": "cuda"}, "H200"),
        ("H200", {"device": "cpu"}, "EPYC (2 cores)"),
    ],
)
def test_the_processor_is_the_one_that_worked(
    gpu: str | None, metrics: dict[str, str], name: str
) -> None:
    hardware = {"cpu": "EPYC", "cores": 2, "gpu": gpu}
    assert processor({"hardware": hardware, "metrics": metrics}) == name

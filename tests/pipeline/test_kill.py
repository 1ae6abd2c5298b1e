"""The main job is killed and goes on: equal weights, answers, costs, router, tables in the end.

Would catch: a folder taken for finished that is not; finished work built again; a checkpoint or
journal torn by a kill; a step that depends on how far the last run came; seconds that were not
taken from the injected clock; what a killed run leaves lying about.

No tolerance: the clock is virtual and sums are made by one thread, so equal runs are equal bit for
bit. `tests/soak.py` compares, and says what may differ; 20 kills are its own affair.
"""

from pathlib import Path

import pytest
from soak import START, Kill, Moment, Process, Reference, differences, plan_kills, soak
from tiny import tiny_overrides

SECONDS = {START: 3.0, "prepare/1": 0.2, "evaluate/2": 4.0, "all/3": 0.01}


def test_killed_three_times_it_ends_as_if_undisturbed(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GIT_DIR", "")  # soak() sets it; this puts it back
    report = soak(tmp_path, tiny_overrides(tmp_path / "tiny"), kills=3, seed=0)
    assert len(report) == 3


@pytest.mark.parametrize("kills", [1, 3, 4, 20])
def test_every_kill_is_planned_and_falls_within_its_artifact(kills):
    reference = Reference(SECONDS, {"evaluate/2": 9, "prepare/1": 5})
    plan = plan_kills(reference, kills, seed=1)
    assert len(plan) == kills
    assert plan == plan_kills(reference, kills, seed=1)
    order = [list(SECONDS).index(moment.unit) for moment in plan]
    assert order == sorted(order)
    assert len({moment.unit for moment in plan}) == min(kills, len(SECONDS) - 1)
    for moment in plan:
        kill = moment.kill(reference, set())
        assert kill.unit == moment.unit
        assert (kill.seconds is None) != (kill.change is None)
        assert kill.seconds is None or 0 <= kill.seconds <= SECONDS[kill.unit]
        assert kill.change is None or 1 <= kill.change <= reference.changes[kill.unit]


def made(root: Path, text: str, **metrics: float) -> Path:
    """A root with one finished artifact."""
    from pipeline.manifest import finish

    out = root / "collect" / "1"
    out.mkdir(parents=True)
    (out / "rows").write_text(text)
    finish(out, {"stage": "collect"}, metrics, 0.0)
    return root


def test_the_comparison_sees_what_differs(tmp_path):
    whole = made(tmp_path / "whole", "a", length=2.0)
    assert list(differences(whole, made(tmp_path / "same", "a", length=2.0))) == []
    (text,) = differences(whole, made(tmp_path / "text", "b", length=2.0))
    assert "file rows" in text
    (metric,) = differences(whole, made(tmp_path / "metric", "a", length=2.5))
    assert "metric length: 2.0 against 2.5" in metric
    (tmp_path / "same" / "collect" / "1" / "rest").write_text("")
    (left,) = differences(whole, tmp_path / "same")
    assert "rest was left behind" in left
    (missing,) = differences(whole, tmp_path / "nothing")
    assert "in one run only" in missing


def test_a_file_that_its_manifest_does_not_describe_is_seen(tmp_path):
    whole = made(tmp_path / "whole", "a")
    (whole / "collect" / "1" / "rows").write_text("b")
    with pytest.raises(AssertionError, match="is not what its manifest says"):
        list(differences(whole, whole))


def test_a_kill_moves_on_where_its_artifact_is_finished():
    reference = Reference(SECONDS, {"evaluate/2": 9})
    moment = Moment("prepare/1", 0.5, by_change=True)
    assert moment.kill(reference, set()) == Kill("prepare/1", 0.1, None)
    assert moment.kill(reference, {"prepare/1"}) == Kill("evaluate/2", None, 5)
    assert moment.kill(reference, set(SECONDS)).unit == "all/3"


def test_the_kill_is_due_when_its_artifact_is_finished(tmp_path):
    process = Process.__new__(Process)
    process.began, process.there, process.done = {}, {"prepare/1"}, {}
    assert process.is_due(Kill("prepare/1", None, 3))
    assert not process.is_due(Kill("evaluate/2", None, 3))
    assert not process.is_due(Kill("evaluate/2", 0.0, None))
    process.began = {"evaluate/2": 0.0}
    assert process.is_due(Kill("evaluate/2", 0.0, None))

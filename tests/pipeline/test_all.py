"""The main job ends with where everything is, the table and what to deploy.

Would catch: a part of the lineage that is left out or counted twice; a table that differs from
evaluate's results; a run that prints nothing because everything was there already; a cold run that
needs build_missing=true.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from test_report import ratio, results
from toys import RUNTIME

from pipeline.all import All, lineage
from pipeline.headline import finite
from pipeline.stage import Need, Pipeline, Stage, Workspace

RESULTS = finite(results({"plain": ratio(1.0, 1.0, 1.0)}, {}))


@dataclass(frozen=True, kw_only=True)
class Prepare(Stage):
    def run(self, workspace: Workspace) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, kw_only=True)
class Evaluate(Prepare):
    def needs(self, groups: Mapping[str, Any]) -> dict[str, Need]:
        return {"prompts": Need("prepare")}

    def run(self, workspace: Workspace) -> dict[str, Any]:
        (workspace.out / "results.json").write_text(json.dumps(RESULTS))
        return {}


class Export(Prepare):
    def needs(self, groups: Mapping[str, Any]) -> dict[str, Need]:
        return {"evaluate": Need("evaluate"), "prompts": Need("prepare")}


@pytest.fixture
def pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    stages = {"prepare": Prepare(), "evaluate": Evaluate(), "export": Export(), "all": All()}
    return Pipeline(stages=stages, groups={}, root=tmp_path, seed=0, runtime=RUNTIME)


def test_the_main_job_shows_the_lineage_the_table_and_what_to_deploy(pipeline, capsys):
    for _ in range(2):
        folder = pipeline.run("all")
        out = capsys.readouterr().out
        assert out == (folder / "summary.txt").read_text()
        lines = out.splitlines()
        assert lines[0].startswith("3 artifacts, ")
        assert [line.split()[0] for line in lines[1:4]] == ["prepare", "evaluate", "export"]
        assert "report.html" in out
        assert out.count("policy + router") == 2  # once a law: one table
        assert lines[-3] == RESULTS["deployment"]
        assert [line.split(":")[0] for line in lines[-2:]] == ["  ngram", "  code"]


def test_lineage_lists_what_came_before_first(pipeline):
    pipeline.run("all")
    found = [folder.parent.name for folder in lineage(pipeline.locate("export").folder)]
    assert found == ["prepare", "evaluate", "prepare", "export"]

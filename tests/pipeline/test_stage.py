"""Artifacts are found, built, resumed and refused as their identities say.

Would catch: a setting, group, seed, format or input that does not change the signature; a runtime
that does; a missing input that is built unasked; a finished artifact that is built again; a forced
one that is not, or is built twice in one run; a half-written folder taken for finished or left
behind; another identity or a damaged file that is reused; an input's content that is not hashed.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from toys import Count, Group, make, record

from drafters.base import BuildContext, DrafterConfig
from pipeline import stage as stage_module
from pipeline.manifest import MANIFEST, read_manifest
from pipeline.runtime import Runtime
from pipeline.stage import describe


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def test_a_stage_is_built_once_and_found_afterwards(tmp_path):
    built: list[str] = []
    pipeline = make(tmp_path, **record(built))
    folder = pipeline.run("count")
    assert pipeline.run("count") == folder
    assert built == ["count"]
    assert read_manifest(folder)["metrics"] == {"resumed_at": 0}
    assert len(folder.name) >= 12


def test_what_is_missing_upstream_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"run stage=count first, or add build_missing=true"):
        make(tmp_path).run("add")
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_upstream_is_built_when_asked(tmp_path):
    built: list[str] = []
    folder = make(tmp_path, build_missing=True, **record(built)).run("add")
    assert (folder / "sum").read_text() == "6"
    assert built == ["count", "count", "add"], "the same stage, with another group swapped in"
    inputs = read_manifest(folder)["identity"]["inputs"]
    assert inputs["counted"] != inputs["other"]
    assert all((tmp_path / name / MANIFEST).exists() for name in inputs.values())


def test_a_stage_for_everything_builds_what_it_needs_and_runs_every_time(tmp_path):
    built: list[str] = []
    pipeline = make(tmp_path, **record(built))
    pipeline.run("show")
    pipeline.run("show")
    assert built == ["count", "count", "add", "show", "show"]


def test_force_builds_the_stage_alone_and_for_everything_each_part_once(tmp_path):
    built: list[str] = []
    make(tmp_path).run("show")
    make(tmp_path, force=True, **record(built)).run("add")
    assert built == ["add"]
    built.clear()
    make(tmp_path, force=True, **record(built)).run("show")
    assert sorted(built) == ["add", "count", "count", "show"]


def test_force_does_not_resume(tmp_path):
    folder = make(tmp_path).run("count")
    (folder / "step-2").unlink()
    make(tmp_path, force=True).run("count")
    assert read_manifest(folder)["metrics"] == {"resumed_at": 0}


CHANGES = {
    "settings": lambda p: replace(
        p, stages={**p.stages, "count": Count(num_steps=4, step_seconds=0)}
    ),
    "group": lambda p: replace(p, groups={"data": Group(name="yours")}),
    "seed": lambda p: replace(p, seed=1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_the_output_changes_the_signature_down_the_line(tmp_path, change):
    before, after = make(tmp_path), change(make(tmp_path))
    assert before.locate("count").signature != after.locate("count").signature
    assert before.locate("add").signature != after.locate("add").signature


def test_a_new_format_changes_the_signature(tmp_path, monkeypatch):
    before = make(tmp_path).locate("add").signature
    monkeypatch.setattr(Count, "format_version", 2)
    assert make(tmp_path).locate("add").signature != before


def test_the_runtime_counts_only_where_something_is_timed(tmp_path):
    one = make(tmp_path)
    two = replace(one, runtime=Runtime(device="cpu", threads=7, clock="system"))
    assert one.locate("count").signature == two.locate("count").signature
    assert one.locate("add").signature != two.locate("add").signature


def test_other_hardware_makes_another_timing(tmp_path, monkeypatch):
    before = make(tmp_path).locate("add").signature
    monkeypatch.setattr(stage_module, "hardware", lambda: {"cpu": "another"})
    assert make(tmp_path).locate("add").signature != before
    assert make(tmp_path).locate("add").identity["hardware"]["cpu"] == "another"


def test_the_whole_identity_is_compared_on_reuse(tmp_path):
    folder = make(tmp_path).run("count")
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["identity"]["seed"] = 5
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="built from another identity; delete the folder"):
        make(tmp_path).run("count")


@pytest.mark.parametrize("damage", ["truncated", "changed", "gone"])
def test_a_damaged_input_is_refused_by_name(tmp_path, damage):
    folder = make(tmp_path).run("count")
    file = folder / "step-1"
    {
        "truncated": lambda: file.write_text(""),
        "changed": lambda: file.write_text("9"),
        "gone": file.unlink,
    }[damage]()
    with pytest.raises(ValueError, match=rf"step-1 .*; delete .*{folder.name} and run stage=count"):
        make(tmp_path, build_missing=True).run("add")
    assert not (tmp_path / "add").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"identity": {}}'])
def test_a_damaged_manifest_is_refused_by_name(tmp_path, content):
    folder = make(tmp_path).run("count")
    (folder / MANIFEST).write_text(content)
    with pytest.raises(ValueError, match=r"manifest.json is damaged; delete"):
        make(tmp_path).run("count")


def test_a_failed_stage_leaves_nothing_half_written(tmp_path):
    with pytest.raises(ValueError, match="the toy has failed"):
        make(tmp_path).run("fail")
    assert [path.suffix for path in (tmp_path / "fail").iterdir()] == [".lock"]


def test_a_failed_stage_that_resumes_keeps_its_work_and_no_manifest(tmp_path):
    pipeline = make(tmp_path)
    with pytest.raises(ValueError, match="the toy has failed"):
        pipeline.run("fail_resuming")
    artifact = pipeline.locate("fail_resuming")
    assert (artifact.folder / "half").exists()
    assert not artifact.finished


@dataclass(frozen=True, kw_only=True)
class NamedContent:
    path: str

    def identity(self) -> dict[str, str]:
        return {"content": "abc"}


@dataclass(frozen=True, kw_only=True)
class Borrowing(DrafterConfig):
    source: str | None

    def build(self, context: BuildContext) -> None:
        raise NotImplementedError


def test_a_config_that_names_content_is_described_by_it(tmp_path):
    assert describe({"a": [NamedContent(path="/x")]}) == {"a": [{"content": "abc"}]}
    assert describe(Group(name="x")) == {"kind": "toys.Group", "name": "x"}


def test_a_drafters_own_model_is_described_by_its_content_and_not_by_its_path(tmp_path):
    from test_models import tiny_folder

    one, two = tiny_folder(tmp_path / "one"), tiny_folder(tmp_path / "two")
    other = tiny_folder(tmp_path / "other", fill=2)
    described = [describe(Borrowing(source=str(folder))) for folder in (one, two, other)]
    assert described[0] == described[1] != described[2]
    assert describe(Borrowing(source=None))["source"] is None

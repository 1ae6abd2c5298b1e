"""What W&B is given, read back from the offline run's own file.

Would catch: a curve that is lost, shifted or has the wrong step; a step of a resumed run logged
twice; a config without identity or lineage; a run id that is not the artifact's; a table or a plot
left out, or marked text that is not escaped; a W&B failure that breaks a run or is repeated;
anything sent while tracking is disabled.
"""

import json
import logging
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from wandb.proto import wandb_internal_pb2

from pipeline import tracking
from pipeline.history import read_history
from pipeline.manifest import finish
from pipeline.stage import Artifact
from pipeline.tracking import Tracking, publish

BLOCK_BYTES, FILE_HEADER_BYTES, CHUNK_HEADER_BYTES = 32768, 7, 7
FLUSH_SECONDS = 20.0  # a bound against hanging; it takes milliseconds
IDENTITY = {"stage": "distill", "seed": 3, "inputs": {"answers": "regenerate/abc"}, "groups": {}}
HISTORY = [
    {"step": 0, "loss": 2.0, "acceptance_length": 1.5},
    {"step": 10, "loss": 1.0, "note": "text is no curve"},
    {"step": 20, "loss": 9.0},
    {"step": 20, "loss": 0.5, "acceptance_length": 2.5},
]


def records(path: Path) -> Iterator[wandb_internal_pb2.Record]:
    """The records of a .wandb file: LevelDB's log format (blocks of 32 KiB) behind 7 bytes."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    place, parts = FILE_HEADER_BYTES, []
    while place + CHUNK_HEADER_BYTES <= len(data):
        left = BLOCK_BYTES - place % BLOCK_BYTES
        if left < CHUNK_HEADER_BYTES:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        place += CHUNK_HEADER_BYTES
        parts.append(data[place : place + length])
        place += length
        if kind in (1, 4):  # whole, or last of several
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record


def read_back(root: Path) -> dict[str, Any]:
    """Run id, config, curves and summary of the one offline run under `root`."""
    (path,) = root.glob("wandb/offline-run-*/run-*.wandb")
    until = time.monotonic() + FLUSH_SECONDS
    kinds: list[str | None] = []
    while "exit" not in kinds:  # W&B's own process writes the file
        assert time.monotonic() < until, kinds
        kept = list(records(path))
        kinds = [record.WhichOneof("record_type") for record in kept]
    found: dict[str, Any] = {"config": {}, "history": {}, "summary": {}}
    for kind, record in zip(kinds, kept, strict=True):
        if kind == "run":
            found["id"] = record.run.run_id
            found["config"] |= values(record.run.config.update)
        elif kind == "history":
            logged = values(record.history.item)
            found["history"].setdefault(logged.pop("_step"), {}).update(logged)
        elif kind == "summary":
            found["summary"] |= values(record.summary.update)
    return found


def values(items: Any) -> dict[str, Any]:
    """Key -> value; a nested key becomes a mapping."""
    found: dict[str, Any] = {}
    for item in items:
        *outer, key = item.nested_key or [item.key]
        inner = found
        for name in outer:
            inner = inner.setdefault(name, {})
        inner[key] = json.loads(item.value_json)
    return found


def artifact(root: Path, **files: str) -> Artifact:
    folder = root / "distill" / "0123456789abcdef"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    finish(folder, IDENTITY, {"final_loss": 0.5}, time.time() - 4)
    return Artifact("distill", IDENTITY, folder)


def mode(name: str) -> Tracking:
    return Tracking(mode=name, project="toys", entity=None)


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    tracking._say_failed.cache_clear()


def test_an_offline_run_holds_curves_config_lineage_and_summary(tmp_path):
    text = "".join(json.dumps(entry) + "\n" for entry in HISTORY)
    publish(mode("offline"), artifact(tmp_path, history__jsonl=text), tmp_path)
    run = read_back(tmp_path)
    assert run["id"] == "distill-0123456789abcdef"
    curves = {
        step: {key: value for key, value in logged.items() if key[0] != "_"}
        for step, logged in run["history"].items()
    }
    assert curves == {
        0: {"loss": 2.0, "acceptance_length": 1.5},
        10: {"loss": 1.0},
        20: {"loss": 0.5, "acceptance_length": 2.5},
    }
    assert run["config"]["lineage"] == {"answers": "regenerate/abc"}
    assert run["config"]["seed"] == 3
    assert run["config"]["packages"]["python"] == sys.version.split()[0]
    assert run["summary"]["final_loss"] == 0.5
    assert run["summary"]["seconds"] >= 4


def test_tables_and_plots_are_logged(tmp_path):
    from matplotlib.figure import Figure

    results = {"wall": [{"arm": "ngram", "speed": 2.0, "k": [1, 2]}, {"arm": "off"}], "note": "x"}
    made = artifact(tmp_path, results__json=json.dumps(results))
    Figure(figsize=(1, 1)).savefig(made.folder / "speed.png")
    publish(mode("offline"), made, tmp_path)
    (logged,) = read_back(tmp_path)["history"].values()
    assert logged["speed"]["_type"] == "image-file"
    assert logged["wall_table"]["_type"] == "table-file"
    (table,) = tmp_path.glob("wandb/offline-*/files/media/table/*.json")
    content = json.loads(table.read_text())
    assert content["columns"] == ["arm", "speed", "k"]
    assert content["data"] == [["ngram", 2.0, "[1, 2]"], ["off", None, None]]


def test_samples_are_marked_and_curves_have_their_domains(tmp_path):
    marked = [["accepted", "</p>x"], ["refused", " y"], ["accepted", "z"]]
    facts = {"id": "p", "domain": "chat", "temperature": 0.0, "prompt": "?", "is_cut": False}
    row = {"drafter": "ngram", "num_draft_tokens": 3, "acceptance_length": 1.5, **facts}
    results = json.dumps({"samples": [{**row, "spans": marked}]})
    history = '{"step": 3, "acceptance_length/chat": 1.5, "acceptance_length/chat@greedy": 1.6}\n'
    made = artifact(tmp_path, results__json=results, history__jsonl=history)
    publish(mode("offline"), made, tmp_path)
    (logged,) = read_back(tmp_path)["history"].values()
    assert logged["acceptance_length/chat"] == 1.5
    assert logged["acceptance_length/chat@greedy"] == 1.6
    (table,) = tmp_path.glob("wandb/offline-*/files/media/table/*.json")
    content = json.loads(table.read_text())
    assert content["data"][0][content["columns"].index("spans")] == "⟦</p>x⟧ y⟦z⟧"
    assert logged["samples"]["_type"] == "html-file"
    (page,) = tmp_path.glob("wandb/offline-*/files/media/html/*.html")
    text = page.read_text()
    assert '<span class="accepted">&lt;/p&gt;x</span><span class="refused"> y</span>' in text
    assert "ngram, K=3: 1.50 tokens a pass" in text
    assert ".accepted {" in text


def test_disabled_means_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(wandb, "init", lambda **_: pytest.fail("W&B was called"))
    publish(mode("disabled"), artifact(tmp_path), tmp_path)
    assert not (tmp_path / "wandb").exists()


def test_a_failure_is_one_warning_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    def fail(**_: object) -> None:
        raise wandb.errors.CommError("no such project\nand more")

    monkeypatch.setattr(wandb, "init", fail)
    made = artifact(tmp_path)
    with caplog.at_level(logging.WARNING):
        publish(mode("online"), made, tmp_path)
        publish(mode("online"), made, tmp_path)
    (record,) = caplog.records
    assert "W&B failed (CommError: no such project)" in record.getMessage()


def test_a_damaged_history_does_not_break_a_run_either(tmp_path, caplog):
    publish(mode("offline"), artifact(tmp_path, history__jsonl='{"loss": 1}\n'), tmp_path)
    assert "W&B failed (KeyError" in caplog.text


def test_online_without_a_login_is_refused_before_work_begins(monkeypatch):
    monkeypatch.setattr(wandb, "login", lambda **_: False)
    with pytest.raises(ValueError, match="no W&B login was found; run `wandb login`, or use"):
        mode("online").check_login()
    mode("offline").check_login()
    mode("disabled").check_login()


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match=r"tracking\.mode=of is not known; use offline"):
        mode("of")


def test_history_leaves_out_what_is_no_finite_number(tmp_path):
    (tmp_path / "history.jsonl").write_text('{"step": 1, "a": NaN, "b": 2, "c": "x"}\n')
    assert list(read_history(tmp_path)) == [(1, {"b": 2})]
    assert list(read_history(tmp_path / "nowhere")) == []

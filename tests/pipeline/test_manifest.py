"""Manifests and digests say what a folder holds.

Would catch: a manifest without a file, or with a partial one; a digest that is stale after a change
of equal size; an identity that holds a path or a library's version; a missing fact about where an
artifact came from.
"""

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from pipeline.digests import combined, digest, model_identity, sha256
from pipeline.manifest import MANIFEST, age, check_files, finish, read_manifest
from pipeline.runtime import Runtime, hardware, num_cores


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path_factory.mktemp("cache")))


def finished(folder: Path) -> dict:
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "file").write_bytes(b"abc")
    (folder / "left.partial").write_bytes(b"half")
    finish(folder, {"stage": "toy", "inputs": {}}, {"loss": 0.5}, time.time() - 2.0)
    return read_manifest(folder)


def test_a_manifest_has_every_fact(tmp_path):
    manifest = finished(tmp_path / "a")
    expected = {"bytes": 3, "sha256": hashlib.sha256(b"abc").hexdigest()}
    assert manifest["files"] == {"deep/file": expected}
    assert not list((tmp_path / "a").rglob("*.partial"))
    assert manifest["metrics"] == {"loss": 0.5}
    assert manifest["seconds"] >= 2.0
    assert manifest["command"][:3] == ["python", "-m", "pipeline"]
    assert manifest["hardware"] == hardware()
    assert {"python", "torch", "transformers"} <= set(manifest["packages"])
    assert {"commit", "diff_sha256"} <= set(manifest)
    assert 0 <= age(tmp_path / "a") < 60
    check_files(tmp_path / "a")


def test_a_missing_manifest_is_an_error_and_not_an_empty_one(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_manifest(tmp_path)
    assert MANIFEST == "manifest.json"


def test_a_digest_follows_the_content_even_at_equal_size(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"one")
    first = digest(path)
    assert first == sha256(path) == digest(path)
    path.write_bytes(b"two")
    os.utime(path, (1, 1))
    assert digest(path) == sha256(path) != first


def test_a_digest_is_not_taken_twice(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_bytes(b"one")
    first = digest(path)
    monkeypatch.setattr("pipeline.digests.sha256", lambda path: pytest.fail("read again"))
    assert digest(path) == first


def test_a_combined_digest_does_not_depend_on_order_but_on_names():
    assert combined([("a", "1"), ("b", "2")]) == combined([("b", "2"), ("a", "1")])
    assert combined([("a", "1"), ("b", "2")]) != combined([("a", "2"), ("b", "1")])


def write_model(folder: Path, **config: object) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8, **config}))
    (folder / "README.md").write_text(str(folder))
    return folder


def test_a_models_identity_holds_contents_and_no_paths(tmp_path):
    one = write_model(tmp_path / "one", _name_or_path="/one", transformers_version="5.17")
    two = write_model(tmp_path / "two", _name_or_path="/two", transformers_version="5.23")
    assert model_identity(one) == model_identity(two)
    assert model_identity(one)["chat_template"] is None


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.safetensors", "weights"),
        ("tokenizer.json", "tokenizer"),
        ("chat_template.jinja", "chat_template"),
        ("config.json", "config"),
        ("generation_config.json", "config"),
        ("modeling.py", "code"),
    ],
)
def test_every_part_of_a_model_counts(tmp_path, name, part):
    folder = write_model(tmp_path / "one")
    before = model_identity(folder)
    (folder / name).write_text('{"other": 1}')
    after = model_identity(folder)
    assert {key for key in after if after[key] != before[key]} == {part}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"device": "gpu"}, "runtime.device=gpu"),
        ({"threads": -1}, "runtime.threads=-1"),
        ({"clock": "sun"}, "runtime.clock=sun"),
    ],
)
def test_a_wrong_runtime_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Runtime(**{"device": "cpu", "threads": 0, "clock": "system", **wrong})


def test_zero_threads_means_every_core():
    runtime = Runtime(device="cpu", threads=0, clock="virtual")
    assert runtime.num_threads() == num_cores() >= 1
    assert runtime.timing_identity()["threads"] == num_cores()
    clock = runtime.make_clock()
    assert clock.now() < clock.now()


def test_beside_a_gpu_few_threads_are_enough(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("pipeline.runtime.num_cores", lambda: 64)
    assert Runtime(device="cuda", threads=0, clock="system").num_threads() == 8
    assert Runtime(device="cuda", threads=20, clock="system").num_threads() == 20
    assert Runtime(device="cpu", threads=0, clock="system").num_threads() == 64


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match=r"torch sees no GPU; use runtime.device=cpu"):
        Runtime(device="cuda", threads=0, clock="system").resolved_device()
    assert Runtime(device="auto", threads=0, clock="system").resolved_device() == "cpu"

"""Two processes and a killed one: each artifact is built once, and goes on where it stopped.

Would catch: two processes that build the same folder at once; one that does not wait; a waiting one
that builds again; a lock that outlives its process; a killed run whose folder counts as finished,
or that starts from nothing; a JSON file that a reader sees half-written.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from toys import make

from pipeline import files
from pipeline.files import cache_folder, lock, write_json

HERE = Path(__file__).parent
STEPS, STEP_SECONDS = 12, 0.05
PATIENCE_SECONDS = 30.0  # a bound against hanging; the toys need under a second of it


def start(root: Path) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(HERE), str(HERE.parent.parent)])
    code = "import sys, toys; toys.count(*sys.argv[1:])"
    return subprocess.Popen(
        [sys.executable, "-c", code, str(root), str(STEPS), str(STEP_SECONDS)],
        env={**os.environ, "PYTHONPATH": path, "OUTRIDER_CACHE": str(root / "cache")},
    )


def wait_for(there: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while not there():
        assert time.monotonic() < until
        time.sleep(0.01)


def steps(root: Path) -> int:
    return len(list(root.glob("count/*/step-*")))


def test_a_killed_stage_goes_on_where_it_stopped(tmp_path):
    killed = start(tmp_path)
    wait_for(lambda: steps(tmp_path) >= 3)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    done = steps(tmp_path)
    pipeline = make(tmp_path, steps=STEPS, step_seconds=STEP_SECONDS)
    artifact = pipeline.locate("count")
    assert 3 <= done < STEPS
    assert not artifact.finished
    again = start(tmp_path)
    assert again.wait(PATIENCE_SECONDS) == 0
    assert artifact.finished
    assert sorted(p.read_text() for p in artifact.folder.glob("step-*")) == sorted(
        map(str, range(STEPS))
    )
    manifest = json.loads((artifact.folder / "manifest.json").read_text())
    assert manifest["metrics"]["resumed_at"] == done
    assert not any(name.endswith(".partial") for name in manifest["files"])


def test_two_processes_build_an_artifact_once(tmp_path):
    both = [start(tmp_path), start(tmp_path)]
    assert [process.wait(PATIENCE_SECONDS) for process in both] == [0, 0]
    runs = (tmp_path / "count" / "runs.log").read_text().splitlines()
    assert len(runs) == 1


def test_a_lock_says_that_it_waits_and_for_what(tmp_path, caplog, monkeypatch):
    waits: list[int] = []

    def flock(file: object, how: int) -> None:
        waits.append(how)
        if len(waits) == 1:
            raise BlockingIOError

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with caplog.at_level("INFO"), lock(tmp_path / "count" / "abc.lock"):
        pass
    assert "another process is building" in caplog.text
    assert "count/abc;" in caplog.text
    assert len(waits) == 2


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ValueError, match="file/count cannot be made"),
        lock(tmp_path / "file" / "count" / "x.lock"),
    ):
        pass


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_the_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("OUTRIDER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "outrider"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "outrider"

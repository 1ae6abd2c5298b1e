"""Would catch: a way that does not run in a process of its own; times of something else than its
tokens; a process that fails and is told as fast; caches that are not empty.
"""

import json
import sys
from pathlib import Path

import pytest
from tiny import tiny_model, tiny_tokenizer

from decode.clock import VirtualClock
from pipeline import bench_first_token, first_token
from pipeline.bench_first_token import main, started


def test_every_way_writes_from_a_cold_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model(num_layers=1).save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    out = tmp_path / "first.json"
    ways = ["--ways", "native", "transformers", "--max-new-tokens", "3", "--device", "cpu"]
    main([str(tmp_path / "target"), "--dtype", "float32", "--out", str(out), *ways])
    rows = json.loads(out.read_text())["ways"]
    for row in rows.values():
        assert 0 < row["first_token_seconds"] <= row["second_token_seconds"]
        assert row["bytes"]["weights"] > 0
        assert row["bytes_beside"] is None  # only a GPU can tell
    assert "first token s" in capsys.readouterr().out


def test_a_process_is_timed_by_its_tokens_in_empty_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child.py"
    child.write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        "assert not any(Path(os.environ[name]).exists() for name in sys.argv[-2:])\n"
        f"print('loading'); print({first_token.TOKEN!r}); print({first_token.TOKEN!r})\n"
        'print(\'{"weights": 5, "cache": 2, "reserved": 10}\')\n'
    )
    wrapper = tmp_path / "python"
    names = " ".join(bench_first_token.CACHES)
    wrapper.write_text(f"#!/bin/sh\nexec {sys.executable} {child} {names}\n")
    wrapper.chmod(0o755)
    monkeypatch.setattr(bench_first_token.sys, "executable", str(wrapper))
    found = started("native", "t", "float32", "cpu", 2, VirtualClock())
    assert found["first_token_seconds"] == 2**-10
    assert found["second_token_seconds"] == 2 * 2**-10
    assert found["bytes_beside"] == 3


def test_a_failure_is_told_and_not_timed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"native wrote nothing: .*missing"):
        started("native", str(tmp_path / "missing"), "float32", "cpu", 2, VirtualClock())

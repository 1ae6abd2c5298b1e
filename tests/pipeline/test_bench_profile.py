"""Would catch: a profile of anything but the engine's own step; a kernel that is counted twice or
left out where kernels overlap; the copies that rewind a row taken for a part of the step; drawing a
draft taken for verification; weights, keys or logits that no floor counts, or counts twice.

Times are a GPU's affair. Sizes are powers of two times small numbers, so that floors are exact.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from decode.clock import VirtualClock
from decode.native import static_cache
from decode.resolve import resolve_drafter
from kernels.launching import Launch
from pipeline import bench_profile
from pipeline.bench_engine import main
from pipeline.bench_passes import Engine
from pipeline.bench_profile import profile_step
from pipeline.step_times import Event, added_times, kernel_rows, step_lines, totals, whole_steps

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
VOCAB, WIDTH, MLP, KV = 97, 32, 48, 2 * 8  # of tiny_model
LAYER = 4 * (WIDTH * (WIDTH + 2 * KV) + WIDTH * WIDTH + 3 * WIDTH * MLP)  # bytes of its products


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(static_cache, "FIRST_CAPACITY", 128)
    monkeypatch.setattr(bench_profile, "WARM_STEPS", 2)
    monkeypatch.setattr(bench_profile, "PACE_STEPS", 1)
    tiny_model(num_layers=1).save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def of_part(step: dict[str, Any], part: str) -> dict[str, Any]:
    return {row["kernel"]: row for row in step["kernels"] if row["part"] == part}


@on_cpu
def test_the_engines_own_steps_are_taken_apart(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder.parent / "step.json"
    words = [str(folder), "--dtype", "float32", "--exactness", "law", "--out", str(out)]
    few = ["--context-tokens", "24", "--rounds", "1", "--draft-length", "2"]
    main([*words, *few, "--profile", "--drafter", str(folder)])
    results = json.loads(out.read_text())
    assert list(results["steps"]) == ["plain", "ngram, K=2", "target, K=2"]
    plain, lookup, model = results["steps"].values()

    scored = of_part(plain, "score")
    products = [row for name, row in scored.items() if name.startswith("product")]
    head, logits = 4 * VOCAB * WIDTH, 4 * VOCAB
    assert sum(row["bytes"] for row in products) == LAYER + head + logits
    assert scored["attend_chunk_kernel"]["bytes"] == 4 * 2 * KV * plain["seen_tokens"]
    assert of_part(plain, "verify")["stats_kernel"]["bytes"] == logits
    assert list(of_part(plain, "draft")) == ["begin_kernel"]
    assert plain["totals"]["bytes"] == sum(row["bytes"] for row in plain["kernels"])
    assert plain["tokens_per_step"] == 1

    assert "lookup_scan_kernel" in of_part(lookup, "draft")
    assert of_part(lookup, "verify")["stats_kernel"]["bytes"] == 3 * logits
    drawn = of_part(model, "draft")
    assert drawn["stats_kernel"]["queued"] == drawn["take_kernel"]["queued"] == 2
    assert drawn["product_whole_97x32"]["bytes"] == 2 * (head + logits)
    assert of_part(model, "score")["product_whole_97x32"]["queued"] == 1
    assert "lookup_scan_kernel" not in drawn
    for step in results["steps"].values():
        assert step["totals"]["replay_microseconds"] is None
        assert step["totals"]["engine_microseconds"] is None

    printed = capsys.readouterr().out
    text = out.with_suffix(".txt").read_text()
    for line in ("plain: one row of", "product_parts_64x32", "all kernels"):
        assert line in text
        assert line in printed


@on_cpu
def test_a_context_without_room_is_refused(folder: Path) -> None:
    engine = Engine(str(folder), "float32", "cpu", "law")
    with pytest.raises(ValueError, match="context_tokens=120 and 26 more do not fit"):
        profile_step(engine, None, 1, 120, 1, None, VirtualClock())


def run(*events: tuple[str, float, float]) -> list[Event]:
    return [Event(*event) for event in events]


STEP = run(
    ("begin_kernel", 0, 2),
    ("stats_kernel", 2, 3),  # of a draft
    ("present_kernel", 5, 6),
    ("product_whole_8x4", 5.5, 16),  # came up early
    ("stats_kernel", 7, 18),  # earlier still
    ("advance_kernel", 18, 20),
)


def later(events: Sequence[Event], by: float) -> list[Event]:
    return [Event(event.name, event.start + by, event.end + by) for event in events]


def test_a_kernel_has_the_time_that_it_adds() -> None:
    assert [added for _, added in added_times(STEP)] == [2, 1, 1, 10, 2, 2]
    assert [idle for idle, _ in added_times(STEP)] == [0, 0, 2, 0, 0, 0]
    assert added_times(run(("a", 0, 9), ("b", 1, 4), ("c", 10, 11))) == [(0, 9), (0, 0), (1, 1)]


def test_steps_are_told_from_what_rewinds_them() -> None:
    copy = run(("Memcpy DtoD", 30, 40))
    cut = run(("begin_kernel", 90, 91))
    found = whole_steps([*later(STEP, 50), *copy, *STEP, *cut])
    assert [[event.name for event in step] for step in found] == [[e.name for e in STEP]] * 2
    assert found[1][0].start == 50


def launch(name: str, options: dict[str, Any] | None = None, **given: Any) -> Launch:
    kernel = SimpleNamespace(__name__=name, arg_names=list(given))
    return Launch(kernel, (1,), tuple(given.values()), options or {})


def stats(rows: int) -> Launch:
    logits = torch.zeros(1, rows, 8)
    return launch("stats_kernel", target_ptr=logits, draft_ptr=None, counts_ptr=None)


HEAD = launch(
    "product_kernel",
    {"PARTS": False, "N": 8, "K": 4},
    weight_ptr=torch.zeros(8, 4),
    second_ptr=None,
    bias_ptr=None,
    second_bias_ptr=None,
    out_ptr=torch.zeros(2, 8),
)
LAUNCHES = [
    launch("begin_kernel"),
    stats(1),
    launch("present_kernel"),
    HEAD,
    stats(2),
    launch("advance_kernel"),
]


def test_kernels_stand_beside_their_floors() -> None:
    events = [*STEP, *later(STEP, 100), *run(("advance_kernel", 300, 301))]
    rows = kernel_rows(LAUNCHES, events, 10, bandwidth=64e6)
    found = {(row["part"], row["kernel"]): row for row in rows}
    product = found["score", "product_whole_8x4"]
    assert product["bytes"] == 4 * (32 + 16)
    assert product["floor_microseconds"] == 3
    assert product["over_microseconds"] == 7
    assert product["launches"] == product["queued"] == 1
    assert rows[0] is product
    assert found["draft", "stats_kernel"]["floor_microseconds"] == 0.5
    assert found["verify", "stats_kernel"]["floor_microseconds"] == 1
    assert found["verify", "advance_kernel"]["floor_microseconds"] == 0
    total = totals(rows, events, 22e-6, 25e-6)
    assert total["num_steps"] == 2
    assert total["kernels_microseconds"] == 18
    assert total["between_microseconds"] == 2
    assert total["gap_microseconds"] == pytest.approx(4)
    assert total["engine_microseconds"] == pytest.approx(25)
    assert total["floor_microseconds"] == 4.5
    lines = step_lines("plain", {"seen_tokens": 10, "kernels": rows, "totals": total}, 64e6)
    assert lines[2].split() == ["score", "product_whole_8x4", "1", "10.0", "0.00", "3.0", "7.0"]


def test_what_is_not_ours_has_no_bytes_and_what_did_not_run_no_time() -> None:
    events = run(("begin_kernel", 0, 1), ("at::fill", 1, 4), ("advance_kernel", 4, 5))
    rows = {row["kernel"]: row for row in kernel_rows(LAUNCHES[:3], events, 10, 64e6)}
    assert rows["at::fill"]["bytes"] is None
    assert rows["at::fill"]["over_microseconds"] == 3
    assert rows["at::fill"]["queued"] == 0
    assert rows["present_kernel"]["microseconds"] is None
    assert rows["present_kernel"]["launches"] == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("way", [None, "ngram", "model"])
def test_every_launch_of_a_captured_step_is_timed(folder: Path, way: str | None) -> None:
    engine = Engine(str(folder), "bfloat16", "cuda", "bitwise")
    engine.target.eos_token_ids = bench_profile.NOBODY
    name = str(folder) if way == "model" else way
    drafter = None if name is None else resolve_drafter(name, engine.target)
    step = profile_step(engine, drafter, 3 if way else 0, 24, 5, 4e12, VirtualClock(1e-3))
    ours = [row for row in step["kernels"] if row["queued"]]
    assert all(row["launches"] == row["queued"] for row in ours), step["kernels"]
    assert all(row["microseconds"] is not None for row in ours)
    total = step["totals"]
    assert total["num_steps"] == bench_profile.REPLAYS
    assert 0 < total["floor_microseconds"] < total["kernels_microseconds"]
    assert total["replay_microseconds"] > 0
    assert total["between_microseconds"] >= 0

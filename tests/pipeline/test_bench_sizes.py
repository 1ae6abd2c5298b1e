"""Does a sweep over sizes leave them as they were, and tell what it read though it is cut off?

Would catch: a size that stays changed for the next reading; sizes that are set but not used; a
refused choice that ends the sweep; readings written only at the end; the fastest of another case
or kernel taken for the best.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from kernels import sizes, stats, truncate, verify
from pipeline import bench_compiling, bench_sizes
from pipeline.bench_compiling import constants
from pipeline.bench_sizes import CUTS, SPLITS, TILES, Sweep, best_lines, best_together


def everything() -> dict[str, Any]:
    of_modules = {
        (module.__name__, name): getattr(module, name)
        for name, module in bench_compiling.ORDERED.items()
    }
    return {**of_modules, "table": sizes.TABLE}


@pytest.mark.parametrize("choice", [*SPLITS, *TILES, *CUTS], ids=str)
def test_sizes_are_used_and_then_as_before(choice: dict[str, int]) -> None:
    before = everything()
    with pytest.raises(RuntimeError), constants(choice):  # noqa: PT012
        for name, value in choice.items():
            for batch in (1, 64, 1000):
                chosen = getattr(sizes.sizes(batch), name, None)
                modules = (verify, stats, truncate)
                assert value in (chosen, *(getattr(m, name, None) for m in modules))
        raise RuntimeError
    assert everything() == before


def test_a_sweep_that_is_cut_off_has_told_what_it_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[Any] = []
    monkeypatch.setattr(bench_sizes, "prepare", prepared.extend)
    monkeypatch.setattr(bench_sizes, "calls_of", lambda *_: [])

    def timed(_: Any, mode: str) -> dict[str, Any]:
        if verify.TILE == 1024 and verify.TILE_WARPS == 4:
            return {"refused": "out of registers"}
        if mode == "all rules":
            raise KeyboardInterrupt
        slow = verify.BLOCK / 1000 + verify.TILE / 100
        return {"microseconds": slow, "kernels": {"stats_kernel": slow, "resolve_kernel": slow}}

    monkeypatch.setattr(bench_sizes, "_timed", timed)
    sweep = Sweep(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        sweep.run()
    written = json.loads((tmp_path / "sweep.json").read_text())
    assert written == sweep.rows
    assert {(row["batch"], row["mode"]) for row in written} == {
        (1, "temperature"), (64, "temperature")
    }  # fmt: skip
    together = [row for row in written if row["kind"] == "together"]
    assert [row["sizes"]["TILE"] for row in together] == [1024, 1024]
    assert all(row["sizes"]["TILE_WARPS"] == 8 for row in together)
    small = [choice for choice in TILES if (choice["TILE"], choice.get("TILE_WARPS")) == (1024, 4)]
    assert sum("refused" in row for row in written) == 2 * len(small) > 0
    assert len(prepared) == 2 + len(SPLITS) + len(TILES) + len(CUTS)
    assert sum("best" in said for said in best_lines(written)) == 2


def test_no_time_left_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_sizes, "prepare", len)
    monkeypatch.setattr(bench_sizes, "calls_of", lambda *_: [])
    rows = Sweep(tmp_path, seconds=-1).run()
    assert {row["refused"] for row in rows} == {"no time left"}
    assert list(best_lines(rows)) == []


def test_the_best_together_is_of_the_case_and_of_the_kernel() -> None:
    def row(batch: int, choice: dict[str, int], stats_us: float, all_us: float) -> dict[str, Any]:
        kernels = {"stats_kernel": stats_us, "resolve_kernel": 5.0}
        return {
            "batch": batch, "mode": "temperature", "sizes": choice, "microseconds": all_us,
            "kernels": kernels,
        }  # fmt: skip

    rows = [
        row(1, {"BLOCK": 1}, 3.0, 20.0),
        row(1, {"BLOCK": 2}, 4.0, 10.0),
        row(64, {"BLOCK": 3}, 1.0, 1.0),
        row(1, {}, 0.5, 0.5),
    ]
    assert best_together(rows, (1, "temperature")) == {"BLOCK": 1}

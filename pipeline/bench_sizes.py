"""Which sizes of verification's launches are fastest, for one row and for many.

One kernel's are varied at a time. Readings are logged and written as they come, so that a run that
is cut off still tells. To pin what won: sizes that keep the order of sums go to TABLE of
kernels/sizes.py, by rows; the others (BLOCK, WARPS, TILE, TILE_WARPS, RULE_WARPS, CUT_WARPS, ...)
stand where they are defined and hold for every batch.
"""

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from triton.errors import TritonError

from pipeline.bench_compiling import Job, constants, prepare
from pipeline.bench_kernels import Call, microseconds
from pipeline.bench_verification import CASES, calls_of, kernel_times

log = logging.getLogger(__name__)

SWEEP_SECONDS = 150.0  # of a sweep: what is left then stays unmeasured, and says so
SPLITS = (
    {"BLOCK": 8192, "WARPS": 4, "registers": 64},
    {"BLOCK": 8192, "WARPS": 4, "registers": 72},
    {"BLOCK": 8192, "WARPS": 4, "registers": 96},
    {"BLOCK": 8192, "WARPS": 2, "registers": 128},
    {"BLOCK": 8192, "WARPS": 8, "registers": 56},
    {"BLOCK": 16384, "WARPS": 8, "registers": 72},
    {"BLOCK": 4096, "WARPS": 2, "registers": 72},
)
# Of launch 2: tokens asked for at a time, warps that share them, what a warp has to itself, and how
# many programs are under way, which registers bound.
TILES = (
    {"TILE": 2048, "tile_registers": 80, "programs": 396, "ahead": 0},
    {"TILE": 2048, "tile_registers": 128, "programs": 264},
    {"TILE": 2048, "tile_registers": 128, "programs": 132},
    {"TILE": 2048, "tile_registers": 64, "programs": 528},
    {"TILE": 2048, "tile_registers": 64, "programs": 528, "ahead": 0},
    {"TILE": 2048, "TILE_WARPS": 4, "STRIP": 512, "tile_registers": 128, "programs": 528},
    {"TILE": 4096, "TILE_WARPS": 8, "STRIP": 512, "tile_registers": 128, "programs": 264},
    {"TILE": 4096, "TILE_WARPS": 8, "STRIP": 256, "tile_registers": 128, "programs": 264},
    {"TILE": 4096, "TILE_WARPS": 16, "tile_registers": 80, "programs": 132},
    {"TILE": 1024, "TILE_WARPS": 4, "tile_registers": 80, "programs": 792},
    {"TILE": 1024, "TILE_WARPS": 4, "tile_registers": 128, "programs": 528},
    {"TILE": 1024, "TILE_WARPS": 4, "tile_registers": 128, "programs": 264},
    {"TILE": 1024, "TILE_WARPS": 8, "STRIP": 128, "tile_registers": 80, "programs": 396},
)
# Of cut: few threads meet sooner, and few registers let more rows be under way.
CUTS = (
    {"RULE_WARPS": 8, "rule_registers": 96},
    {"RULE_WARPS": 8, "rule_registers": 128},
    {"RULE_WARPS": 8, "rule_registers": 128, "rule_rows": 1},
    {"RULE_WARPS": 8, "rule_registers": 128, "rule_rows": 3},
    {"RULE_WARPS": 8, "rule_registers": 128, "rule_rows": 9},
    {"RULE_WARPS": 4, "rule_registers": 168},
    {"CUT_WARPS": 4, "CUT_REGISTERS": 255},
    {"CUT_WARPS": 4, "CUT_REGISTERS": 168},
    {"CUT_WARPS": 4, "CUT_REGISTERS": 128},
    {"CUT_WARPS": 8, "CUT_REGISTERS": 128},
    {"CUT_WARPS": 8, "CUT_REGISTERS": 96},
    {"CUT_WARPS": 4, "CUT_REGISTERS": 255, "CHUNK": 64},
    {"CUT_WARPS": 4, "CUT_REGISTERS": 255, "CHUNK": 16},
    {"CUT_WARPS": 4, "CUT_REGISTERS": 168, "READ": 2048},
    {"TILE": 2048, "rule_tile_registers": 80},
    {"TILE": 2048, "rule_tile_registers": 168, "programs": 132},
)
# What each choice is about: the fastest of each joins the others in one last reading.
KERNELS_OF = {
    "BLOCK": "stats_kernel", "TILE": "resolve_kernel", "RULE_WARPS": "stats_kernel",
    "CUT_WARPS": "cut_kernel",
}  # fmt: skip


class Sweep:
    """Every choice of sizes, one kernel's at a time; each reading is written as it comes."""

    def __init__(self, out: Path, seconds: float = SWEEP_SECONDS) -> None:
        self._path, self._end = out / "sweep.json", time.perf_counter() + seconds
        self._calls = {case: calls_of(*case) for case in CASES}
        self.rows: list[dict[str, Any]] = []

    def run(self) -> list[dict[str, Any]]:
        """All choices for all cases, then the fastest of each kernel together."""
        choices = {mode: choices_of(mode) for _, mode in CASES}
        prepare([_job(mode, choice) for mode in choices for choice in choices[mode]])
        # Cases in the order of what they decide, so that a run that is cut off tells the most.
        for case in ((64, "temperature"), (1, "temperature"), (1, "all rules"), (64, "all rules")):
            for choice in choices[case[1]]:
                self._measure(case, choice)
            together = best_together(self.rows, case)
            if together not in choices[case[1]]:
                self._measure(case, together, "together")
        return self.rows

    def _measure(
        self, case: tuple[int, str], choice: Mapping[str, int], kind: str = "choice"
    ) -> None:
        row: dict[str, Any] = {"batch": case[0], "mode": case[1], "kind": kind, "sizes": choice}
        if time.perf_counter() > self._end:
            row["refused"] = "no time left"
        else:
            with constants(choice):
                row |= _timed(self._calls[case], case[1])
        self.rows.append(row)
        self._path.write_text(json.dumps(self.rows, indent=1), encoding="utf-8")
        log.info("%s", sweep_line(row))


def _job(mode: str, choice: Mapping[str, int]) -> Job:
    return Job(partial(calls_of, 1, mode, 1), dict(choice))  # batches share their kernels


def choices_of(mode: str) -> tuple[dict[str, int], ...]:
    """The sizes in use, then those that differ from them in one kernel's."""
    return ({}, *(SPLITS + TILES if mode == "temperature" else CUTS))


def best_together(rows: Sequence[Mapping[str, Any]], case: tuple[int, str]) -> dict[str, int]:
    """The sizes of the fastest choice for each kernel, by that kernel's own microseconds."""
    found: dict[str, int] = {}
    for marker, kernel in KERNELS_OF.items():
        read = [
            row
            for row in rows
            if (row["batch"], row["mode"]) == case
            and marker in row["sizes"]
            and row.get("microseconds") is not None
        ]
        if read:
            fastest = min(read, key=lambda row: row["kernels"].get(kernel, float("inf")))
            found |= fastest["sizes"]
    return found


def sweep(out: Path) -> list[dict[str, Any]]:
    """Microseconds of every choice of sizes, written to FOLDER/sweep.json as they come."""
    return Sweep(out).run()


def _timed(calls: Sequence[Call], mode: str) -> dict[str, Any]:
    try:
        spent = microseconds(list(calls), mode, None)
        return {"microseconds": round(spent, 2), "kernels": kernel_times(calls)}
    except (RuntimeError, TritonError) as error:  # sizes that are refused are an answer too
        return {"refused": str(error).strip().splitlines()[0][:200]}


def sweep_line(row: Mapping[str, Any]) -> str:
    """One reading of a sweep, for people."""
    chosen = " ".join(f"{name}={value}" for name, value in row["sizes"].items()) or "as they are"
    if row.get("microseconds") is None:
        return f"B={row['batch']} {row['mode']}: {chosen}: refused: {row['refused']}"
    kernels = ", ".join(f"{name} {spent}" for name, spent in row["kernels"].items())
    return (
        f"B={row['batch']} {row['mode']}, {row['kind']}: {chosen}: {row['microseconds']} us; "
        f"{kernels}"
    )


def best_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The sizes in use and the fastest found, by case."""
    for case in CASES:
        read = [row for row in rows if (row["batch"], row["mode"]) == case]
        read = [row for row in read if row.get("microseconds") is not None]
        yield from (sweep_line(row) for row in read if not row["sizes"])
        if read:
            yield f"  best: {sweep_line(min(read, key=lambda row: row['microseconds']))}"

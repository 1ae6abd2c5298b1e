"""Seconds from the start of a process to its first tokens, and the device memory it then holds.

    python -m pipeline.bench_first_token TARGET --out first_token.json

The model is on disk and nothing else is there: every process compiles into empty caches (Triton's
and TorchInductor's). The second token counts too, since what is compiled for decoding is compiled
after the first. Ways: the native backend, transformers, and transformers compiled.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.table import Table

from decode.clock import Clock, SystemClock
from pipeline.bench_command import command, new_table, show, told
from pipeline.first_token import TOKEN, WAYS
from pipeline.manifest import circumstances

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def started(
    way: str, target: str, dtype: str, device: str, max_new_tokens: int, clock: Clock
) -> dict[str, Any]:
    """One process: seconds to its first and second token, bytes by what holds them.

    Raises RuntimeError where it fails, with the last it said.
    """
    words = [sys.executable, "-m", "pipeline.first_token", way, target, dtype, device]
    with TemporaryDirectory() as folder:
        empty = {name: str(Path(folder, name)) for name in CACHES}
        errors = Path(folder, "errors")
        start, times, last = clock.now(), [], ""
        with (
            errors.open("w") as stderr,
            subprocess.Popen(
                [*words, str(max_new_tokens)],
                env={**os.environ, **empty},
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            ) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                if line.strip() == TOKEN:
                    times.append(clock.now() - start)
                last = line
        if process.returncode:
            reason = errors.read_text().strip().splitlines()[-1:] or ["it said nothing"]
            raise RuntimeError(f"{way} wrote nothing: {reason[0]}")
    held = json.loads(last)
    return {
        "first_token_seconds": times[0],
        "second_token_seconds": times[1] if len(times) > 1 else None,
        "bytes": held,
        "bytes_beside": _beside(held),
    }


def _beside(held: Mapping[str, int]) -> int | None:
    """What is reserved beyond weights and cache, where a device can tell."""
    if "reserved" not in held:
        return None
    return held["reserved"] - held["weights"] - held["cache"]


def measure(
    target: str, *, dtype: str, device: str | None, ways: Sequence[str], max_new_tokens: int
) -> dict[str, Any]:
    """Every way once, each in a process of its own."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    clock = SystemClock()
    found = {way: started(way, target, dtype, device, max_new_tokens, clock) for way in ways}
    return {
        "target": Path(target).name,
        "dtype": dtype,
        **circumstances(),
        "ways": found,
    }


def table(results: Mapping[str, Any]) -> Table:
    """A line a way."""
    title = f"from process start: {results['target']}, {results['dtype']}"
    out = new_table(title, "way", "first token s", "second token s", "MB beside weights and cache")
    for name, row in results["ways"].items():
        second, beside = row["second_token_seconds"], row["bytes_beside"]
        out.add_row(
            name,
            f"{row['first_token_seconds']:.1f}",
            "-" if second is None else f"{second:.1f}",
            "-" if beside is None else f"{beside / 1e6:.0f}",
        )
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command(__doc__, "folder or name of a causal LM", dtype="bfloat16")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--max-new-tokens", type=int, default=16)
    given = vars(parser.parse_args(arguments))
    out = given.pop("out")
    show(table(told(measure(given.pop("target"), **given), out)))


if __name__ == "__main__":
    main()

"""Runs programs that nobody has read, each in a process that can do next to nothing.

The process has an empty folder of its own, no environment, no standard streams, hard limits and the
layers of child.py; it is killed with all its group when the time is up. This contains the mistakes
and the mischief of model-written code. Where a breakout would matter more than that, run the whole
pipeline in a machine of its own.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.quality.child import REPORT

CHILD = Path(__file__).with_name("child.py")
PASSED, FAILED, TIMEOUT, ERROR = "passed", "failed", "timeout", "error"
REPORT_BYTES = 2**16
LAYERS = {  # what child.py could have
    "limits": "limits of time, memory, files and processes",
    "folder": "writing in its own folder only (Landlock)",
    "calls": "a filter of system calls: no process, no network (seccomp)",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use."""

    seconds: float  # wall clock, and of the processor
    memory_bytes: int = 2**30


@dataclass(frozen=True, slots=True)
class Outcome:
    """passed: it ran to its end. failed: it raised. timeout: it was stopped. error: it is no
    program, ran out of memory, or ended its process.
    """

    status: str
    detail: str = ""


def run_program(program: str, limits: Limits) -> Outcome:
    """How one program fares; it never sees this process's files, environment or network."""
    return _run(program, limits)[0]


def run_programs(programs: Sequence[str], limits: Limits) -> Iterator[Outcome]:
    """The outcomes, in order; as many at once as there are processors."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        yield from threads.map(lambda program: run_program(program, limits), programs)


@cache
def layers() -> tuple[str, ...]:
    """Those of LAYERS that hold on this machine; raises ValueError where nothing can run."""
    outcome, found = _run("import math, re, collections, typing, itertools", Limits(30.0))
    if outcome.status != PASSED:
        raise ValueError(
            f"the sandbox cannot run Python here ({outcome.status}: {outcome.detail}); leave "
            "stages.evaluate.quality=off"
        )
    return tuple(found)


def _run(program: str, limits: Limits) -> tuple[Outcome, list[str]]:
    token = secrets.token_hex(16)  # a program that ends its process cannot say that it passed
    job = {
        "program": program,
        "token": token,
        "cpu_seconds": max(1, round(limits.seconds + 0.5)),
        "memory_bytes": limits.memory_bytes,
    }
    with tempfile.TemporaryDirectory(prefix="outrider-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        with _started(folder) as process:
            try:
                process.communicate(json.dumps(job).encode(), timeout=limits.seconds)
            except subprocess.TimeoutExpired:
                return Outcome(TIMEOUT, f"stopped after {limits.seconds:g} s"), []
        if process.returncode == -signal.SIGXCPU or process.returncode == -signal.SIGKILL:
            return Outcome(TIMEOUT, "used up its processor time"), []
        report = _report(folder / REPORT)
    if report.get("token") != token:
        return Outcome(ERROR, f"ended its process (exit status {process.returncode})"), []
    return Outcome(report["status"], report["detail"]), report["layers"]


@contextmanager
def _started(folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """The process, alone in its session; nothing of it is left when the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", str(CHILD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={"LC_ALL": "C.UTF-8"},
        close_fds=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()


def _report(path: Path) -> dict[str, Any]:
    """What the child wrote; nothing where that is not what it writes."""
    try:
        if path.is_symlink():
            return {}
        with path.open("rb") as file:
            content = json.loads(file.read(REPORT_BYTES))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}

"""Compiling verification's kernels beforehand, in processes: Triton's first half holds a lock.

What is compiled lies in Triton's cache on disk, where the process that measures finds it.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from multiprocessing import get_context

import torch
from triton.errors import TritonError

from kernels import overlap, sizes, stats, truncate, verify
from kernels.launching import collected, compile_all
from pipeline.bench_kernels import Call, run

log = logging.getLogger(__name__)

MOST_PROCESSES, THREADS = 16, 4
ORDERED = {"BLOCK": verify, "WARPS": verify, "TILE": verify, "TILE_WARPS": verify,
           "STRIP": verify,
           "RULE_WARPS": stats, "GROUPS_READ": truncate, "READ": truncate, "CUT_WARPS": truncate,
           "CUT_REGISTERS": truncate, "CHUNK": truncate}  # fmt: skip
OF_ROWS = {field.name for field in fields(sizes.Sizes)}


@dataclass(frozen=True)
class Job:
    """Calls whose kernels are wanted, with these sizes."""

    calls: Callable[[], Sequence[Call]]  # a module's function, or a partial of one
    sizes: Mapping[str, int] = field(default_factory=dict)
    overlap: str = overlap.mode_in_use()


@contextmanager
def constants(values: Mapping[str, int]) -> Iterator[None]:
    """Other sizes for as long as this lasts: those of kernels.sizes for every number of rows."""
    own = {name: value for name, value in values.items() if name in OF_ROWS}
    before = {name: getattr(ORDERED[name], name) for name in values.keys() - own.keys()}
    table = sizes.TABLE
    sizes.TABLE = tuple((rows, replace(chosen, **own)) for rows, chosen in table)
    for name in before:
        setattr(ORDERED[name], name, values[name])
    try:
        yield
    finally:
        sizes.TABLE = table
        for name, value in before.items():
            setattr(ORDERED[name], name, value)


def prepare(jobs: Sequence[Job]) -> None:
    """Compile what these jobs launch, side by side; says what the compiler refuses."""
    start = time.perf_counter()
    workers = max(1, min(len(jobs), MOST_PROCESSES, os.cpu_count() or 1))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for refusal in filter(None, pool.map(_compiled, jobs)):
            log.info("%s", refusal)
    log.info("compiled %d calls in %.0f s", len(jobs), time.perf_counter() - start)


def _compiled(job: Job) -> str | None:
    overlap.use(job.overlap)
    try:
        with constants(job.sizes):
            with collected() as launches:
                for call in job.calls():
                    run(verify.verify, call, check=False)
            compile_all(launches, torch.device("cuda"), THREADS)
    except (RuntimeError, TritonError, AssertionError) as error:
        return f"{dict(job.sizes)}: {(str(error).strip().splitlines() or ['?'])[0][:200]}"
    return None

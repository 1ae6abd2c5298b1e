"""Several processes that do one piece of work together, on this machine's processors or GPUs.

The parent holds the artifact's lock, starts the workers and waits. It touches no GPU meanwhile and
writes nothing. Whatever ends it ends them: a worker watches its parent and leaves with it.
"""

import logging
import math
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from pipeline.files import sweep
from pipeline.runtime import Runtime

log = logging.getLogger(__name__)

T = TypeVar("T")
HOST = "127.0.0.1"
FAILED = 1
PATIENCE = timedelta(days=7)  # of processes with one another: the parent sees to those that died


class WorkerError(RuntimeError):
    """A worker's own traceback, shown as the cause of the error that it raised."""


def launch(work: Callable[..., T], *args: Any, runtime: Runtime, share_gpus: bool = False) -> T:
    """What `work(*args)` returns, done by runtime.resolved_processes() processes that can talk.

    One process: a plain call. Several: each calls it with torch.distributed set up (see
    `backend_and_gpu`), and what the first of them returns is returned. An error in any of them ends
    all and is raised here. `work` and `args` must be picklable. `share_gpus`: there may be more
    processes than GPUs; for work of which each process does a part by itself.
    """
    size = runtime.resolved_processes(share_gpus)
    if size == 1:
        return work(*args)
    from torch.distributed import TCPStore

    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)  # any free port
    context = multiprocessing.get_context("spawn")  # a fork would inherit threads and locks
    gpus = runtime.num_gpus()
    where = f", up to {math.ceil(size / gpus)} on a GPU" if 0 < gpus < size else ""
    log.info("%d processes work together%s", size, where)
    workers: list[tuple[BaseProcess, Connection]] = []
    try:
        with _gpus_out_of_sight() if runtime.resolved_device() == "cpu" else nullcontext():
            for rank in range(size):
                ours, theirs = context.Pipe()
                job = (rank, size, store.port, runtime, theirs, work, args)
                process: BaseProcess = context.Process(target=_work, args=job, daemon=True)
                process.start()
                theirs.close()
                workers.append((process, ours))
        return _results(workers)[0]
    finally:
        for process, _ in workers:
            process.kill()  # those that are done wait to be let go
        for process, _ in workers:
            process.join()


def backend_and_gpu(rank: int, size: int, runtime: Runtime) -> tuple[str, int | None]:
    """(backend of the group, this process's GPU): nccl, but gloo on the CPU and where processes
    share a GPU, which nccl refuses.
    """
    gpus = runtime.num_gpus()
    if gpus == 0:
        return "gloo", None
    return "nccl" if size <= gpus else "gloo", rank % gpus


def rank_and_size() -> tuple[int, int]:
    """(number of this process, how many there are) in its launch; (0, 1) where it is alone."""
    from torch import distributed

    if not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def meet() -> None:
    """Wait until all processes of this launch are here."""
    from torch import distributed

    if distributed.is_initialized():
        distributed.barrier()


@contextmanager
def sole_writer(out: Path, runtime: Runtime) -> Iterator[None]:
    """Within, no process of another launch writes to `out`, and nothing half-written is in it.

    A writer whose parent was killed lives on for a moment, and the artifact's lock is free by then;
    so each process waits for the one that had its number, the first also for those whose number
    nobody has here, and all for each other.
    """
    rank, size = rank_and_size()
    with runtime.lock(_writer_lock(out, rank)):
        number = size
        while rank == 0 and (path := _writer_lock(out, number)).exists():
            with runtime.lock(path):
                number += 1
        if rank == 0:
            sweep(out)  # what was begun while the artifact's lock was free
        meet()
        yield


def _writer_lock(out: Path, rank: int) -> Path:
    return out.with_suffix(f".writer-{rank}.lock")


@contextmanager
def _gpus_out_of_sight() -> Iterator[None]:
    """Processes that start within see no GPU: libraries would give each of them one by its rank."""
    name = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(name)
    os.environ[name] = ""
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _results(workers: Sequence[tuple[BaseProcess, Connection]]) -> list[Any]:
    """What each worker returned; raises what the first to fail raised."""
    waiting = {connection: rank for rank, (_, connection) in enumerate(workers)}
    results: list[Any] = [None] * len(workers)
    while waiting:
        for connection in wait(list(waiting)):
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                error, results[rank] = connection.recv()
            except EOFError:
                raise _died(workers[rank][0], rank, len(workers)) from None
            if error is not None:
                raise error from WorkerError(results[rank])
    return results


def _died(process: BaseProcess, rank: int, size: int) -> ValueError:
    process.join()
    code = process.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return ValueError(
        f"process {rank + 1} of {size} {how}, for which want of memory is the usual reason; lower "
        "batch_size or runtime.num_processes, and run the same command again"
    )


def _work(
    rank: int,
    size: int,
    port: int,
    runtime: Runtime,
    parent: Connection,
    work: Callable[..., Any],
    args: Sequence[Any],
) -> None:
    """One worker's life."""
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends us
    from pipeline.errors import set_up_logging
    from pipeline.progress import console

    set_up_logging(debug=False)
    if rank > 0:  # all would say the same
        console.quiet = True
        logging.getLogger().setLevel(logging.WARNING)
    try:
        _join_group(rank, size, port, runtime)
        result = work(*args)
        parent.send((None, result if rank == 0 else None))
    except BaseException as error:
        parent.send((_portable(error), traceback.format_exc()))
    # Neither an error's sender nor who is done early leaves by itself: the others would see a
    # closed connection, and might be the first to say so.
    threading.Event().wait()


def _join_group(rank: int, size: int, port: int, runtime: Runtime) -> None:
    """Make this process one of the group, and give it its GPU or its share of the cores."""
    import torch
    from torch import distributed

    threads = runtime.num_threads(size)
    os.environ |= {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": HOST},
        **{"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_PORT": str(port)},
        "OMP_NUM_THREADS": str(threads),  # accelerate asks for it
    }
    torch.set_num_threads(threads)
    backend, gpu = backend_and_gpu(rank, size, runtime)
    if gpu is not None:
        torch.cuda.set_device(gpu)  # accelerate chooses the same one by LOCAL_RANK
    if backend == "gloo":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all are on this machine
    store = distributed.TCPStore(HOST, port, is_master=False)
    distributed.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        device_id=torch.device("cuda", gpu) if backend == "nccl" and gpu is not None else None,
        timeout=PATIENCE,
    )


def _portable(error: BaseException) -> BaseException:
    """The error, or one that says the same where it cannot travel between processes."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        assert str(copy) == str(error)
        return copy
    except Exception:  # whatever a class of some library does when it is taken apart
        return RuntimeError(f"{type(error).__name__}: {error}")


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(FAILED)

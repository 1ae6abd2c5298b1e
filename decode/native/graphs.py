"""Passes captured as CUDA graphs, each under a key; where there is no CUDA, they are just computed.

A captured pass reads and writes the same addresses every time. What changes from step to step lies
in tensors that are filled before it runs. What it leaves is there until any other runs, since they
share memory.
"""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Captured:
    """One graph, and what it took."""

    graph: Any
    output: Any
    seconds: float  # first run, with whatever had to be compiled, and capture
    num_bytes: int  # by which the memory that graphs share has grown for it


class Graphs:
    """Captured passes by key; they share the memory of what is forgotten when a pass ends."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._captured: dict[Hashable, Captured] = {}
        self._pool: Any = None

    def run(self, key: Hashable, compute: Callable[[], Any], changes: Sequence[Tensor] = ()) -> Any:
        """What `compute` returns, computed now.

        It may wait for nothing and return nothing that it has not computed itself. `changes` are
        the tensors that it reads and then overwrites: it must not run twice on them.
        """
        if self._device.type != "cuda":
            return compute()
        if key not in self._captured:
            self._captured[key] = self._capture(compute, changes)
        captured = self._captured[key]
        captured.graph.replay()
        return captured.output

    def captured(self, key: Hashable) -> Captured | None:
        """The graph under this key, where there is one."""
        return self._captured.get(key)

    def clear(self) -> None:
        """Forget them all: what they read has moved. The device gets their memory back."""
        if not self._captured:
            return
        torch.cuda.synchronize(self._device)  # one may be under way
        self._captured.clear()
        self._pool = None
        torch.cuda.empty_cache()  # nobody else may use what a graph has had

    def report(self) -> dict[str, Any]:
        """How many there are, and what each took: seconds, and bytes that no graph before it held.

        The bytes are of intermediate results and outputs, which graphs share; their launches lie in
        memory of the driver, which tells nobody.
        """
        each = {
            str(key): {"seconds": one.seconds, "bytes": one.num_bytes}
            for key, one in self._captured.items()
        }
        return {
            "count": len(each),
            "seconds": sum(one.seconds for one in self._captured.values()),
            "bytes": sum(one.num_bytes for one in self._captured.values()),
            "graphs": each,
        }

    def _capture(self, compute: Callable[[], Any], changes: Sequence[Tensor]) -> Captured:
        start = time.perf_counter()
        before = [tensor.clone() for tensor in changes]
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):  # compiles what has to be, which a capture may not
            compute()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        for tensor, kept in zip(changes, before, strict=True):
            tensor.copy_(kept)
        torch.cuda.synchronize(self._device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # A capture begins with this too: what was cached must not be set off against what it takes.
        torch.cuda.empty_cache()
        held = torch.cuda.memory_reserved(self._device)
        with torch.cuda.graph(graph, pool=self._pool):
            output = compute()
        seconds = time.perf_counter() - start
        taken = torch.cuda.memory_reserved(self._device) - held
        return Captured(graph, output, seconds, max(taken, 0))

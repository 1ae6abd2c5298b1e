"""Bugs these tests would catch: memory that others had cached set off against what a capture takes;
bytes below zero; graphs that are forgotten while the device still holds their memory.

Figures here are those of a device that is made up: they need none.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from decode.native.graphs import Graphs


class FakeDevice:
    """Counts bytes as PyTorch's allocator does: what is cached stays reserved until it is emptied,
    and a capture, which begins by emptying, takes what it needs from the device.
    """

    def __init__(self, patch: pytest.MonkeyPatch, taken: list[int], warming: int) -> None:
        self.used, self.cached, self.pool = 1000, 5000, 0
        self.taken, self.warming = iter(taken), warming
        device = self

        class Graph:
            def replay(self) -> None:
                pass

        class Capture:
            def __init__(self, graph: Graph, pool: object) -> None:
                assert pool == "pool"

            def __enter__(self) -> None:
                device.empty()

            def __exit__(self, *_: object) -> None:
                device.pool += next(device.taken)

        class Stream:
            def __init__(self, *_: object) -> None:
                device.cached += warming  # what the pass before the capture leaves

            def wait_stream(self, other: object) -> None:
                pass

        fakes: dict[str, Any] = {
            "memory_reserved": lambda _: self.used + self.cached + self.pool,
            "empty_cache": self.empty,
            "synchronize": lambda _: None,
            "graph_pool_handle": lambda: "pool",
            "CUDAGraph": Graph,
            "graph": Capture,
            "Stream": Stream,
            "current_stream": Stream,
            "stream": lambda _: nullcontext(),
        }
        for name, fake in fakes.items():
            patch.setattr(torch.cuda, name, fake)

    def empty(self) -> None:
        self.cached = 0


def test_what_graphs_hold_is_what_their_captures_took(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch, [300, 0, 200, -50], warming=4000)
    graphs = Graphs(torch.device("cuda"))
    for key in ("a", "b", "c"):
        assert graphs.run(key, lambda: 1) == 1
    told = graphs.report()
    assert [one["bytes"] for one in told["graphs"].values()] == [300, 0, 200]
    assert told["bytes"] == device.pool
    graphs.run("d", lambda: 1)  # garbage of another pool was collected meanwhile
    assert graphs.report()["bytes"] == 500
    device.cached = 700
    graphs.clear()
    assert device.cached == 0
    assert graphs.report()["bytes"] == graphs.report()["count"] == 0

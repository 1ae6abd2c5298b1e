"""The machine a run happens on: device, threads, clock, locks, and the fingerprint of its hardware."""

import fcntl
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from decode.clock import Clock, SystemClock, VirtualClock

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Where and how a run happens; never part of an artifact's identity, save where a stage times something."""

    device: str  # "auto", "cpu" or "cuda"
    threads: int  # CPU threads of torch; 0: as many as there are cores
    clock: str  # "system", or "virtual": every reading advances one millisecond, so that runs can be compared

    def resolved_device(self) -> str:
        import torch

        if self.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        return self.device

    def make_clock(self) -> Clock:
        return {"system": SystemClock, "virtual": VirtualClock}[self.clock]()

    def timing_identity(self) -> dict[str, Any]:
        """What changes measured seconds beside the hardware itself."""
        return {"device": self.resolved_device(), "threads": self.threads, "clock": self.clock}

    @contextmanager
    def lock(self, path: Path) -> Iterator[None]:
        """Hold `path` against other processes; the system lets go of it when this process dies."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("another process is building %s; waiting for it", path.with_suffix(""))
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


@cache
def hardware() -> dict[str, Any]:
    """Fingerprint of the machine: CPU model, cores, memory in GiB, GPU."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(memory),
        "gpu": gpu,
        "num_gpus": torch.cuda.device_count() if gpu else 0,
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()

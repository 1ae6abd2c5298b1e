"""The machine a run happens on: device, threads, clock, and the fingerprint of its hardware."""

import math
import os
import platform
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from decode.clock import Clock, SystemClock, VirtualClock
from pipeline import files

DEVICES = ("auto", "cpu", "cuda")
SHARDINGS = ("ddp", "fsdp2")
GPU_THREADS = 8
CLOCKS = {"system": SystemClock, "virtual": VirtualClock}


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Where and how a run happens; in an identity only where the stage times something."""

    device: str  # "auto", "cpu" or "cuda"
    threads: int  # CPU threads of torch; 0: as many as there are cores, or a few beside a GPU
    clock: str  # "system", or "virtual": every reading advances 1/1024 s, for equal runs
    num_processes: int = 1  # that do a stage's work; 0: one for each GPU
    sharding: str = "ddp"  # each of them holds all ("ddp"), or its share of what is trained
    peak_tflops: dict[str, float] = field(default_factory=dict)  # GPU name -> dense bfloat16

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ValueError(
                f"runtime.device={self.device} is not known; use {' or '.join(DEVICES)}"
            )
        if self.threads < 0:
            raise ValueError(
                f"runtime.threads={self.threads} must be 0 (every core) or a positive number"
            )
        if self.clock not in CLOCKS:
            raise ValueError(f"runtime.clock={self.clock} is not known; use {' or '.join(CLOCKS)}")
        if self.num_processes < 0:
            raise ValueError(
                f"runtime.num_processes={self.num_processes} must be 0 (one for each GPU) or a "
                "positive number"
            )
        if self.sharding not in SHARDINGS:
            raise ValueError(
                f"runtime.sharding={self.sharding} is not known; use {' or '.join(SHARDINGS)}"
            )

    def resolved_device(self) -> str:
        """Gives "cpu" or "cuda"; asking for a GPU where torch sees none is refused."""
        import torch

        if self.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("runtime.device=cuda, but torch sees no GPU; use runtime.device=cpu")
        return self.device

    def num_gpus(self) -> int:
        """How many GPUs there are for this run's processes; none where it runs on the CPU."""
        import torch

        return 0 if self.resolved_device() == "cpu" else torch.cuda.device_count()

    def resolved_processes(self, share_gpus: bool = False) -> int:
        """How many processes a stage has; more than there are GPUs is refused, unless its
        processes may share them.
        """
        if self.resolved_device() == "cpu":
            return max(1, self.num_processes)
        gpus = self.num_gpus()
        if self.num_processes > gpus and not share_gpus:
            raise ValueError(
                f"runtime.num_processes={self.num_processes}, but torch sees {gpus} GPUs; use "
                "runtime.num_processes=0, which is one for each"
            )
        return self.num_processes or gpus

    def device_peak_flops(self) -> float | None:
        """Floating point operations a second of one device, bfloat16; None where not known."""
        import torch

        if self.resolved_device() == "cpu":
            return None
        tflops = self.peak_tflops.get(torch.cuda.get_device_name())
        return None if tflops is None else tflops * 1e12

    def num_threads(self, size: int = 1) -> int:
        """Of torch on the CPU, in each of so many processes. Beside a GPU, where the CPU has small
        things to do, many threads mostly wait for each other.
        """
        each = max(1, (self.threads or num_cores()) // size)
        return each if self.threads or self.resolved_device() == "cpu" else min(each, GPU_THREADS)

    def apply(self) -> None:
        """Give torch its threads, for this whole process."""
        import torch

        torch.set_num_threads(self.num_threads())

    def make_clock(self) -> Clock:
        return CLOCKS[self.clock]()

    def timing_identity(self) -> dict[str, Any]:
        """What changes measured seconds beside the hardware itself."""
        device = self.resolved_device()
        return {"device": device, "threads": self.num_threads(), "clock": self.clock}

    def lock(self, path: Path) -> AbstractContextManager[None]:
        """Hold `path` against other processes; see `pipeline.files.lock`."""
        return files.lock(path)


@cache
def num_cores() -> int:
    """CPU cores that this process may use: its affinity, within its container's quota."""
    allowed = getattr(os, "sched_getaffinity", None)
    cores = len(allowed(0)) if allowed else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists():
        most, period = quota.read_text().split()
        if most != "max":
            cores = min(cores, math.ceil(int(most) / int(period)))
    return cores


@cache
def hardware() -> dict[str, Any]:
    """Fingerprint of the machine: CPU model, cores, memory in GiB, GPU."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": _cpu_model(),
        "cores": num_cores(),
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

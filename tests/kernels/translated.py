"""Translating kernels for a GPU where there is none.

The compiler needs no GPU to translate for one: a process of its own, in which Triton is not the
interpreter, is told what compute capability its device is of.
"""

import os
import subprocess
import sys
from pathlib import Path

DEVICE = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Device:  # what the compiler asks of a device
    def get_current_target(self): return GPUTarget("cuda", CAPABILITY, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device=None): return 0
    def get_active_torch_device(self): return torch.device("cpu")

driver.set_active(Device())
"""


def told_by(program: str, cache: Path, *arguments: str, capability: int = 90) -> str:
    """The last line that the program prints, once such a device is there."""
    environment = {name: value for name, value in os.environ.items() if "TRITON" not in name}
    environment["TRITON_CACHE_DIR"] = str(cache)
    ran = subprocess.run(
        [sys.executable, "-c", f"CAPABILITY = {capability}" + DEVICE + program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return (ran.stdout.splitlines() or [""])[-1]

# mypy: disallow-untyped-defs=False
"""How much of a kernel may happen before the one in front of it has ended (compute capability 9.0).

"off": nothing. "launch": its programs come up and wait (programmatic dependent launch), and ask
meanwhile for weights, which no kernel writes. "late": they come up only when those of the kernel in
front have waited, so that fewer are up at a time and none takes room from one that has not begun;
behind products it is always so. Therefore everything that ran before the last product has ended
when a program comes up: it may ask for that too, such as the places of rows and the keys of earlier
tokens. What is computed stays the same to the bit. A kernel waits before it reads anything else or
writes, in every program, so that all that ran before it has ended too.
Who changes weights does so before a pass is queued, and not by such a kernel.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.tiles import capability

MODES = ("off", "launch", "late")
LATE = tl.constexpr(MODES.index("late"))


class _Mode:
    """The one in use by every launch of this process, and by captures from then on."""

    number = MODES.index("launch")


def use(mode: str) -> None:
    """Choose for all launches that follow; raises ValueError for a mode that is none."""
    if mode not in MODES:
        raise ValueError(f"overlap={mode} is not known; use {', '.join(MODES)}")
    _Mode.number = MODES.index(mode)


def mode_in_use() -> str:
    """The mode of launches from now on, where the device has it."""
    return MODES[_Mode.number]


def options(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch on this device."""
    number = _Mode.number if capability(device) >= (9, 0) else 0
    return {"OVERLAP": number, "launch_pdl": number > 0}


@triton.jit
def announce():
    """The next kernel's programs may come up."""
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait():
    """Until the kernel in front has written everything."""
    tl.extra.cuda.gdc_wait()


@triton.jit
def announce_early(OVERLAP: tl.constexpr):
    """What a kernel begins with that asks for weights before it waits."""
    if OVERLAP < LATE:
        announce()


@triton.jit
def wait_for_turn(OVERLAP: tl.constexpr):
    """And how it goes on."""
    wait()
    if OVERLAP == LATE:
        announce()


@triton.jit
def follow(OVERLAP: tl.constexpr):
    """What a kernel begins with that has nothing to do before the one in front has ended."""
    announce_early(OVERLAP)
    wait_for_turn(OVERLAP)


@triton.jit
def settled(pointer):
    """A number written before the last product; a multiprocessor's own cache may hold an older."""
    return tl.load(pointer, cache_modifier=".cg")


@triton.jit
def fetch(pointers):
    """Have what these point at come to the cache that all programs share, and go on."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )

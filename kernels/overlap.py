# mypy: disallow-untyped-defs=False
"""How much of a kernel may happen before the one in front of it has ended (compute capability 9.0).

"off": nothing. "launch": its programs come up and wait (programmatic dependent launch). "prefetch":
besides, products ask for their weights, which no kernel writes. What is computed stays the same to
the bit. A kernel waits before it reads or writes anything else, in every program, so that all that
ran before it has ended too.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.tiles import capability

MODES = ("off", "launch", "prefetch")
LINE = tl.constexpr(128)  # bytes that are asked for at once
PREFETCHED = tl.constexpr(65536)  # bytes of a program, at most


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
def follow():
    """What a kernel begins with that has nothing to do before the one in front has ended."""
    announce()
    wait()


@triton.jit
def prefetch(pointers, columns, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Ask for rows of a weight: COLUMNS numbers from each pointer [ROWS, 1] on, as far as allowed.

    `columns` are left of the row, so that nothing past a weight's end is asked for.
    """
    size: tl.constexpr = pointers.dtype.element_ty.primitive_bitwidth // 8
    step: tl.constexpr = LINE // size
    most: tl.constexpr = PREFETCHED // size // ROWS
    for start in tl.static_range(0, min(COLUMNS, most), step):
        at = (pointers + tl.minimum(start, columns - 1)).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [at],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

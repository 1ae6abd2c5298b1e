"""One way to launch, so that what a pass will need can be compiled beforehand, on every core.

Triton compiles a kernel at its first launch, one after the other. Within `collected`, launches are
noted and not made; `compile_all` then compiles each kind of them in threads (the compiler lets go
of the interpreter's lock), and what was compiled is kept on disk by Triton.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Launch:
    """A kernel, its grid and its arguments."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        """What it is given, by name."""
        return dict(zip(self.kernel.arg_names, self.args, strict=False)) | self.options

    def kind(self) -> tuple[Any, ...]:
        """Equal for launches that share one compiled kernel."""
        plain = getattr(self.kernel, "do_not_specialize", ())
        args = tuple(
            None if name in plain else _kind(value)
            for name, value in zip(self.kernel.arg_names, self.args, strict=False)
        )
        return id(self.kernel), args, tuple(sorted(self.options.items()))


class _Collected:
    """Where launches go while they are noted; None: to the device."""

    launches: list[Launch] | None = None


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """kernel[grid](*args, **options), or a note of it."""
    if _Collected.launches is None:
        kernel[grid](*args, **options)
    else:
        _Collected.launches.append(Launch(kernel, grid, args, options))


@contextmanager
def collected() -> Iterator[list[Launch]]:
    """The launches that are noted, and not made, inside. For one thread at a time."""
    assert _Collected.launches is None, "launches are being collected already"
    _Collected.launches = []
    try:
        yield _Collected.launches
    finally:
        _Collected.launches = None


def compile_all(launches: Sequence[Launch], device: torch.device, workers: int) -> int:
    """Compile what these launches need; how many kernels that were."""
    kinds = {one.kind(): one for one in launches}
    index = torch.cuda.current_device() if device.type == "cuda" else None
    index = index if device.index is None else device.index

    def compiled(one: Launch) -> None:
        if index is not None:
            torch.cuda.set_device(index)
        kernel = one.kernel.warmup(*one.args, grid=one.grid, **one.options)
        # Touched, so that its launcher is built and its code loaded here too.
        getattr(kernel, "run", None)

    with ThreadPoolExecutor(max(1, workers)) as pool:
        list(pool.map(compiled, kinds.values()))
    return len(kinds)


def _kind(value: Any) -> Any:
    """What Triton compiles a kernel anew for: type, alignment, and numbers that it may know."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool):
        return value == 1, value % 16 == 0
    return None if value is None else type(value)

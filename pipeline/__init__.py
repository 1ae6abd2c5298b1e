"""Stages, files, time and tracking: the only room that knows Hydra and W&B."""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.load import load_decoder

__all__ = ["load_decoder"]

# Read when torch is loaded. OpenMP's threads wait for each other by spinning, some milliseconds
# long; beside one busy process of somebody else each of the hundred parallel regions of a pass then
# waits for its slice of time, and the pass takes ten times as long (LOG.md). So they soon sleep.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def __getattr__(name: str) -> Any:
    """`from pipeline import load_decoder` loads torch only when it is asked for."""
    if name == "load_decoder":
        from pipeline.load import load_decoder

        return load_decoder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

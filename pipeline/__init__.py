"""Stages, files, time and tracking: the only room that knows Hydra and W&B."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.load import load_decoder

__all__ = ["load_decoder"]


def __getattr__(name: str) -> Any:
    """`from pipeline import load_decoder` loads torch only when it is asked for."""
    if name == "load_decoder":
        from pipeline.load import load_decoder

        return load_decoder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""What the commands that measure model folders share: arguments, conditions of a figure, output."""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline.files import write_json
from pipeline.headline import finite
from pipeline.manifest import circumstances
from pipeline.progress import WIDE


def command(
    description: str | None, target: str, drafter: str | None = None, **defaults: Any
) -> argparse.ArgumentParser:
    """A parser of TARGET [DRAFTER] [--dtype] [--device] [--out], with help texts for the first two.

    `defaults` are those of dtype and device; None leaves the choice to the target's loading.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", help=target)
    if drafter is not None:
        parser.add_argument("drafter", help=drafter)
    parser.add_argument("--dtype", default=None, help="auto, float32, bfloat16 or float16")
    parser.add_argument("--device", default=None)
    parser.add_argument("--out", type=Path, default=None, help="a JSON file to write")
    parser.set_defaults(**defaults)
    return parser


def conditions(target: Any) -> dict[str, Any]:
    """Under which a figure of this target holds: machine, dtype, packages, commit."""
    return {
        "dtype": str(next(target.model.parameters()).dtype).removeprefix("torch."),
        **circumstances(),
    }


def told(results: dict[str, Any], out: Path | None) -> dict[str, Any]:
    """The results as JSON can hold them, written where they are wanted."""
    results = finite(results)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, results)
    return results


def new_table(title: str, left: str, *right: str) -> Table:
    """An empty table of names and numbers."""
    table = Table(title=title)
    table.add_column(left)
    for name in right:
        table.add_column(name, justify="right")
    return table


def show(*parts: Table | str) -> None:
    """Print; a file or pipe gets lines as long as they are."""
    console = Console()
    console = console if console.is_terminal else Console(width=WIDE)
    for part in parts:
        console.print(part)

"""The report that a person reads: a table and what to deploy on the terminal, and one HTML file
with everything in it.
"""

import html
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from pipeline import markup
from pipeline.bench_tables import bench_section
from pipeline.plots import draw_all
from pipeline.progress import WIDE
from pipeline.report_tables import (
    WALL_COLUMNS,
    acceptance_table,
    conditions_table,
    cost_table,
    error_table,
    grid_table,
    replay_table,
    stage_table,
    training_table,
    wall_cells,
)
from pipeline.scores import ALL
from pipeline.verdict import deployment_sentence, machine, requirement_lines

__all__ = ["as_text", "deployment_sentence", "findings", "wall_table", "write_report"]

Results = Mapping[str, Any]
SHORT = ("method", "tok/s", "speed over plain", "acceptance length", "break-even length")


def findings(results: Results) -> Group:
    """What a person wants to see first: the table, what to deploy, what each drafter would need."""
    lines = [Text(f"  {line}") for line in requirement_lines(results["requirements"])]
    return Group(wall_table(results), Text(results["deployment"], style="bold"), *lines)


def as_text(content: Group | Table) -> str:
    """As plain lines, none of them wrapped."""
    console = Console(width=WIDE, no_color=True)
    with console.capture() as capture:
        console.print(content, soft_wrap=True)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def wall_table(results: Results) -> Table:
    """The measured methods over all test prompts, for the terminal."""
    conditions = results["conditions"]
    where = machine(conditions)
    how = f"{conditions['dtype']}, {conditions['backend']}"
    table = Table(title=f"{conditions['target']} ({how}) on {where}")
    columns = ("temperature", *SHORT, "draft ms", "verify ms", "steps off")
    for name in columns:
        table.add_column(name, justify="left" if name in ("temperature", "method") else "right")
    for row in results["wall"]:
        if row["domain"] == ALL:
            cells = dict(zip(WALL_COLUMNS, wall_cells(row, results), strict=True))
            table.add_row(*(cells[name] for name in columns), end_section=_last(row, results))
    return table


def write_report(results: Results, folder: Path) -> Path:
    """Draw the plots and write report.html, which holds them and needs no other file."""
    pictures = draw_all(results, folder)
    template = (files("pipeline") / "templates" / "report.html").read_text(encoding="utf-8")
    page = Template(template).substitute(
        sample_style=markup.SAMPLE_STYLE,
        headline=html.escape(results["deployment"]),
        requirements=markup.bullets(requirement_lines(results["requirements"])),
        wall=markup.table(WALL_COLUMNS, [wall_cells(row, results) for row in results["wall"]]),
        audit=html.escape(audit_text(results["audit"])),
        grid=grid_table(results),
        replay=replay_table(results),
        acceptance=acceptance_table(results),
        benchmarks=bench_section(results),
        samples=markup.samples(results.get("samples", [])) or "<p>None were kept.</p>",
        training=training_table(results),
        training_cost=cost_table(results),
        stages=stage_table(results),
        error=error_table(results),
        conditions=conditions_table(results["conditions"]),
        **{f"plot_{name}": markup.image(pictures.get(name)) for name in _PLOTS},
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


_PLOTS = ("speed", "grid", "replay", "acceptance", "training", "curves")


def audit_text(audit: Mapping[str, Any]) -> str:
    """What was compared with plain decoding's greedy text, and what differed."""
    if not audit["compared"]:
        return "No greedy law was measured, so no text was compared."
    compared = ", ".join(
        f"{name} {audit['different'][name]} of {count}" for name, count in audit["compared"].items()
    )
    text = f"Greedy texts that differ from plain decoding's: {compared}."
    if audit["differences"]:
        gap = audit["largest_gap"]
        text += (
            f" Where they part, the two best logits of plain decoding are at most {gap:.2g} apart: "
            "a wider pass rounds differently, and a tie within rounding falls either way."
        )
    return text


def _last(row: Mapping[str, Any], results: Results) -> bool:
    """Whether a law ends with this row."""
    own = [r for r in results["wall"] if r["domain"] == ALL and r["law"] == row["law"]]
    return row is own[-1]

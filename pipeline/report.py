"""The report that a person reads: a table on the terminal, and one HTML file with everything in
it.
"""

import base64
import html
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from rich.table import Table

from pipeline.plots import draw_all
from pipeline.scores import ALL
from pipeline.verdict import deployment_sentence, machine, ratio_text
from pipeline.wallclock import PLAIN

__all__ = ["deployment_sentence", "wall_table", "write_report"]

WALL_COLUMNS = (
    "temperature",
    "domain",
    "method",
    "tok/s",
    "speed over plain",
    "acceptance length",
    "break-even length",
    "draft ms",
    "verify ms",
    "host ms",
    "p50 ms/token",
    "p95 ms/token",
    "steps off",
    "distinct 8-grams",
    "drafters used",
)
SHORT = ("method", "tok/s", "speed over plain", "acceptance length", "break-even length")


def wall_table(results: Mapping[str, Any]) -> Table:
    """The measured methods over all test prompts, for the terminal."""
    conditions = results["conditions"]
    where = machine(conditions)
    table = Table(title=f"{conditions['target']} ({conditions['dtype']}) on {where}")
    columns = ("temperature", *SHORT, "draft ms", "verify ms", "steps off")
    for name in columns:
        table.add_column(name, justify="left" if name in ("temperature", "method") else "right")
    for row in results["wall"]:
        if row["domain"] == ALL:
            cells = dict(zip(WALL_COLUMNS, wall_cells(row, results), strict=True))
            table.add_row(*(cells[name] for name in columns), end_section=_last(row, results))
    return table


def wall_cells(row: Mapping[str, Any], results: Mapping[str, Any]) -> list[str]:
    """One row of the scoreboard as text, in the order of WALL_COLUMNS."""
    used = ", ".join(f"{name} {share:.0%}" for name, share in row["drafters"].items())
    arm = f" ({row['arm']})" if row["arm"] else ""
    return [
        f"{results['conditions']['temperatures'][row['law']]:g}",
        row["domain"],
        row["method"] + arm,
        number(row["tokens_per_second"], 1),
        "1" if row["method"] == PLAIN else ratio_text(row),
        number(row["acceptance_length"], 2),
        number(row["break_even_length"], 2),
        number(row["draft_ms"], 1),
        number(row["verify_ms"], 1),
        number(row["host_ms"], 2),
        number(row["p50_token_ms"], 1),
        number(row["p95_token_ms"], 1),
        f"{row['share_of_steps_off']:.0%}",
        number(row["distinct_8gram_share"], 2),
        used or "-",
    ]


def number(value: float | None, digits: int) -> str:
    """The number, or a dash where there is none."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def write_report(results: Mapping[str, Any], folder: Path) -> Path:
    """Draw the plots and write report.html, which holds them and needs no other file."""
    pictures = draw_all(results, folder)
    template = (files("pipeline") / "templates" / "report.html").read_text(encoding="utf-8")
    page = Template(template).substitute(
        headline=html.escape(results["deployment"]),
        wall=_html_table(WALL_COLUMNS, [wall_cells(row, results) for row in results["wall"]]),
        audit=html.escape(audit_text(results["audit"])),
        grid=_grid_table(results),
        replay=_replay_table(results),
        training=_training_table(results),
        error=_error_table(results),
        conditions=_conditions_table(results["conditions"]),
        **{f"plot_{name}": _image(pictures.get(name)) for name in _PLOTS},
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


_PLOTS = ("speed", "grid", "replay", "training")


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


def _last(row: Mapping[str, Any], results: Mapping[str, Any]) -> bool:
    """Whether a law ends with this row."""
    own = [r for r in results["wall"] if r["domain"] == ALL and r["law"] == row["law"]]
    return row is own[-1]


def _html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _grid_table(results: Mapping[str, Any]) -> str:
    columns = ("temperature", "domain", "drafter", "K", "acceptance length", "break-even length")
    temperatures = results["conditions"]["temperatures"]
    rows = [
        [
            f"{temperatures[row['law']]:g}",
            row["domain"],
            row["drafter"],
            str(row["num_draft_tokens"]),
            number(row["acceptance_length"], 2),
            number(row["break_even_length"], 2),
            number(row["tokens_per_second"], 1),
            ratio_text(row),
        ]
        for row in results["grid"]
    ]
    return _html_table((*columns, "predicted tok/s", "predicted speed over plain"), rows)


def _replay_table(results: Mapping[str, Any]) -> str:
    columns = ("temperature", "domain", "policy", "tok/s", "speed over plain", "over best fixed")
    temperatures = results["conditions"]["temperatures"]
    rows = [
        [
            f"{temperatures[row['law']]:g}",
            row["domain"],
            row["policy"],
            number(row["tokens_per_second"], 1),
            ratio_text(row),
            ratio_text({"speed_ratio": row["ratio_to_best_fixed"]}),
            _percent(row["oracle_gap_closed"]),
            _percent(row["share_of_steps_off"]),
        ]
        for row in results["replay"]
    ]
    return _html_table((*columns, "of the oracle's gap", "steps off"), rows)


def _percent(share: float | None) -> str:
    return "-" if share is None or not math.isfinite(share) else f"{share:.0%}"


def _training_table(results: Mapping[str, Any]) -> str:
    columns = ("drafter", "before training", "after", "gain [95% interval]")
    rows = [
        [
            row["drafter"],
            number(row["acceptance_length_before"], 3),
            number(row["acceptance_length_after"], 3),
            f"{row['acceptance_length_gain']:+.3f} [{row['acceptance_length_gain_low']:+.3f}, "
            f"{row['acceptance_length_gain_high']:+.3f}]",
        ]
        for row in results["training"]
    ]
    return _html_table(columns, rows) if rows else "<p>This pool trains no drafter.</p>"


def _error_table(results: Mapping[str, Any]) -> str:
    rows = [
        [
            row["law"],
            row["method"],
            number(row["predicted"], 2),
            number(row["measured"], 2),
            _percent(row["error"]),
        ]
        for row in results["replay_error"]
    ]
    return _html_table(("law", "method", "replayed ratio", "measured ratio", "error"), rows)


def _conditions_table(conditions: Mapping[str, Any]) -> str:
    rows = []
    for name, value in conditions.items():
        text = value
        if isinstance(value, Mapping):
            text = ", ".join(f"{key} {child}" for key, child in value.items())
        elif isinstance(value, list):
            text = ", ".join(map(str, value))
        rows.append([name.replace("_", " "), str(text)])
    return _html_table(("condition", "value"), rows)


def _image(path: Path | None) -> str:
    """The picture inside the page itself."""
    if path is None:
        return ""
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<img alt="{path.stem}" src="data:image/png;base64,{data}">'

"""What the report says of benchmarks, and of drafters against one another, as HTML."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline import markup
from pipeline.report_tables import number

Results = Mapping[str, Any]
PASS_COLUMNS = ("passed", "failed", "timeout", "error")


def bench_section(results: Results) -> str:
    """A section with a table for whatever was measured; empty where nothing was."""
    parts = [
        (_families(results.get("acceptance_by_family", [])), "Acceptance length by task family"),
        (_quality(results), "Right answers"),
        (_gains(results.get("gains", [])), "Drafters against one, in pairs"),
        (_leaks(results.get("bench_leaks", [])), "Prompts that were learned from and share text"),
    ]
    shown = [
        f'<h3>{title}</h3>\n<div class="wide">{table}</div>' for table, title in parts if table
    ]
    return "\n".join(["<h2>Benchmarks and comparisons</h2>", *shown]) if shown else ""


def _families(rows: Sequence[Results]) -> str:
    """Families by drafters: acceptance_length and its interval."""
    if not rows:
        return ""
    drafters = list(dict.fromkeys(row["drafter"] for row in rows))
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    counts: dict[tuple[str, str, str], int] = {}
    for row in rows:
        place = (row["law"], row["split"], row["family"])
        cells.setdefault(place, {})[row["drafter"]] = _with_interval(row, "acceptance_length", 2)
        counts[place] = row["num_prompts"]
    lines = [
        [*place, str(counts[place]), *(found.get(name, "-") for name in drafters)]
        for place, found in cells.items()
    ]
    return markup.table(("law", "benchmark", "family", "questions", *drafters), lines)


def _quality(results: Results) -> str:
    rows = results.get("quality", [])
    if not rows:
        return ""
    lines = [
        [
            row["law"],
            row["bench"],
            row["method"],
            f"{row['share_passed']:.1%}",
            *(f"{row[name]:,}" for name in ("num_answers", *PASS_COLUMNS)),
        ]
        for row in rows
    ]
    names = ("law", "benchmark", "method", "right", "answers", *PASS_COLUMNS)
    return markup.table(names, lines) + f"<p>{html.escape(audit_sentence(results))}</p>"


def audit_sentence(results: Results) -> str:
    """Whether speculative decoding moved a greedy answer's grade."""
    audit = results.get("quality_audit")
    if not audit or not audit["compared"]:
        return "No greedy answer was decoded by several methods, so none was compared."
    count = sum(audit["compared"].values())
    if audit["is_equal"]:
        return f"All {count:,} greedy answers of other methods are graded as plain decoding's are."
    where = ", ".join(f"{row['id']} ({row['method']})" for row in audit["moved"])
    return (
        f"Of {count:,} greedy answers of other methods {len(audit['moved'])} are graded otherwise "
        f"than plain decoding's: {where}."
    )


def _gains(rows: Sequence[Results]) -> str:
    lines = [
        [
            row["law"],
            row["split"],
            row["domain"],
            f"{row['drafter']} against {row['against']}",
            _with_interval(row["ratio"], "value", 3),
            _with_interval(row["difference"], "value", 3),
            str(row["ratio"]["num"]),
        ]
        for row in rows
    ]
    names = ("law", "split", "domain", "drafters", "ratio", "difference", "questions")
    return markup.table(names, lines) if lines else ""


def _leaks(rows: Sequence[Results]) -> str:
    lines = [
        [row["bench"], row["split"], f"{row['num_prompts']:,}", row["example"][:200]]
        for row in rows
    ]
    return markup.table(("benchmark", "split", "prompts", "one of them"), lines) if lines else ""


def _with_interval(row: Results, name: str, digits: int) -> str:
    value, low, high = (number(row[key], digits) for key in (name, "low", "high"))
    return f"{value} [{low}, {high}]"

"""Tables of the report, as HTML."""

import math
from collections.abc import Mapping
from typing import Any

from pipeline import markup
from pipeline.progress import duration
from pipeline.verdict import ratio_text
from pipeline.wallclock import PLAIN

Results = Mapping[str, Any]

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


def wall_cells(row: Mapping[str, Any], results: Results) -> list[str]:
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


def grid_table(results: Results) -> str:
    """Every arm by replay."""
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
    return markup.table((*columns, "predicted tok/s", "predicted speed over plain"), rows)


def replay_table(results: Results) -> str:
    """Every policy and oracle by replay."""
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
    return markup.table((*columns, "of the oracle's gap", "steps off"), rows)


def _percent(share: float | None) -> str:
    return "-" if share is None or not math.isfinite(share) else f"{share:.0%}"


def training_table(results: Results) -> str:
    """acceptance_length on validation before and after training."""
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
    return markup.table(columns, rows) if rows else "<p>This pool trains no drafter.</p>"


def acceptance_table(results: Results) -> str:
    """acceptance_length by drafter, domain and law; empty where it was not summed."""
    columns = ("drafter", "split", "domain", "law", "acceptance length [95% interval]", "tokens")
    rows = [
        [
            row["drafter"],
            row["split"],
            row["domain"],
            row["law"],
            f"{number(row['acceptance_length'], 2)} "
            f"[{number(row['low'], 2)}, {number(row['high'], 2)}]",
            f"{row['tokens']:,.0f}",
        ]
        for row in results.get("acceptance_by_domain", [])
    ]
    return markup.table(columns, rows) if rows else ""


def cost_table(results: Results) -> str:
    """What each trained drafter cost; empty where that was not kept."""
    work = ("drafter", "stage", "time", "of it steps", "steps", "best step", "answer tokens")
    speed = ("tokens/s", "of the peak", "own parameters", "on")
    rows = [
        [
            row["drafter"],
            row["stage"],
            _time(row["seconds"]),
            _time(row["step_seconds"]),
            _count(row["num_steps"]),
            "0: its start was best" if row["best_step"] == 0 else _count(row["best_step"]),
            _count(row["num_tokens"]),
            _count(row["tokens_per_second"]),
            _percent(row["flop_utilisation"]),
            _count(row["num_parameters"]),
            _machines(row),
        ]
        for row in results.get("training_cost", [])
    ]
    return markup.table((*work, *speed), rows) if rows else ""


def _machines(row: Mapping[str, Any]) -> str:
    processes = row["num_processes"] or 1
    return row["hardware"] if processes == 1 else f"{processes} x {row['hardware']}"


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def stage_table(results: Results) -> str:
    """Seconds of every artifact behind the results."""
    rows = [
        [row["stage"], row["signature"], _time(row["seconds"]), row["hardware"]]
        for row in results.get("stage_seconds", [])
    ]
    return markup.table(("stage", "artifact", "time", "on"), rows) if rows else ""


def error_table(results: Results) -> str:
    """How far replay is from wall clock."""
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
    return markup.table(("law", "method", "replayed ratio", "measured ratio", "error"), rows)


def conditions_table(conditions: Mapping[str, Any]) -> str:
    """Everything without which the figures mean nothing."""
    rows = []
    for name, value in conditions.items():
        text = value
        if isinstance(value, Mapping):
            text = ", ".join(f"{key} {child}" for key, child in value.items())
        elif isinstance(value, list):
            text = ", ".join(map(str, value))
        rows.append([name.replace("_", " "), str(text)])
    return markup.table(("condition", "value"), rows)

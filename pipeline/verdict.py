"""One sentence: what to deploy on this machine, and what every other drafter would need.

A method is recommended for a law only where the whole interval of its measured speed lies above
plain decoding's.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.scores import ALL
from pipeline.wallclock import PLAIN

Row = Mapping[str, Any]


def deployment_sentence(results: Mapping[str, Any]) -> str:
    """The recommendation with its ratio and interval, law by law, then the needs of each
    drafter.
    """
    conditions = results["conditions"]
    laws = conditions["temperatures"].items()
    clauses = [_recommendation(law, temperature, results["wall"]) for law, temperature in laws]
    needs = [
        _need(name, results["grid"], conditions["temperatures"]) for name in conditions["pool"]
    ]
    return (
        f"On {machine(conditions)} deploy {'; '.join(clauses)}. "
        f"Acceptance length against what breaks even: {'; '.join(needs)}."
    )


def machine(conditions: Mapping[str, Any]) -> str:
    """The processor that did the work: a GPU that lay idle is not named."""
    hardware = conditions["hardware"]
    if conditions["device"].startswith("cuda") and hardware.get("gpu"):
        return str(hardware["gpu"])
    return f"{hardware['cpu']} ({hardware['cores']} cores)"


def recommended(law: str, wall: Sequence[Row]) -> Row | None:
    """The fastest method whose interval clears 1.0 for a law; None: plain decoding."""
    paying = [row for row in _rivals(law, wall) if _clears(row)]
    return max(paying, key=lambda row: row["speed_ratio"]["value"], default=None)


def _rivals(law: str, wall: Sequence[Row]) -> list[Row]:
    return [
        row for row in wall if row["law"] == law and row["domain"] == ALL and row["method"] != PLAIN
    ]


def _clears(row: Row) -> bool:
    """False for an interval that is missing: one prompt proves nothing."""
    return (row["speed_ratio"]["low"] or math.nan) > 1.0


def _recommendation(law: str, temperature: float, wall: Sequence[Row]) -> str:
    at = f"at temperature {temperature:g}"
    best = recommended(law, wall)
    if best is not None:
        return f"{named(best)} {at} ({ratio_text(best)} plain decoding's speed)"
    rivals = _rivals(law, wall)
    if not rivals:
        return f"plain decoding {at} (nothing else was measured)"
    nearest = max(rivals, key=lambda row: row["speed_ratio"]["value"] or -math.inf)
    return (
        f"plain decoding {at} ({named(nearest)} comes nearest with {ratio_text(nearest)} its "
        "speed, "
        "which does not clear 1)"
    )


def named(row: Row) -> str:
    """The method in words, with its drafter and K where they are fixed."""
    return f"{row['method']} ({row['arm']})" if row.get("arm") else str(row["method"])


def ratio_text(row: Row) -> str:
    """As in "1.31x [1.20, 1.42]"."""
    ratio = row["speed_ratio"]
    if ratio["low"] is None or math.isnan(ratio["low"]):
        return f"{ratio['value']:.2f}x [no interval from {ratio['num']} prompt]"
    return f"{ratio['value']:.2f}x [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def _need(drafter: str, grid: Sequence[Row], temperatures: Mapping[str, float]) -> str:
    """As in "code K=3 has 1.92 of 1.71 at temperature 0"."""
    parts = []
    for law, temperature in temperatures.items():
        best = best_arm_of(drafter, law, grid)
        if best is None:
            parts.append(f"nothing measured at temperature {temperature:g}")
            continue
        has, needs = best["acceptance_length"], best["break_even_length"]
        verb = "has" if has >= needs else "has only"
        parts.append(
            f"{verb} {has:.2f} and needs {needs:.2f} at temperature {temperature:g} "
            f"(K={best['num_draft_tokens']})"
        )
    return f"{drafter} " + ", ".join(parts)


def best_arm_of(drafter: str, law: str, grid: Sequence[Row]) -> Row | None:
    """The drafter's fastest arm by replay over all domains; None where no arm has finite costs."""
    rows = [
        row
        for row in grid
        if row["drafter"] == drafter
        and row["law"] == law
        and row["domain"] == ALL
        and math.isfinite(row["tokens_per_second"] or math.nan)
    ]
    return max(rows, key=lambda row: row["tokens_per_second"], default=None)

"""What to deploy on this machine, in one sentence, and what every drafter would need.

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
    """The recommendation with its ratio and interval, law by law."""
    conditions = results["conditions"]
    clauses = [
        _recommendation(law, temperature, results["wall"])
        for law, temperature in conditions["temperatures"].items()
    ]
    return f"On {machine(conditions)} deploy {'; '.join(clauses)}."


def recommendations(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The recommendation as fields, one row a law; PLAIN where nothing clears its speed."""
    rows = []
    for law, temperature in results["conditions"]["temperatures"].items():
        best = recommended(law, results["wall"])
        found = {"method": PLAIN, "arm": "", "speed_ratio": None}
        if best is not None:
            found = {name: best[name] for name in found}
        rows.append({"law": law, "temperature": temperature, **found})
    return rows


def requirements(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each drafter has and needs under each law, at its fastest K by replay.

    Where no arm of it has finite costs K and the figures are None.
    """
    rows = []
    for drafter in results["conditions"]["pool"]:
        for law, temperature in results["conditions"]["temperatures"].items():
            best = best_arm_of(drafter, law, results["grid"]) or {}
            found = {
                name: best.get(name)
                for name in ("num_draft_tokens", "acceptance_length", "break_even_length")
            }
            rows.append({"drafter": drafter, "law": law, "temperature": temperature, **found})
    return rows


def requirement_lines(rows: Sequence[Row]) -> list[str]:
    """One line a drafter, as in "code: emits 1.39 a pass, breaks even at 1.96 (T=0, K=3)"."""
    drafters: dict[str, list[Row]] = {}
    for row in rows:
        drafters.setdefault(row["drafter"], []).append(row)
    return [f"{name}: {'; '.join(map(_requirement, own))}" for name, own in drafters.items()]


def _requirement(row: Row) -> str:
    at = f"T={row['temperature']:g}"
    if row["num_draft_tokens"] is None:
        return f"not measured ({at})"
    return (
        f"emits {row['acceptance_length']:.2f} a pass, breaks even at "
        f"{row['break_even_length']:.2f} ({at}, K={row['num_draft_tokens']})"
    )


def best_lengths(results: Mapping[str, Any]) -> dict[tuple[str, str], int]:
    """(drafter, law) -> K of its fastest arm by replay, where it has one."""
    return {
        (row["drafter"], row["law"]): row["num_draft_tokens"]
        for row in requirements(results)
        if row["num_draft_tokens"] is not None
    }


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
    return f"plain decoding {at} ({named(nearest)}, {ratio_text(nearest)}, does not clear 1)"


def named(row: Row) -> str:
    """The method in words, with its drafter and K where they are fixed."""
    return f"{row['method']} ({row['arm']})" if row.get("arm") else str(row["method"])


def ratio_text(row: Row) -> str:
    """As in "1.31x [1.20, 1.42]"."""
    ratio = row["speed_ratio"]
    if ratio["low"] is None or math.isnan(ratio["low"]):
        return f"{ratio['value']:.2f}x [no interval from {ratio['num']} prompt]"
    return f"{ratio['value']:.2f}x [{ratio['low']:.2f}, {ratio['high']:.2f}]"


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

"""What follows from an evaluation's tables: how far replay was off, and the figures to show."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.bench_evaluation import RECORDED
from pipeline.scores import ALL
from pipeline.wallclock import PLAIN


def replay_error(
    wall: Sequence[Mapping[str, Any]], replay: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Predicted against measured speed ratio, for the methods that both have."""
    predicted = {
        (row["law"], row["policy"]): row["speed_ratio"]["value"]
        for row in replay
        if row["domain"] == ALL
    }
    names = {"router only": "router_only + router"}
    rows = []
    for row in wall:
        key = (row["law"], names.get(row["method"], row["method"]))
        if row["domain"] == ALL and row["method"] != PLAIN and key in predicted:
            measured = row["speed_ratio"]["value"]
            found = {"predicted": predicted[key], "measured": measured}
            error = predicted[key] / measured - 1 if measured else math.nan
            rows.append({"law": row["law"], "method": row["method"], **found, "error": error})
    return rows


def finite(value: Any) -> Any:
    """The same content with null for what is not a finite number, so that it is JSON."""
    if isinstance(value, Mapping):
        return {str(key): finite(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [finite(child) for child in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def headline(results: Mapping[str, Any]) -> dict[str, Any]:
    """The figures that the menu and the tracker show."""
    figures: dict[str, Any] = {"deployment": results["deployment"]}
    for row in results["wall"]:
        if row["domain"] == ALL:
            name = f"{row['law']}/{row['method']}"
            figures[f"{name}/tokens_per_second"] = row["tokens_per_second"]
            if row["method"] != PLAIN:
                figures[f"{name}/speed_ratio"] = row["speed_ratio"]["value"]
    figures["greedy_texts_different"] = sum(results["audit"]["different"].values())
    for row in results["quality"]:
        if row["method"] == RECORDED:
            figures[f"{row['law']}/{row['bench']}/share_passed"] = row["share_passed"]
    return finite(figures)

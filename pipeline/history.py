"""history.jsonl: one JSON object a line, {"step": int, "<curve>": number, ...}."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = "history.jsonl"


class History:
    """Curves of a run, appended step by step."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE

    def rewind(self, step: int) -> None:
        """Keep what was written up to and with `step`; a line left unfinished by a kill goes."""
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        partial = self.path.with_name(f"{FILE}.partial")
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines if _step_of(line) <= step)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.path)

    def lines(self) -> list[dict[str, float]]:
        """Every line, as it was appended."""
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]

    def append(self, step: int, curves: dict[str, float]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **curves}) + "\n")


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except json.JSONDecodeError:
        return float("inf")


def read_history(folder: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Steps in order with their curve values; of a step that is there twice, the later values."""
    path = folder / FILE
    if not path.exists():
        return
    steps: dict[int, dict[str, float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        values = {key: value for key, value in entry.items() if key != "step" and _is_number(value)}
        steps.setdefault(int(entry["step"]), {}).update(values)
    yield from sorted(steps.items())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)

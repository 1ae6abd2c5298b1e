"""Folders of a portfolio: one a round and member while it is made, one a member in the end."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from pipeline.files import write_json
from pipeline.history import FILE as HISTORY
from pipeline.validation import read_metrics

METRICS = "metrics.json"  # of a member: its last round's, but for sums over all rounds
SUMMED = ("num_steps", "num_tokens")  # metrics of the rounds that add up


def round_folder(out: Path, number: int) -> Path:
    """Where a round's members are made."""
    return out / f"round-{number}"


def join_rounds(out: Path, name: str, num_rounds: int) -> None:
    """A member's own folder: the last round's drafter, the history of all rounds, sums of both."""
    folders = [round_folder(out, number) / name for number in range(1, num_rounds + 1)]
    made = out / f"{name}.partial"
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(folders[-1], made)
    _join_histories(folders, made)
    reports = [read_metrics(folder) or {} for folder in folders]
    sums = {key: sum(report[key] for report in reports) for key in SUMMED}
    write_json(made / METRICS, {**reports[-1], **sums})
    shutil.rmtree(out / name, ignore_errors=True)
    made.rename(out / name)


def _join_histories(folders: Sequence[Path], out: Path) -> None:
    """One curve through all rounds: steps go on, and so do counts of tokens."""
    lines: list[dict[str, float]] = []
    for folder in folders:
        steps, tokens = (lines[-1]["step"], lines[-1]["num_tokens"]) if lines else (0, 0)
        for line in (folder / HISTORY).read_text(encoding="utf-8").splitlines():
            values = json.loads(line)
            if values["step"] == 0 and steps:
                continue  # the start of a later round is the end of the one before
            values["step"] += steps
            if "num_tokens" in values:
                values["num_tokens"] += tokens
            lines.append(values)
    (out / HISTORY).write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def clean_up(out: Path) -> None:
    """Remove what only a resumed run needs."""
    for folder in out.glob("round-*"):
        shutil.rmtree(folder)

"""What training was and what it cost, read from the artifacts it left: curves, seconds, tokens."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pipeline.history import read_history
from pipeline.manifest import read_manifest
from pipeline.validation import read_metrics

PREFIX = "drafter:"  # of the inputs that hold a trained drafter
MOST_POINTS = 150  # of one curve in a report
MEASURED = (
    "num_steps",
    "best_step",
    "num_tokens",
    "tokens_per_second",
    "flop_utilisation",
    "num_processes",
    "num_parameters",
)

Point = tuple[int, float]


def behind(inputs: Mapping[str, Path], timed: bool) -> dict[str, list[dict[str, Any]]]:
    """How the trained drafters among a stage's inputs came about, and what everything took.

    Unless `timed`, seconds that manifests hold are None: they come from the system's clock, and
    would tell two runs under a virtual one apart.
    """
    trained = trained_drafters(inputs)
    return {
        "training": training_effect(trained),
        "curves": curves(trained),
        "training_cost": training_costs(trained, timed),
        "stage_seconds": stage_seconds(inputs.values(), timed),
    }


def trained_drafters(inputs: Mapping[str, Path]) -> dict[str, Path]:
    """Name -> artifact of every trained drafter among a stage's inputs."""
    return {
        name.removeprefix(PREFIX): folder
        for name, folder in inputs.items()
        if name.startswith(PREFIX)
    }


def training_effect(folders: Mapping[str, Path]) -> list[dict[str, Any]]:
    """acceptance_length on validation before and after training, and the gain."""
    rows = []
    for drafter, folder in folders.items():
        metrics = read_metrics(folder)
        if metrics is not None:
            kept = {key: value for key, value in metrics.items() if "acceptance_length" in key}
            rows.append({"drafter": drafter, **kept})
    return rows


def curves(folders: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Loss and acceptance_length, overall and by domain, of each drafter: a row for each point.

    Long curves are thinned: a row is then the mean over neighbouring steps.
    """
    rows = []
    for drafter, folder in folders.items():
        points: dict[str, list[Point]] = {}
        for step, values in read_history(folder):
            for name in filter(_is_shown, values):
                points.setdefault(name, []).append((step, values[name]))
        for curve, found in points.items():
            for step, value in thinned(found):
                rows.append({"drafter": drafter, "curve": curve, "step": step, "value": value})
    return rows


def _is_shown(curve: str) -> bool:
    """Overall and by domain; those by law (@) stay in the drafter's own history."""
    return curve == "loss" or (curve.startswith("acceptance_length") and "@" not in curve)


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most MOST_POINTS: means of runs of equal length, each at its last step."""
    size = -(-len(points) // MOST_POINTS)
    runs = (points[i : i + size] for i in range(0, len(points), size or 1))
    return [(run[-1][0], fmean(value for _, value in run)) for run in runs]


def training_costs(folders: Mapping[str, Path], timed: bool) -> list[dict[str, Any]]:
    """One row a trained drafter; None where its artifact does not say.

    `seconds` are those of the process that finished it, loading and measuring included;
    `step_seconds` those of all training steps, of earlier processes as well.
    """
    rows = []
    for drafter, folder in folders.items():
        manifest = read_manifest(folder)
        steps = [values.get("step_seconds") for _, values in read_history(folder)]
        known = [seconds for seconds in steps if seconds is not None]
        rows.append(
            {
                "drafter": drafter,
                "stage": manifest["identity"]["stage"],
                "seconds": manifest["seconds"] if timed else None,
                "step_seconds": sum(known) if known else None,
                **{name: manifest["metrics"].get(name) for name in MEASURED},
                "hardware": processor(manifest),
            }
        )
    return rows


def processor(manifest: Mapping[str, Any]) -> str:
    """What did the work: the GPU where there was one and it was not left idle, else the CPU."""
    hardware = manifest["hardware"]
    if hardware.get("gpu") and manifest["metrics"].get("device") != "cpu":
        return str(hardware["gpu"])
    return f"{hardware['cpu']} ({hardware['cores']} cores)"


def stage_seconds(folders: Iterable[Path], timed: bool) -> list[dict[str, Any]]:
    """Seconds of every artifact that these were made from, and of these, each listed once."""
    found = dict.fromkeys(path for folder in folders for path in lineage(folder))
    rows = []
    for folder in found:
        manifest = read_manifest(folder)
        rows.append(
            {
                "stage": folder.parent.name,
                "signature": folder.name,
                "seconds": manifest["seconds"] if timed else None,
                "hardware": processor(manifest),
            }
        )
    return rows


def lineage(folder: Path) -> Iterator[Path]:
    """The artifacts that `folder` was made from, each before what was made from it, then itself."""
    root = folder.parent.parent
    for name in read_manifest(folder)["identity"]["inputs"].values():
        yield from lineage(root / name)
    yield folder

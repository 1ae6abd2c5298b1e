"""The pictures of an evaluation, as PNG files."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decode.types import OFF
from pipeline.scores import ALL, HEADLINE_SPLIT
from pipeline.wallclock import PLAIN

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 7.0, 3.8  # inches
DOTS = 130
GREY = "#8a8f98"
WHOLE = "acceptance_length"  # the curve over all domains


def draw_all(results: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    """Name -> PNG of every picture that there is something to show in."""
    painters = {
        "speed": (_speed, "wall"),
        "grid": (_grid, "grid"),
        "replay": (_replay, "replay"),
        "acceptance": (_acceptance, "acceptance_by_domain"),
        "training": (_training, "training"),
        "curves": (_curves, "curves"),
    }
    return {
        name: paint(results, folder / f"{name}.png")
        for name, (paint, rows) in painters.items()
        if results.get(rows)
    }


def draw_decode(content: Mapping[str, Any], arms: Sequence[str], path: Path) -> Path:
    """A picture for each domain of stage=benchmark suite=decode: these ways' speed over plain."""
    rows = {(row["group"], row["arm"]): row["over_plain"] for row in content["rows"]}
    domains = [name for name in dict.fromkeys(group for group, _ in rows) if name != ALL]
    others = [arm for arm in arms if arm != PLAIN]
    height = len(domains) * (0.9 + 0.22 * len(others))
    figure, axes = _figure(1, height=height, rows=len(domains))
    for axis, domain in zip(axes, domains, strict=True):
        known = [(arm, rows[domain, arm]) for arm in others if rows.get((domain, arm))]
        _whiskers(axis, [(arm, ratio) for arm, ratio in known if ratio["value"] is not None])
        axis.set_title(domain, fontsize=10)
        axis.tick_params(axis="y", labelsize=7)
    axes[-1].set_xlabel("speed over plain decoding")
    return _save(figure, path)


def _figure(columns: int, height: float = HEIGHT, rows: int = 1) -> tuple[Any, list["Axes"]]:
    """A figure and its axes, row after row."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=(WIDTH, height), squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes.flat)


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, dpi=DOTS, metadata={"Software": None})  # the same bytes from any version
    pyplot.close(figure)
    return path


def _laws(results: Mapping[str, Any]) -> dict[str, str]:
    return {law: f"temperature {t:g}" for law, t in results["conditions"]["temperatures"].items()}


def _speed(results: Mapping[str, Any], path: Path) -> Path:
    laws = _laws(results)
    figure, axes = _figure(len(laws))
    for axis, (law, title) in zip(axes, laws.items(), strict=True):
        rows = [
            row
            for row in results["wall"]
            if row["law"] == law and row["domain"] == ALL and row["method"] != PLAIN
        ]
        _whiskers(axis, [(row["method"], row["speed_ratio"]) for row in rows])
        axis.set_xlabel("speed over plain decoding")
        axis.set_title(title, fontsize=10)
    return _save(figure, path)


def _replay(results: Mapping[str, Any], path: Path) -> Path:
    laws = _laws(results)
    rows = [row for row in results["replay"] if row["domain"] == ALL and row["policy"] != PLAIN]
    number = max(sum(row["law"] == law for row in rows) for law in laws)
    figure, axes = _figure(len(laws), height=1.4 + 0.27 * number)
    for axis, (law, title) in zip(axes, laws.items(), strict=True):
        own = sorted(
            (row for row in rows if row["law"] == law), key=lambda row: row["tokens_per_second"]
        )
        _whiskers(axis, [(row["policy"], row["speed_ratio"]) for row in reversed(own)])
        axis.set_xlabel("replayed speed over plain")
        axis.set_title(title, fontsize=10)
        axis.tick_params(axis="y", labelsize=7)
    return _save(figure, path)


def _whiskers(axis: "Axes", entries: list[tuple[str, Mapping[str, Any]]]) -> None:
    """A dot and its interval for each entry, the first on top, and a line at plain decoding."""
    for place, (_, ratio) in enumerate(entries):
        axis.plot([ratio["low"], ratio["high"]], [place, place], color=GREY, linewidth=2)
        axis.plot(ratio["value"], place, "o", color="C0")
    axis.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
    axis.set_yticks(range(len(entries)), [name for name, _ in entries])
    axis.set_ylim(len(entries) - 0.5, -0.5)


def _grid(results: Mapping[str, Any], path: Path) -> Path:
    """Solid: what each arm emits a pass; dashed: what it would have to emit."""
    laws = _laws(results)
    figure, axes = _figure(len(laws))
    for axis, (law, title) in zip(axes, laws.items(), strict=True):
        for number, drafter in enumerate(results["conditions"]["pool"]):
            rows = [
                row
                for row in results["grid"]
                if (row["law"], row["domain"], row["drafter"]) == (law, ALL, drafter)
                and row["drafter"] != OFF
            ]
            lengths = [row["num_draft_tokens"] for row in rows]
            color = f"C{number}"
            has = [row["acceptance_length"] for row in rows]
            needs = [row["break_even_length"] for row in rows]
            axis.plot(lengths, has, "o-", color=color, markersize=3, label=drafter)
            axis.plot(lengths, needs, "--", color=color, linewidth=0.9)
        axis.set_xlabel("drafted tokens K")
        axis.set_title(title, fontsize=10)
    axes[0].set_ylabel("tokens a pass")
    axes[0].legend(fontsize=7, frameon=False)
    return _save(figure, path)


def _training(results: Mapping[str, Any], path: Path) -> Path:
    figure, (axis,) = _figure(1, height=2.6)
    for place, row in enumerate(results["training"]):
        before, after = row["acceptance_length_before"], row["acceptance_length_after"]
        low, high = (before + row[f"acceptance_length_gain_{end}"] for end in ("low", "high"))
        axis.plot([low, high], [place, place], color=GREY, linewidth=2)
        axis.plot(before, place, "o", color="white", markeredgecolor="C0")
        axis.plot(after, place, "o", color="C0")
    axis.set_yticks(range(len(results["training"])), [r["drafter"] for r in results["training"]])
    axis.set_ylim(len(results["training"]) - 0.5, -0.5)
    axis.set_xlabel("acceptance_length on validation: before (open), after (filled)")
    return _save(figure, path)


def _acceptance(results: Mapping[str, Any], path: Path) -> Path:
    """Drafters by domains, acceptance_length in numbers and colour, one map a law."""
    rows = results["acceptance_by_domain"]
    laws = {row["law"]: _laws(results).get(row["law"], row["law"]) for row in rows}
    drafters = list(dict.fromkeys(row["drafter"] for row in rows))
    domains = list(dict.fromkeys(map(_column, rows)))
    best = max((x for x in map(_length, rows) if math.isfinite(x)), default=1.0)
    figure, axes = _figure(len(laws), height=1.5 + 0.36 * len(drafters))
    for axis, (law, title) in zip(axes, laws.items(), strict=True):
        cells = {(row["drafter"], _column(row)): _length(row) for row in rows if row["law"] == law}
        table = [[cells.get((name, domain), math.nan) for domain in domains] for name in drafters]
        axis.imshow(table, cmap="Blues", vmin=1.0, vmax=max(best, 1.01), aspect="auto")
        for (name, domain), value in cells.items():
            is_dark = value - 1 > 0.6 * (best - 1)
            place = domains.index(domain), drafters.index(name)
            color = "white" if is_dark else "black"
            text = f"{value:.2f}" if math.isfinite(value) else "-"
            axis.text(*place, text, ha="center", va="center", color=color, fontsize=8)
        axis.set_xticks(range(len(domains)), domains, fontsize=8, rotation=30, ha="right")
        axis.set_yticks(range(len(drafters)), drafters if axis is axes[0] else [""] * len(drafters))
        axis.set_title(title, fontsize=10)
    return _save(figure, path)


def _length(row: Mapping[str, Any]) -> float:
    value = row["acceptance_length"]
    return math.nan if value is None else float(value)


def _column(row: Mapping[str, Any]) -> str:
    """A domain of the test split by its name; of another split with the split's name."""
    names = [row["split"], row["domain"]] if row["split"] != HEADLINE_SPLIT else [row["domain"]]
    return " ".join(dict.fromkeys(names))


def _curves(results: Mapping[str, Any], path: Path) -> Path:
    """Loss on the left, acceptance_length by domain on the right, a row for each drafter."""
    rows = results["curves"]
    drafters = list(dict.fromkeys(row["drafter"] for row in rows))
    curves = sorted({row["curve"] for row in rows})
    colors = {curve: "black" if curve == WHOLE else f"C{n}" for n, curve in enumerate(curves)}
    figure, axes = _figure(2, height=2.3 * len(drafters), rows=len(drafters))
    for number, drafter in enumerate(drafters):
        loss, accepted = axes[2 * number : 2 * number + 2]
        points: dict[str, list[tuple[int, float]]] = {}
        for row in rows:
            if row["drafter"] == drafter:
                points.setdefault(row["curve"], []).append((row["step"], row["value"]))
        for curve, found in points.items():
            if curve == "loss":
                loss.plot(*zip(*found, strict=True), color="C0", linewidth=1)
                continue
            accepted.plot(
                *zip(*found, strict=True),
                "o-",
                markersize=2,
                linewidth=2 if curve == WHOLE else 1,
                color=colors[curve],
                label=curve.partition("/")[2] or ALL,
            )
        loss.set_ylabel(f"{drafter}: loss")
        accepted.set_ylabel("acceptance_length")
        if accepted.lines:
            accepted.legend(fontsize=7, frameon=False)
    from matplotlib.ticker import MaxNLocator

    for axis in axes:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in axes[-2:]:
        axis.set_xlabel("step")
    return _save(figure, path)

"""The kernels of replayed steps put together by name and part of the step, beside their floors."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kernels.launching import Launch
from pipeline.launch_bytes import launch_bytes, launch_name

DRAFT, SCORE, VERIFY = "draft", "score", "verify"
BEGIN, PRESENT, ADVANCE = "begin_kernel", "present_kernel", "advance_kernel"
VERIFIERS = ("stats_kernel", "race_kernel")  # what verification begins with
MICRO = 1e6


@dataclass(frozen=True, slots=True)
class Event:
    """A kernel that the device ran: its moments in microseconds."""

    name: str
    start: float
    end: float


Key = tuple[str, str]  # part of the step, kernel


def parts_of_step(names: Iterable[str]) -> Iterator[str]:
    """The part of each kernel of a step, in their order: whoever drafts verifies too, to draw."""
    part = DRAFT
    for name in names:
        if name.startswith(PRESENT):
            part = SCORE
        elif part == SCORE and name.startswith(VERIFIERS):
            part = VERIFY
        yield part


def whole_steps(events: Sequence[Event]) -> list[list[Event]]:
    """The kernels of each step, from the one that begins it to the one that ends it."""
    steps: list[list[Event]] = []
    under_way: list[Event] | None = None
    for event in sorted(events, key=lambda event: event.start):
        if event.name.startswith(BEGIN):
            under_way = []
        if under_way is None:
            continue  # what rewinds a row
        under_way.append(event)
        if event.name.startswith(ADVANCE):
            steps.append(under_way)
            under_way = None
    return steps


def added_times(step: Sequence[Event]) -> list[tuple[float, float]]:
    """Of each kernel, microseconds with nothing running before it and those that it adds."""
    latest, found = step[0].start, []
    for event in step:
        idle = max(event.start - latest, 0.0)
        found.append((idle, max(event.end - max(event.start, latest), 0.0)))
        latest = max(latest, event.end)
    return found


def kernel_rows(
    launches: Sequence[Launch],
    events: Sequence[Event],
    seen_tokens: float,
    bandwidth: float | None,  # bytes a second; None: no floor is told
) -> list[dict[str, Any]]:
    """A row for each kernel of each part: launches and microseconds a step, bytes and floor.

    A kernel that is none of ours has no bytes, and one that nobody timed no microseconds.
    """
    moved: defaultdict[Key, float] = defaultdict(float)
    names = [launch_name(launch) for launch in launches]
    queued = Counter(zip(parts_of_step(names), names, strict=True))
    for part, name, launch in zip(parts_of_step(names), names, launches, strict=True):
        moved[part, name] += launch_bytes(launch, seen_tokens)
    steps = whole_steps(events)
    counts: Counter[Key] = Counter()
    spent: defaultdict[Key, float] = defaultdict(float)
    for step in steps:
        keys = zip(parts_of_step(event.name for event in step), step, strict=True)
        for (part, event), (_, added) in zip(keys, added_times(step), strict=True):
            counts[part, event.name] += 1
            spent[part, event.name] += added
    rows = []
    for key in dict.fromkeys([*queued, *counts]):
        took = spent[key] / len(steps) if key in counts else None
        floor = None if bandwidth is None or key not in moved else MICRO * moved[key] / bandwidth
        rows.append(
            {
                "part": key[0],
                "kernel": key[1],
                "queued": queued[key],
                "launches": counts[key] / len(steps) if steps else None,
                "microseconds": took,
                "bytes": moved.get(key),
                "floor_microseconds": floor,
                "over_microseconds": None if took is None else took - (floor or 0.0),
            }
        )
    return sorted(rows, key=lambda row: -(row["microseconds"] or 0.0))


def totals(
    rows: Sequence[Mapping[str, Any]],
    events: Sequence[Event],
    replay_seconds: float | None,
    engine_seconds: float | None,
) -> dict[str, Any]:
    """Microseconds of a step: in kernels, between them, one replay behind another, in the engine,
    and at least. What a replay takes beyond its kernels is where the profiler does not look.
    """
    steps = whole_steps(events)
    between = [sum(idle for idle, _ in added_times(step)) for step in steps]
    floors = [row["floor_microseconds"] for row in rows if row["floor_microseconds"] is not None]
    kernels = sum(row["microseconds"] or 0.0 for row in rows) if steps else None
    replay = None if replay_seconds is None else MICRO * replay_seconds
    return {
        "num_steps": len(steps),
        "kernels_microseconds": kernels,
        "between_microseconds": sum(between) / len(steps) if steps else None,
        "replay_microseconds": replay,
        "gap_microseconds": None if replay is None or kernels is None else replay - kernels,
        "engine_microseconds": None if engine_seconds is None else MICRO * engine_seconds,
        "bytes": sum(row["bytes"] or 0.0 for row in rows),
        "floor_microseconds": sum(floors) if floors else None,
    }


def step_lines(way: str, step: Mapping[str, Any], bandwidth: float | None) -> list[str]:
    """A step's kernels, the longest first, and its totals."""
    speed = "" if bandwidth is None else f", floor at {bandwidth / 1e12:.2f} TB/s"
    lines = [
        f"{way}: one row of {step['seen_tokens']:.0f} tokens{speed}",
        _line("part", "kernel", "launches", "us", "MB", "floor us", "over us"),
    ]
    for row in step["kernels"]:
        count = row["queued"] if row["launches"] is None else row["launches"]
        size = None if row["bytes"] is None else row["bytes"] / 1e6
        numbers = [row[f"{name}microseconds"] for name in ("", "floor_", "over_")]
        lines.append(
            _line(row["part"], row["kernel"], f"{count:.0f}", _cell(numbers[0]), _cell(size, 2),
                  _cell(numbers[1]), _cell(numbers[2]))
        )  # fmt: skip
    found = step["totals"]
    size = _cell(found["bytes"] / 1e6, 2)
    for name, what in (
        ("kernels", "all kernels"),
        ("between", "between kernels, profiled"),
        ("replay", "a replay, not profiled"),
        ("gap", "of it beyond the kernels"),
        ("engine", "a step of the engine"),
    ):
        held = size if name == "kernels" else ""
        floor = _cell(found["floor_microseconds"]) if name == "kernels" else ""
        lines.append(_line("", what, "", _cell(found[f"{name}_microseconds"]), held, floor, ""))
    return lines


def _line(part: str, kernel: str, *numbers: str) -> str:
    return f"{part:<7}{kernel[:44]:<45}" + "".join(f"{number:>10}" for number in numbers)


def _cell(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"

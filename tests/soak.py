"""Kill the main job at random moments, let it go on, and compare with a run that nobody killed.

    python tests/soak.py --kills 20 --root FOLDER [--tiny] [--seed 0] [KEY=VALUE ...]

Half of the kills come after a random number of seconds, which falls into the computing; the other
half just before a random change of an artifact's files, which falls between two writes, where
resuming goes wrong. Every kill is SIGKILL. Paths among the overrides must be absolute.
"""

import argparse
import hashlib
import json
import logging
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

log = logging.getLogger("soak")

OUTPUTS = "outputs"  # of each run, in a folder of its own: both runs are given the same command
SAME = ("stage=all", f"root={OUTPUTS}", "tracking=disabled", "runtime.clock=virtual")
THREADS = "runtime.threads=1"  # sums of floats depend on how many threads share them
START = "start"  # before the first artifact begins
MANIFEST = "manifest.json"
LINE = re.compile(r"stage=\S+ (begins|is done in [^:]*|is there already): (\S+)$")
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")

# What two equal runs may differ in: when, how long, and which state of the repository.
PROVENANCE = ("started", "seconds", "commit", "diff_sha256")
# The last screen says how long every artifact took and how long ago that was.
CLOCKED = {"all": ("summary.txt",)}
CLOCKED_METRICS = {"all": ("seconds_of_work",)}


@dataclass(frozen=True)
class Kill:
    """When one process dies: so long after an artifact begins, or before a change of its files."""

    unit: str  # "start", or an artifact as in "distill/0123456789abcdef"
    seconds: float | None
    change: int | None


@dataclass(frozen=True)
class Reference:
    """The run that nobody killed: seconds and file changes of each artifact, in order."""

    seconds: dict[str, float]
    changes: dict[str, int]


@dataclass(frozen=True)
class Moment:
    """What is planned: a share of an artifact's seconds, or of the changes of its files."""

    unit: str
    share: float
    by_change: bool

    def kill(self, reference: Reference, finished: set[str]) -> Kill:
        """In the artifact, or the next one where an earlier process went on to finish it."""
        order = list(reference.seconds)
        left = [unit for unit in order[order.index(self.unit) :] if unit not in finished]
        unit = (left or order[-1:])[0]
        changes = reference.changes.get(unit, 0)
        if self.by_change and changes:
            return Kill(unit, None, 1 + int(self.share * changes))
        return Kill(unit, self.share * reference.seconds[unit], None)


@dataclass
class Process:
    """One run of the pipeline, and what its log has said so far."""

    folder: Path
    overrides: Sequence[str]
    watch: Sequence[str]  # what this script's child is told beside the overrides
    began: dict[str, float] = field(default_factory=dict)
    there: set[str] = field(default_factory=set)
    done: dict[str, float] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        # -P: beside this file lie folders that are called as the rooms are.
        command = [sys.executable, "-P", __file__, *self.watch, "--", *self.overrides]
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            command,
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if match := LINE.search(line.rstrip()):
                said, unit = match[1], "/".join(Path(match[2]).parts[-2:])
                if said == "begins":
                    self.began[unit] = time.monotonic()
                elif said == "is there already":
                    self.there.add(unit)
                else:
                    self.done[unit] = time.monotonic()

    def wait(self) -> int:
        """The exit code; from now on the whole log has been read."""
        code = self.process.wait()
        self._reader.join()
        return code

    @property
    def current(self) -> str:
        """What was being built when the log ended."""
        return ([unit for unit in self.began if unit not in self.done] or [START])[-1]

    def is_due(self, kill: Kill) -> bool:
        """Whether its moment is here, or can no longer come because the artifact is finished."""
        if kill.unit in self.done or kill.unit in self.there:
            return True
        if kill.unit == START and self.began:
            return True
        if kill.seconds is None:
            return False
        since = self.started if kill.unit == START else self.began.get(kill.unit)
        return since is not None and time.monotonic() - since >= kill.seconds


def run_reference(folder: Path, overrides: Sequence[str]) -> Reference:
    """Run to the end, undisturbed."""
    counts = folder / "changes.json"
    process = Process(folder, overrides, ["--count", str(counts)])
    if process.wait() != 0:
        raise RuntimeError("the undisturbed run failed:\n" + "\n".join(process.lines[-20:]))
    first = min(process.began.values())
    seconds = {unit: process.done[unit] - at for unit, at in process.began.items()}
    changes = json.loads(counts.read_text())
    return Reference({START: first - process.started, **seconds}, changes)


def plan_kills(reference: Reference, kills: int, seed: int) -> list[Moment]:
    """Moments in the order of the work: each artifact gets one, longer ones get the rest.

    Fewer kills than artifacts: the longest get one each. The last one only prints, and is left out.
    """
    draw = random.Random(seed)
    longest = sorted(reference.seconds, key=lambda unit: -reference.seconds[unit])
    units = [unit for unit in longest if not unit.startswith("all/")][:kills]
    weights = [reference.seconds[unit] for unit in units]
    chosen = Counter([*units, *draw.choices(units, weights, k=kills - len(units))])
    plan: list[Moment] = []
    for unit in reference.seconds:
        for share in sorted(draw.random() for _ in range(chosen[unit])):
            plan.append(Moment(unit, share, by_change=len(plan) % 2 == 1))
    return plan


def run_killed(
    folder: Path, overrides: Sequence[str], reference: Reference, plan: Sequence[Moment]
) -> list[str]:
    """Run, kill and go on, as often as planned, then to the end; says what every kill hit."""
    report = []
    for number, moment in enumerate(plan, start=1):
        finished = finished_units(folder / OUTPUTS)
        kill = moment.kill(reference, finished)
        watch = ["--die", kill.unit, str(kill.change)] if kill.change else ["--no-change"]
        process = Process(folder, overrides, watch)
        while process.process.poll() is None and not process.is_due(kill):
            time.sleep(0.002)
        process.process.kill()
        code = process.wait()
        assert code == -signal.SIGKILL, f"{kill} met no running process:\n{process.lines[-5:]}"
        check_went_on(process, finished)
        how = f"change {kill.change}" if kill.change else f"{kill.seconds:.2f} s"
        now = len(finished_units(folder / OUTPUTS))
        report.append(
            f"kill {number}: planned {kill.unit.split('/')[0]} + {how}; it hit "
            f"{process.current.split('/')[0]}, {time.monotonic() - process.started:.1f} s after "
            f"its start, {now} artifacts finished"
        )
        log.info("%s", report[-1])
    finished = finished_units(folder / OUTPUTS)
    process = Process(folder, overrides, ["--no-change"])
    code = process.wait()
    assert code == 0, "the run did not go on:\n" + "\n".join(process.lines[-20:])
    check_went_on(process, finished)
    return report


def finished_units(root: Path) -> set[str]:
    """Artifacts with a manifest; every file that one names must be there, as it says."""
    units = set()
    for path in root.glob(f"*/*/{MANIFEST}"):
        for name, facts in json.loads(path.read_text())["files"].items():
            digest = hashlib.sha256((path.parent / name).read_bytes()).hexdigest()
            assert digest == facts["sha256"], f"{path.parent / name} is not what its manifest says"
        units.add("/".join(path.parent.parts[-2:]))
    return units


def check_went_on(process: Process, finished: set[str]) -> None:
    """Only what had a manifest was taken for finished, and none of that was built again."""
    known = finished | set(process.done)
    assert process.there <= known, f"taken for finished: {process.there - known}"
    again = {unit for unit in finished & set(process.began) if not unit.startswith("all/")}
    assert not again, f"built again although finished: {again}"


def differences(first: Path, second: Path) -> Iterator[str]:
    """What differs between two finished roots beyond provenance, file by file."""
    ours, theirs = finished_units(first), finished_units(second)
    yield from (f"{unit}: in one run only" for unit in sorted(ours ^ theirs))
    for unit in sorted(ours & theirs):
        stage = unit.split("/")[0]
        a, b = (_comparable(root / unit / MANIFEST, stage) for root in (first, second))
        for key in sorted(a.keys() | b.keys()):
            if a.get(key) != b.get(key):
                yield f"{unit}: {key}: {a.get(key)} against {b.get(key)}"
        left = [path for path in (second / unit).rglob("*") if path.is_file()]
        named = json.loads((second / unit / MANIFEST).read_text())["files"]
        extra = {str(path.relative_to(second / unit)) for path in left} - {MANIFEST, *named}
        yield from (f"{unit}: {name} was left behind" for name in sorted(extra))


def _comparable(manifest: Path, stage: str) -> dict[str, Any]:
    """A manifest, flat, without what may differ."""
    content: dict[str, Any] = json.loads(manifest.read_text())
    files, metrics = content.pop("files"), content.pop("metrics")
    kept = {key: value for key, value in content.items() if key not in PROVENANCE}
    named = {f"file {name}": facts["sha256"] for name, facts in files.items()}
    for name in CLOCKED.get(stage, ()):
        named.pop(f"file {name}")
    for name in CLOCKED_METRICS.get(stage, ()):
        metrics.pop(name)
    return {**kept, **named, **{f"metric {name}": value for name, value in metrics.items()}}


def soak(root: Path, overrides: Sequence[str], kills: int, seed: int) -> list[str]:
    """Both runs and the comparison; raises AssertionError where anything differs."""
    # Where the repository moves on meanwhile, only its commit would differ, in cards and reports.
    os.environ["GIT_DIR"] = os.devnull
    everything = [*SAME, THREADS, *overrides]
    reference = run_reference(root / "whole", everything)
    lengths = ", ".join(f"{u.split('/')[0]} {s:.1f} s" for u, s in reference.seconds.items())
    log.info("undisturbed: %s", lengths)
    plan = plan_kills(reference, kills, seed)
    report = run_killed(root / "killed", everything, reference, plan)
    found = list(differences(root / "whole" / OUTPUTS, root / "killed" / OUTPUTS))
    assert not found, "the killed run ended differently:\n" + "\n".join(found)
    return report


# ------------------------------------------------------------------------------- inside the child


class Changes:
    """Counts changes of files under the outputs by artifact; may die just before one of them."""

    def __init__(self, unit: str | None, last: int) -> None:
        self.root, self.unit, self.last = str(Path(OUTPUTS).resolve()), unit, last
        self.counts: Counter[str] = Counter()

    def __call__(self, event: str, arguments: Sequence[Any]) -> None:
        if event != "open" and event not in CHANGES:
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        if not isinstance(arguments[0], str | os.PathLike):
            return
        path = os.path.abspath(os.fspath(arguments[0]))
        if isinstance(path, str) and path.startswith(self.root + os.sep):
            parts = path[len(self.root) + 1 :].split(os.sep)
            unit = "/".join(parts[:2])
            self.counts[unit] += len(parts) > 1 and not unit.endswith(".lock")
            if unit == self.unit and self.counts[unit] == self.last:
                os.kill(os.getpid(), signal.SIGKILL)


def child(arguments: Sequence[str]) -> None:
    """`python -m pipeline`, watched as this script's own options say."""
    split = list(arguments).index("--")
    watch, overrides = arguments[:split], arguments[split + 1 :]
    changes = Changes(*((watch[1], int(watch[2])) if watch[0] == "--die" else (None, 0)))
    if watch[0] != "--no-change":
        sys.addaudithook(changes)
    sys.argv = ["pipeline", *overrides]
    try:
        runpy.run_module("pipeline", run_name="__main__", alter_sys=True)
    finally:
        if watch[0] == "--count":
            Path(watch[1]).write_text(json.dumps(changes.counts))


def summary(report: Sequence[str]) -> str:
    """What a person reads at the end."""
    hit = Counter(line.split("it hit ")[1].split(",")[0] for line in report)
    where: Mapping[str, int] = dict(hit.most_common())
    spread = ", ".join(f"{stage} {count}" for stage, count in where.items())
    return f"{len(report)} kills hit: {spread}; the results are those of the undisturbed run\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a random target of four layers")
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    root = asked.root.resolve()
    overrides = [*asked.overrides]
    if asked.tiny:
        sys.path.insert(0, str(Path(__file__).parent / "pipeline"))
        from tiny import tiny_overrides

        overrides = [*tiny_overrides(root / "tiny"), *overrides]
    sys.stdout.write(summary(soak(root, overrides, asked.kills, asked.seed)))


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in ("--die", "--count", "--no-change"):
        child(sys.argv[1:])
    else:
        main()

"""Which drafter is accepted where: from recorded answers alone, so that nothing needs decoding."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Group
from rich.table import Table

from pipeline.acceptance import load_acceptance
from pipeline.bench_evaluation import leaks
from pipeline.benches import SCORED, BenchData
from pipeline.families import (
    Sums,
    acceptance_rows,
    acceptance_tables,
    by_domain,
    check_names,
    gain_rows,
    sums_of,
    with_best_of,
)
from pipeline.files import write_json
from pipeline.headline import finite
from pipeline.scores import ALL, Resampling
from pipeline.stage import Need, Stage, Workspace

FILE = "comparison.json"
BENCHES = "benchmarks"  # all of them, as if they were one split; a question that two ask is one

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Compare(Stage):
    """Sums over held-out answers: tokens, and the target passes that emit them."""

    reads: ClassVar[tuple[str, ...]] = ("pool", "bench")
    summary: ClassVar[str] = "acceptance of every drafter by domain and benchmark, in pairs"

    num_draft_tokens: int  # K
    compare_with: list[str]  # drafters (or names of best_of): every other one against each of them
    best_of: dict[str, list[str]]  # name -> drafters, the best of which counts on every answer
    num_resamples: int

    def __post_init__(self) -> None:
        for name in ("num_draft_tokens", "num_resamples"):
            if getattr(self, name) < 1:
                raise ValueError(f"stages.compare.{name}={getattr(self, name)} must be at least 1")

    def needs(self, groups: Mapping[str, Any]) -> dict[str, Need]:
        check_names(list(groups["pool"].entries), self.best_of, self.compare_with)
        bench = groups["bench"]
        scored = {"bench_acceptance": Need("collect", {SCORED: bench})} if bench.chosen else {}
        return {"prompts": Need("prepare"), "acceptance": Need("collect"), **scored}

    def run(self, workspace: Workspace) -> dict[str, Any]:
        data: BenchData = workspace.groups["bench"]
        names = ["acceptance", *(["bench_acceptance"] if data.chosen else [])]
        frames = [load_acceptance(workspace.inputs[name]) for name in names]
        sums = [
            entry
            for frame in frames
            for entry in sums_of(frame, self.num_draft_tokens, frame["law"].unique())
        ]
        resampling = Resampling(self.num_resamples, workspace.seed)
        shared: list[Row] = []
        repeats: set[str] = set()
        if data.chosen:
            repeats = data.repeats(workspace.seed)
            settings = workspace.manifest("prompts")["identity"]["settings"]
            shared = leaks(data, workspace.inputs["prompts"], settings)
        once = [entry for entry in sums if entry.prompt_id not in repeats]
        summary = self._summary(with_best_of(once, self.best_of), resampling)
        content = {
            "num_draft_tokens": self.num_draft_tokens,
            **acceptance_tables(sums, self.best_of, self.compare_with, resampling),
            **summary,
            "bench_leaks": shared,
            "bench_repeats": sorted(repeats),
        }
        write_json(workspace.out / FILE, finite(content))
        return means(summary["acceptance_summary"])

    def shown(self, out: Path) -> Group:
        content = read_comparison(out)
        title = f"acceptance_length, K={content['num_draft_tokens']}"
        tables = [summary_table(content["acceptance_summary"], title)]
        if content["gains_summary"]:
            tables.append(gains_table(content["gains_summary"]))
        return Group(*tables)

    def _summary(self, sums: Sequence[Sums], resampling: Resampling) -> dict[str, list[Row]]:
        """By domain, of the test split and of all benchmarks together, and over all domains.

        `sums` hold no question twice: else one that two benchmarks ask would have two votes.
        """
        pooled = [replace(e, split=BENCHES, is_bench=False) if e.is_bench else e for e in sums]
        pooled += [replace(entry, domain=ALL) for entry in pooled]
        gains = [
            row
            for against in self.compare_with
            for row in gain_rows(pooled, against, by_domain, resampling)
        ]
        return {
            "acceptance_summary": acceptance_rows(pooled, by_domain, "domain", resampling),
            "gains_summary": gains,
        }


def read_comparison(folder: Path) -> dict[str, Any]:
    """What the stage wrote."""
    return json.loads((folder / FILE).read_text(encoding="utf-8"))


def means(rows: Sequence[Row]) -> dict[str, float]:
    """acceptance_length of each drafter, split and law, as the plain mean over domains."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["domain"] != ALL:
            key = f"acceptance_length_{row['drafter']}_{row['split']}_{row['law']}"
            found.setdefault(key, []).append(row["acceptance_length"])
    return {key: sum(values) / len(values) for key, values in found.items()}


def summary_table(rows: Sequence[Row], title: str) -> Table:
    """Drafters down, law, split and domain across; their plain mean over domains last."""
    places = list(dict.fromkeys((r["law"], r["split"], r["domain"]) for r in rows))
    cells = {
        (r["drafter"], r["law"], r["split"], r["domain"]): r["acceptance_length"] for r in rows
    }
    average = means(rows)
    groups = list(dict.fromkeys(place[:2] for place in places))
    table = Table(title=title)
    table.add_column("drafter")
    for law, split in groups:
        for domain in (d for one, two, d in places if (one, two) == (law, split) and d != ALL):
            table.add_column(f"{law} {split} {domain}", justify="right")
        table.add_column(f"{law} {split} mean", justify="right")
    for drafter in dict.fromkeys(row["drafter"] for row in rows):
        line = []
        for law, split in groups:
            domains = [d for one, two, d in places if (one, two) == (law, split) and d != ALL]
            found = [cells.get((drafter, law, split, domain)) for domain in domains]
            line += ["-" if value is None else f"{value:.2f}" for value in found]
            line.append(f"{average.get(f'acceptance_length_{drafter}_{split}_{law}', 0):.2f}")
        table.add_row(drafter, *line)
    return table


def gains_table(rows: Sequence[Row]) -> Table:
    """Ratios of acceptance_length in pairs, with their 95% intervals."""
    table = Table(title="ratio of acceptance_length, questions in pairs, 95% interval")
    for name in ("law", "split", "domain", "drafter", "against"):
        table.add_column(name)
    table.add_column("ratio", justify="right")
    for row in rows:
        ratio = row["ratio"]
        low, high = (f"{x:.3f}" if x is not None else "-" for x in (ratio["low"], ratio["high"]))
        table.add_row(
            *(row[name] for name in ("law", "split", "domain", "drafter", "against")),
            f"{ratio['value']:.3f} [{low}, {high}]",
        )
    return table

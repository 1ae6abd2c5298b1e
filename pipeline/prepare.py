"""Prompts from anywhere, made one kind: normalised, each once, split so that nothing leaks."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from pipeline.data import as_columns
from pipeline.leaks import PARAPHRASE, Splits, refuse_leaks, related
from pipeline.rows import SPLITS, Row, folded, fraction
from pipeline.stage import Stage, Workspace

TRAIN = "train"
SUMMARY = "summary.txt"


@dataclass(frozen=True, kw_only=True)
class Prepare(Stage):
    reads: ClassVar[tuple[str, ...]] = ("data",)
    summary: ClassVar[str] = "load prompts, drop duplicates, split by family, refuse leaks"

    router_train_percent: int
    validation_percent: int
    test_percent: int
    min_prompts: int  # of each domain in each split
    max_prompt_chars: int
    leak_words: int  # a run of so many words in two splits is a leak; 0: only whole texts

    def __post_init__(self) -> None:
        shares = (self.router_train_percent, self.validation_percent, self.test_percent)
        if min(shares) < 1 or sum(shares) > 90:
            raise ValueError(
                f"stages.prepare gives {', '.join(map(str, shares))} percent to router_train, "
                "validation and test; each needs 1, and drafter_train the 10 that are left"
            )
        if self.min_prompts < 1:
            raise ValueError(f"stages.prepare.min_prompts={self.min_prompts} must be at least 1")

    def run(self, workspace: Workspace) -> dict[str, Any]:
        loaded: Splits = workspace.groups["data"].load(workspace.seed)
        dropped: Counter[str] = Counter()
        kept = {name: self._clean(rows, dropped) for name, rows in loaded.items()}
        splits = self.split(kept, workspace.seed)
        refuse_leaks(splits, self.leak_words)
        self._refuse_few(splits)
        save(splits, workspace.out)
        text = describe_splits(splits, dropped)
        (workspace.out / SUMMARY).write_text(text, encoding="utf-8")
        Console().print(text, markup=False, highlight=False, soft_wrap=True, end="")
        return {**{name: len(rows) for name, rows in splits.items()}, **dropped}

    def _clean(self, rows: Sequence[Row], dropped: Counter[str]) -> list[Row]:
        """Rows that are not too long, each text once."""
        seen: set[str] = set()
        kept = []
        for row in rows:
            text = folded(row.text)
            if len(row.text) > self.max_prompt_chars:
                dropped["dropped_too_long"] += 1
            elif text in seen:
                dropped["dropped_duplicates"] += 1
            else:
                seen.add(text)
                kept.append(row)
        return kept

    def split(self, loaded: Splits, seed: int) -> Splits:
        """Every split; families, and prompts that share a run of words, stay on one side."""
        given = {name: rows for name, rows in loaded.items() if name not in (TRAIN, PARAPHRASE)}
        splits: Splits = {name: list(given.get(name, [])) for name in SPLITS}
        by_domain: dict[str, list[Row]] = {}
        for row in loaded.get(TRAIN, []):
            by_domain.setdefault(row.domain, []).append(row)
        for rows in by_domain.values():
            for name, members in self._split_domain(rows, seed, given).items():
                splits[name] += members
        splits |= {name: rows for name, rows in given.items() if name not in SPLITS}
        if paraphrases := loaded.get(PARAPHRASE):
            held_out = {row.family for row in splits["test"]}
            splits[PARAPHRASE] = [row for row in paraphrases if row.family in held_out]
        return splits

    def _split_domain(self, rows: Sequence[Row], seed: int, given: Splits) -> Splits:
        """Groups in the order of their hash: to test, validation, router_train, then the rest."""
        groups = related(rows, self.leak_words)
        order = sorted(groups, key=lambda members: fraction(seed, members[0].family))
        percent = {
            "test": 0 if "test" in given else self.test_percent,
            "validation": 0 if "validation" in given else self.validation_percent,
            "router_train": self.router_train_percent,
        }
        splits: Splits = {name: [] for name in SPLITS}
        for name, share in percent.items():
            wanted = max(math.ceil(len(rows) * share / 100), self.min_prompts) if share else 0
            while order and len(splits[name]) < wanted:
                splits[name] += order.pop(0)
        splits["drafter_train"] = [row for members in order for row in members]
        return splits

    def _refuse_few(self, splits: Splits) -> None:
        domains = sorted({row.domain for name in SPLITS for row in splits[name]})
        if not domains:
            raise ValueError("the data holds no prompt; give a file with prompts as data.train")
        for name in SPLITS:
            counts = Counter(row.domain for row in splits[name])
            for domain in domains:
                if counts[domain] < self.min_prompts:
                    raise ValueError(
                        f"domain {domain} has {counts[domain]} prompts in split {name}, and "
                        f"{self.min_prompts} are needed; add prompts (or families), merge "
                        "small domains, or lower stages.prepare.min_prompts"
                    )


def save(splits: Splits, out: Path) -> None:
    """Write the splits as a `datasets` folder."""
    from datasets import Dataset, DatasetDict, Features, Value, disable_progress_bars

    disable_progress_bars()
    features = Features({name: Value("string") for name in Row.__dataclass_fields__})
    DatasetDict(
        {
            name: Dataset.from_dict(dict(as_columns(rows)), features=features)
            for name, rows in splits.items()
            if rows
        }
    ).save_to_disk(str(out / "datasets"))


def describe_splits(splits: Splits, dropped: Mapping[str, int]) -> str:
    """One screen: prompts and families of each domain in each split."""
    domains = list(dict.fromkeys(row.domain for rows in splits.values() for row in rows))
    table = Table("prompts (families)", *splits, box=None, pad_edge=False)
    for domain in domains:
        cells = []
        for rows in splits.values():
            families = [row.family for row in rows if row.domain == domain]
            cells.append(f"{len(families):,} ({len(set(families)):,})" if families else "-")
        table.add_row(domain, *cells)
    console = Console(width=100, no_color=True)
    with console.capture() as capture:
        console.print(table)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    for name, count in dropped.items():
        lines.append(f"{name.replace('_', ' ')}: {count:,}")
    return "\n".join(lines) + "\n"

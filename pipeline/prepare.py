"""Prompts from anywhere, made one kind: normalised, each once, split so that nothing leaks."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from pipeline.benches import BENCH
from pipeline.data import as_columns, bench_texts, expand, stem
from pipeline.digests import digest
from pipeline.follow_ups import with_follow_ups
from pipeline.leaks import (
    PARAPHRASE,
    HeldOut,
    Leak,
    Rule,
    Splits,
    leaks_against,
    refuse_leaks,
    related,
    save_leaks,
)
from pipeline.prompt_summary import describe_splits, warnings_about
from pipeline.rows import COLUMNS, SPLITS, Row, folded, fraction
from pipeline.stage import Stage, Workspace
from pipeline.text_tasks import tasks_about

TRAIN = "train"
LEARNED = (TRAIN, "validation")  # trained on, or what chooses between trained drafters
SUMMARY, LEAKS = "summary.txt", "leaks.jsonl"
LEAKING = ("refuse", "drop")

Groups = dict[str, list[list[Row]]]


@dataclass(frozen=True, kw_only=True)
class Prepare(Stage):
    reads: ClassVar[tuple[str, ...]] = ("data",)
    summary: ClassVar[str] = "load prompts, drop duplicates, split by family, refuse leaks"
    format_version: ClassVar[int] = 2  # groups may span domains; boilerplate is what stands often

    router_train_percent: int
    validation_percent: int
    test_percent: int
    min_prompts: int  # of each domain in each split
    max_prompt_chars: int
    leak_words: int  # a run of so many words in two splits is a leak; 0: only whole texts
    boilerplate_rows: int  # a run in more prompts than so many is boilerplate, and no leak
    benches: list[str]  # files whose questions must not be learned from
    leaking_rows: str  # one of LEAKING: what becomes of a row that shares text with what it may not
    follow_up_percent: int  # of the conversations in drafter_train that go on after the answer
    follow_ups: list[str]  # what the person says then, one of these
    text_task_percent: int  # of its responses in prose that become a text to be worked on
    text_tasks: list[str]  # what is asked of such a text, one of these

    def __post_init__(self) -> None:
        shares = (self.router_train_percent, self.validation_percent, self.test_percent)
        if min(shares) < 1 or sum(shares) > 90:
            raise ValueError(
                f"stages.prepare gives {', '.join(map(str, shares))} percent to router_train, "
                "validation and test; each needs 1, and drafter_train the 10 that are left"
            )
        for name in ("min_prompts", "boilerplate_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"stages.prepare.{name}={getattr(self, name)} must be at least 1")
        if self.leaking_rows not in LEAKING:
            raise ValueError(
                f"stages.prepare.leaking_rows={self.leaking_rows} is unknown; "
                f"use {' or '.join(LEAKING)}"
            )
        self._check_share("follow_up_percent", "follow_ups")
        self._check_share("text_task_percent", "text_tasks")

    def _check_share(self, share: str, requests: str) -> None:
        percent = getattr(self, share)
        if not 0 <= percent <= 100:
            raise ValueError(f"stages.prepare.{share}={percent} must be from 0 to 100")
        if percent and not getattr(self, requests):
            raise ValueError(
                f"stages.prepare.{share}={percent} needs something to say; give stages.prepare."
                f"{requests} a request, or set the percentage to 0"
            )

    @property
    def rule(self) -> Rule:
        return Rule(self.leak_words, self.boilerplate_rows)

    def identity(self) -> dict[str, Any]:
        """The settings, with what the benchmark files hold in place of where they are."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        contents = [(stem(path), digest(path)) for path in self._bench_files()]
        return {**values, "benches": contents}

    def run(self, workspace: Workspace) -> dict[str, Any]:
        loaded: Splits = workspace.groups["data"].load(workspace.seed)
        if BENCH in loaded:  # nothing is learned from it: it is taken as it is
            save(loaded, workspace.out)
            return {name: len(rows) for name, rows in loaded.items()}
        dropped: Counter[str] = Counter()
        kept = {name: self._clean(rows, dropped) for name, rows in loaded.items()}
        benches = [text for path in self._bench_files() for text in bench_texts(path)]
        leaks = self._take_out_leaks(kept, benches)
        if leaks:
            dropped["dropped_leaks"] = len(leaks)
            save_leaks(leaks, workspace.out / LEAKS)
        groups = self.groups(kept.get(TRAIN, []))
        splits = self.split(kept, groups, workspace.seed)
        boilerplate = refuse_leaks(splits, self.rule)
        self._refuse_few(splits)
        texts = self._texts(splits, benches, workspace.seed, dropped)
        splits["drafter_train"] += texts
        splits["drafter_train"] = with_follow_ups(
            splits["drafter_train"], self.follow_up_percent, self.follow_ups, workspace.seed
        )
        save(splits, workspace.out)
        warnings = warnings_about(splits, dropped, leaks, groups)
        text = describe_splits(splits, len(texts), dropped, leaks, boilerplate, warnings)
        (workspace.out / SUMMARY).write_text(text, encoding="utf-8")
        Console().print(text, markup=False, highlight=False, soft_wrap=True, end="")
        counts = {name: len(rows) for name, rows in splits.items()}
        return {**counts, "num_texts": len(texts), **dropped, "num_warnings": len(warnings)}

    def _bench_files(self) -> list[Path]:
        return expand("stages.prepare.benches", self.benches)

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

    def _take_out_leaks(self, kept: Splits, benches: Sequence[HeldOut]) -> list[Leak]:
        """Drop from `kept` what shares text with what it must not have seen; the rows dropped.

        Raises ValueError instead where leaking rows are refused. Every round may turn a run that
        was boilerplate into one that counts, so there are rounds until nothing is found.
        """
        found: list[Leak] = []
        while True:
            before = len(found)
            for name in [name for name in LEARNED if name in kept]:
                leaks = leaks_against(kept[name], self._held_out(kept, name, benches), self.rule)
                gone = {id(leak.row) for leak in leaks}
                kept[name] = [row for row in kept[name] if id(row) not in gone]
                found += leaks
            if found and self.leaking_rows == "refuse":
                _refuse(found)
            if len(found) == before:
                return found

    def _held_out(self, kept: Splits, name: str, benches: Sequence[HeldOut]) -> Iterator[HeldOut]:
        """All that the rows called `name` must share nothing with."""
        yield from benches
        for other, rows in kept.items():
            if other not in (name, TRAIN, PARAPHRASE):
                yield from (HeldOut(row.text, other, row.where) for row in rows)

    def groups(self, rows: Sequence[Row]) -> Groups:
        """What must not be parted, by the domain of most of a group's rows."""
        homes: Groups = {}
        for members in related(rows, self.rule):
            (home, _), *_ = Counter(row.domain for row in members).most_common(1)
            homes.setdefault(home, []).append(members)
        return homes

    def split(self, loaded: Splits, groups: Groups, seed: int) -> Splits:
        """Every split; families, and prompts that share a run of words, stay on one side."""
        given = {name: rows for name, rows in loaded.items() if name not in (TRAIN, PARAPHRASE)}
        splits: Splits = {name: list(given.get(name, [])) for name in SPLITS}
        for of_domain in groups.values():
            for name, rows in self._split_domain(of_domain, seed, given).items():
                splits[name] += rows
        splits |= {name: rows for name, rows in given.items() if name not in SPLITS}
        if paraphrases := loaded.get(PARAPHRASE):
            held_out = {row.family for row in splits["test"]}
            splits[PARAPHRASE] = [row for row in paraphrases if row.family in held_out]
        return splits

    def _split_domain(self, groups: Sequence[list[Row]], seed: int, given: Splits) -> Splits:
        """Groups in the order of their hash: to test, validation, router_train, then the rest.

        A group that is larger than all that a split wants waits, if there is a smaller one.
        """
        order = sorted(groups, key=lambda members: fraction(seed, members[0].family))
        num_rows = sum(map(len, groups))
        percent = {
            "test": 0 if "test" in given else self.test_percent,
            "validation": 0 if "validation" in given else self.validation_percent,
            "router_train": self.router_train_percent,
        }
        splits: Splits = {name: [] for name in SPLITS}
        for name, share in percent.items():
            wanted = max(math.ceil(num_rows * share / 100), self.min_prompts) if share else 0
            while order and len(splits[name]) < wanted:
                fits = (place for place, group in enumerate(order) if len(group) <= wanted)
                splits[name] += order.pop(next(fits, 0))
        splits["drafter_train"] = [row for members in order for row in members]
        return splits

    def _texts(
        self, splits: Splits, benches: Sequence[HeldOut], seed: int, dropped: Counter[str]
    ) -> list[Row]:
        """Responses of drafter_train as texts to be worked on, but for those that leak."""
        made = tasks_about(splits["drafter_train"], self.text_task_percent, self.text_tasks, seed)
        made = self._clean(made, dropped)
        leaks = leaks_against(made, self._held_out(splits, "drafter_train", benches), self.rule)
        if leaks:
            dropped["dropped_leaking_texts"] = len(leaks)
        leaking = {id(leak.row) for leak in leaks}
        return [row for row in made if id(row) not in leaking]

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
    features = Features({name: Value("string") for name in COLUMNS})
    DatasetDict(
        {
            name: Dataset.from_dict(dict(as_columns(rows)), features=features)
            for name, rows in splits.items()
            if rows
        }
    ).save_to_disk(str(out / "datasets"))


def _refuse(leaks: Sequence[Leak]) -> None:
    more = f" (and {len(leaks) - 1:,} more prompts do so)" if len(leaks) > 1 else ""
    raise ValueError(
        f"{leaks[0]}{more}; take such prompts out, or set stages.prepare.leaking_rows=drop"
    )

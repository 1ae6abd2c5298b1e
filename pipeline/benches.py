"""Benchmarks: prompts that drafters and policies are measured on, and that train nothing.

A benchmark stands beside the training data, in the config group `bench`. Stages that answer and
score its prompts are looked up with the group `data` swapped for it, so that choosing another one
leaves whatever was trained as it is.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.data import JSON_LINES, PARQUET, fewest, read_rows, stem
from pipeline.digests import digest
from pipeline.quality.grading import Problem
from pipeline.rows import Row, normalise

BENCH = "bench"  # the split that its prompts form
TURNS = ("first", "all")
SCORED = "scored"  # the group under which stage collect is asked to score a benchmark


@dataclass(frozen=True, kw_only=True)
class BenchData:
    """Files of benchmark prompts: a data source of one split, and how its prompts are answered.

    A row has `prompt` or `turns`, may have `id`, `domain`, `category` and `task`, and, to be
    graded, `test` and `entry_point`, or `test_list`, or `answer`. A file's name is its benchmark's.
    """

    folder: str
    files: Any  # a path or a list of them, from `folder`; none: no benchmark
    turns: str  # one of TURNS: of several, all are answered, after the target's own earlier answers
    prompts_per_bench: int  # 0: all; else those whose hash comes first
    laws: str  # greedy, sampled or both
    max_new_tokens: int
    max_prompt_tokens: int

    def __post_init__(self) -> None:
        if self.turns not in TURNS:
            raise ValueError(f"bench.turns={self.turns} is not known; use {' or '.join(TURNS)}")
        if self.prompts_per_bench < 0:
            raise ValueError(f"bench.prompts_per_bench={self.prompts_per_bench} must be 0 or more")
        given = self.files if isinstance(self.files, list) else [self.files]
        if not all(isinstance(name, str) for name in given):
            raise ValueError(f"bench.files={self.files} is no path; give one, or a list of them")
        if twice := [name for name, count in Counter(self.names).items() if count > 1]:
            raise ValueError(
                f"bench.files names {twice[0]} twice, and a file's name is its benchmark's; "
                "rename one of the files"
            )

    @property
    def chosen(self) -> bool:
        """Whether there is a benchmark at all."""
        return bool(self.files)

    @property
    def names(self) -> list[str]:
        """Of the benchmarks, in the order of their files."""
        files = self.files if isinstance(self.files, list) else [self.files]
        return [stem(Path(name)) for name in files]

    def load(self, seed: int) -> dict[str, list[Row]]:
        """Every prompt, in the split BENCH; its turns one after another."""
        rows = []
        for path in self.paths():
            questions = list(self._read(path))
            ids = Counter(turns[0].id for turns in questions)
            if twice := [name for name, count in ids.items() if count > 1]:
                raise ValueError(
                    f"{path} has several rows of the id {question_of(twice[0])}; "
                    "give each question an id of its own"
                )
            kept = {row.id for row in fewest([q[0] for q in questions], self.prompts_per_bench, 0)}
            rows += [row for turns in questions if turns[0].id in kept for row in turns]
        return {BENCH: rows}

    def repeats(self, seed: int) -> set[str]:
        """Ids of prompts that one before them asks word for word, with the same earlier turns.

        Benchmarks borrow from each other: what counts questions of several counts each once.
        """
        asked: set[str] = set()
        found = set()
        for row in self.load(seed)[BENCH]:
            if row.messages_json in asked:
                found.add(row.id)
            asked.add(row.messages_json)
        return found

    def identity(self) -> dict[str, Any]:
        """What the rows follow from; how they are answered is the answering stage's affair."""
        contents = [(stem(path), digest(path)) for path in self.paths()]
        asked = {"turns": self.turns, "prompts_per_bench": self.prompts_per_bench}
        return {"kind": BENCH, "files": contents, **asked}

    def answering(self) -> dict[str, Any]:
        """Settings of stage regenerate that a benchmark brings along."""
        return {
            "laws": {BENCH: self.laws},
            "prompts_per_domain": {BENCH: 0},
            "max_new_tokens": {BENCH: self.max_new_tokens},
            "max_prompt_tokens": self.max_prompt_tokens,
            "num_top_logits": 0,  # nothing learns from these answers
        }

    def problems(self) -> dict[str, Problem]:
        """Prompt id -> what its answer is graded by; prompts that cannot be graded are left out."""
        found = {}
        for path in self.paths():
            for number, (where, raw) in enumerate(read_rows(path)):
                first = turns_of(raw, where)[0]
                problem = Problem.of(raw, first)
                if problem is not None:
                    found[prompt_id(path, raw, number, 1)] = problem
        return found

    def paths(self) -> list[Path]:
        """The files, each there and of a known format."""
        names = self.files if isinstance(self.files, list) else [self.files]
        found = [Path(self.folder).expanduser() / Path(name).expanduser() for name in names]
        for path in found:
            if not path.name.endswith(JSON_LINES + PARQUET):
                known = ", ".join(JSON_LINES + PARQUET)
                raise ValueError(f"bench.files={path} has a format that is not known; use {known}")
            if not path.is_file():
                raise ValueError(
                    f"the benchmark file {path} is not there; say where its folder is with "
                    "bench.folder=FOLDER (or the variable OUTRIDER_BENCHES), or choose bench=none"
                )
        return found

    def _read(self, path: Path) -> Iterator[list[Row]]:
        """The turns of each question; the answers between them are null until they are known."""
        for number, (where, raw) in enumerate(read_rows(path)):
            turns = turns_of(raw, where)
            rows = []
            for place in range(len(turns) if self.turns == "all" else 1):
                messages: list[dict[str, str | None]] = [{"role": "user", "content": turns[0]}]
                for turn in turns[1 : place + 1]:
                    messages += [
                        {"role": "assistant", "content": None},
                        {"role": "user", "content": turn},
                    ]
                rows.append(
                    Row(
                        id=prompt_id(path, raw, number, place + 1),
                        domain=str(raw.get("domain") or stem(path)),
                        family=f"{stem(path)}/{raw.get('task') or raw.get('category') or 'all'}",
                        text=turns[place],
                        messages_json=json.dumps(messages, ensure_ascii=False),
                        response=raw["response"] if isinstance(raw.get("response"), str) else None,
                        source=stem(path),
                        license=str(raw.get("license") or ""),
                        where=where,
                    )
                )
            yield rows


def bench_of(family: str) -> str:
    """The benchmark that a family belongs to."""
    return family.partition("/")[0]


def prompt_id(path: Path, raw: Mapping[str, Any], number: int, turn: int) -> str:
    """Benchmark, question and turn, counted from 1."""
    return f"{stem(path)}/{raw.get('id', number)}/{turn}"


def question_of(prompt: str) -> str:
    """What the turns of one question share."""
    return prompt.rpartition("/")[0]


def turns_of(raw: Mapping[str, Any], where: str) -> list[str]:
    """What the person says, turn by turn; raises ValueError where there is nothing."""
    turns = raw.get("turns") or [raw.get("prompt")]
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise ValueError(
            f"{where} has neither a prompt nor a list of turns; give it one, or delete the row"
        )
    said = [normalise(turn) for turn in turns]
    if not all(said):
        raise ValueError(f"{where} has an empty turn; fill it or delete the row")
    return said

"""Which prompts a suite decodes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from pipeline.benches import BENCH, BenchData, bench_of
from pipeline.chat import load_prompts, prompt_ids
from pipeline.rows import Row, fraction
from pipeline.wallclock import EvalPrompt


def bench_prompts(
    data: BenchData, counts: Mapping[str, int], tokenizer: Any, at_least: int = 0
) -> list[EvalPrompt]:
    """First turns of the benchmarks that are counted, those whose hash comes first, benchmarks in
    turn; `at_least` so many in all, where the files have them. A benchmark is a domain here.

    Raises ValueError where none of the files is counted.
    """
    wanted = {name: count for name, count in counts.items() if name in data.names}
    if not wanted:
        raise ValueError(
            f"stages.benchmark.prompts_per_bench counts {', '.join(counts) or 'nothing'}, but "
            f"bench.files has {', '.join(data.names)}; count one of them"
        )
    share = math.ceil(at_least / len(wanted))
    rows = replace(data, turns="first", prompts_per_bench=0).load(seed=0)[BENCH]
    found = [
        _first([row for row in rows if bench_of(row.family) == name], max(count, share))
        for name, count in wanted.items()
    ]
    turns = [row for row in chain.from_iterable(zip_longest(*found)) if row is not None]
    return [
        _prompt({**asdict(row), "domain": bench_of(row.family)}, bench_of(row.family), tokenizer)
        for row in turns
    ]


def _first(rows: Sequence[Row], count: int) -> list[Row]:
    return sorted(rows, key=lambda row: fraction(0, row.id))[:count] if count else list(rows)


def split_prompts(folder: Path, count: int, tokenizer: Any) -> list[EvalPrompt]:
    """The first rows of each domain of the test split, domains in turn, `count` in all."""
    rows = in_turn(load_prompts(folder)["test"], count)
    return [_prompt(row, "test", tokenizer) for row in rows]


def in_turn(rows: Iterable[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """The first rows of each domain, one domain after the other, `count` in all."""
    by_domain: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_domain.setdefault(row["domain"], []).append(row)
    turns = chain.from_iterable(zip_longest(*by_domain.values()))
    return [row for row in turns if row is not None][:count]


def _prompt(row: Mapping[str, Any], split: str, tokenizer: Any) -> EvalPrompt:
    ids = tuple(prompt_ids(tokenizer, row))
    return EvalPrompt(row["id"], split, row["domain"], row["text"], ids)

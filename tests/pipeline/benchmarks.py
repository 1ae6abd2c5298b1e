"""Settings of stage benchmark for tests, and a benchmark's files."""

import json
from pathlib import Path
from typing import Any

from drafters.lm import LmConfig
from drafters.ngram import NgramConfig
from pipeline.benches import BenchData
from pipeline.benchmark import Benchmark
from pipeline.config import Pool, PoolEntry

CUT = LmConfig(source=None, layers=[0, -1], num_draft_vocab=0, train_head=False, dtype="auto")


def entry(drafter: Any) -> PoolEntry:
    return PoolEntry(drafter=drafter, trained_by=None, domains=[], init_from=None)


LOOKUP = {"ngram": entry(NgramConfig(min_ngram=1, max_ngram=3, max_offer=5))}
POOL = Pool(entries={**LOOKUP, "cut": entry(CUT)})


def suite(name: str, **changes: Any) -> Benchmark:
    settings: dict[str, Any] = {
        "suite": name,
        "num_prompts": 3,
        "prompts_per_bench": {"humaneval": 2, "gsm8k": 1},
        "max_new_tokens": {"greedy": 12, "decode": 12, "batch": 12, "forward": 6},
        "num_draft_tokens": 3,
        "draft_lengths": [1, 3],
        "drafters": {},
        "composite_min_match": None,
        "policies": [],
        "exported": None,
        "peers": [],
        "assistant": None,
        "batch_sizes": [1, 2],
        "batch_rounds": 1,
        "rounds": 2,
        "context_tokens": 20,
        "publish": None,
    }
    return Benchmark(**{**settings, **changes})


def bench_files(folder: Path) -> BenchData:
    """Two benchmarks of a few prompts each, of unequal length and of two domains; a third that
    nobody counts.
    """
    names = ["humaneval", "gsm8k", "vicuna_bench"]
    for name in names:
        words = [" ".join(f"w{(7 * n + i) % 92}" for i in range(3 + 2 * n)) for n in range(4)]
        rows = [
            {"id": n, "prompt": text, "domain": ("code", "chat")[n % 2]}
            for n, text in enumerate(words)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    return _data(folder, [f"{name}.jsonl" for name in names])


def no_bench() -> BenchData:
    return _data(Path(), [])


def _data(folder: Path, files: list[str]) -> BenchData:
    return BenchData(
        folder=str(folder),
        files=files,
        turns="all",
        prompts_per_bench=0,
        laws="both",
        max_new_tokens=8,
        max_prompt_tokens=0,
    )

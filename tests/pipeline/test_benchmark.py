"""Figures worth quoting are taken under the conditions that they name.

Would catch: greedy equality measured in the target's own dtype, where transformers itself breaks
ties by the width of a pass; conditions that name another dtype or backend than the one measured; a
suite that asks for a profile of the target in another dtype, and is refused it; texts that part
where nothing was drafted.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks import POOL, bench_files, no_bench, suite
from tiny import tiny_target_folder
from workspace import prompt, tiny_config, workspace, write_prompts

from pipeline import bench_suites, benchmark

PROMPTS = [prompt(n, domain, words=9) for n in range(2) for domain in ("code", "chat")]


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_greedy_equality_is_measured_in_float32_whatever_the_target_computes_in(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tiny_target_folder(tmp_path / "target"))
    exactness = "bitwise" if backend == "native" else "law"
    config = replace(config, dtype="bfloat16", backend=backend, exactness=exactness)
    opened: list[Any] = []

    def load_target(*args: Any) -> Any:
        opened.append(load(*args))
        return opened[-1]

    load = benchmark.load_target
    monkeypatch.setattr(benchmark, "load_target", load_target)
    prompts = write_prompts(tmp_path / "prompts", {"test": PROMPTS})
    space = workspace(
        {"target": config, "pool": POOL, "bench": no_bench()}, {"data": prompts}, tmp_path / "out"
    )
    metrics = suite("greedy").run(space)
    names = [
        "ngram",
        "cut",
        "random weights",
        *(f"policy {p}" for p in bench_suites.GREEDY_POLICIES),
    ]
    assert metrics == {"num_texts": 3 * len(names), "num_different": 0}
    said = json.loads((tmp_path / "out" / "greedy.json").read_text())
    assert [row["name"] for row in said["rows"]] == names
    assert any(row["num_accepted"] for row in said["rows"])
    conditions = {key: said["conditions"][key] for key in ("dtype", "backend", "exactness")}
    assert conditions == {"dtype": "float32", "backend": backend, "exactness": exactness}
    (target,) = opened
    assert target.backend == backend
    assert {str(p.dtype) for p in target.model.parameters()} == {"torch.float32"}


def groups(folder: Path, **changes: Any) -> dict[str, Any]:
    config = tiny_config(tiny_target_folder(folder / "target"))
    return {"target": replace(config, **changes), "pool": POOL, "bench": no_bench()}


def test_a_suite_needs_what_it_decodes(tmp_path: Path) -> None:
    there = {"pool": POOL, "bench": bench_files(tmp_path)}
    needs = {
        name: [set(suite(name).needs(given)) for given in ({**there, "bench": no_bench()}, there)]
        for name in benchmark.SUITES
    }
    assert needs == {
        "greedy": [{"data"}, {"data"}],
        "decode": [{"data"}, set()],
        "batch": [{"data"}, set()],
        "forward": [set(), set()],
        "kernels": [set(), set()],
    }
    with pytest.raises(ValueError, match="suite=speed is not known; choose one of greedy"):
        suite("speed")
    with pytest.raises(ValueError, match="peers=vllm is not known; choose one of eager"):
        suite("decode", peers=["eager", "vllm"])

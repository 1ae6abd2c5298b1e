"""Stage benchmark: figures worth quoting, each with its conditions, beside what others do."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from rich.table import Table

from decode import SpeculativeDecoder
from decode.clock import Clock
from decode.cost_measurement import quick_costs
from decode.costs import costs_key
from decode.policies.named import policy_config
from decode.targets.transformers import TransformersTarget
from decode.types import Drafter
from pipeline.bench_greedy import greedy_suite, greedy_ways, own_text
from pipeline.build import build_drafters, drafter_needs, load_target
from pipeline.chat import load_prompts, prompt_ids
from pipeline.files import write_json
from pipeline.manifest import git_state, package_versions
from pipeline.models import TargetConfig
from pipeline.profile import read_costs
from pipeline.progress import console, progress
from pipeline.runtime import hardware
from pipeline.stage import Need, Stage, Workspace

POLICIES = ("posterior", "thompson", "ucb1")
SUITES = ("greedy", "decode", "kernels")
GREEDY_DTYPE = "float32"  # in bfloat16 transformers itself breaks ties by the width of a pass


@dataclass(frozen=True, kw_only=True)
class Benchmark(Stage):
    """One suite of measurements."""

    reads: ClassVar[tuple[str, ...]] = ("target", "pool")
    times: ClassVar[bool] = True
    summary: ClassVar[str] = "measure beside others: greedy equality, decoding, kernels"

    suite: str
    num_prompts: int
    max_new_tokens: int
    num_draft_tokens: int
    publish: str | None

    def needs(self, groups: Mapping[str, Any]) -> dict[str, Need]:
        if self.suite not in SUITES:
            raise ValueError(
                f"stages.benchmark.suite={self.suite} is not a suite; "
                f"choose one of {', '.join(SUITES)}"
            )
        if self.suite == "kernels":
            return {}
        costs = {"costs": Need("profile")} if self.suite == "decode" else {}
        return {"data": Need("prepare"), **costs, **drafter_needs(groups["pool"])}

    def run(self, workspace: Workspace) -> dict[str, Any]:
        if self.suite == "kernels":
            from pipeline.bench_kernels import kernel_suite

            results = kernel_suite(workspace.out)
        else:
            results = self._decoding(workspace)
        content = {"conditions": self._conditions(workspace), **results}
        write_json(workspace.out / f"{self.suite}.json", content)
        if self.publish:
            published = Path("outputs", "published", f"{self.publish}.json")
            published.parent.mkdir(parents=True, exist_ok=True)
            write_json(published, content)
        return results["metrics"]

    def _conditions(self, workspace: Workspace) -> dict[str, Any]:
        target = self._target(workspace)
        return {
            "suite": self.suite,
            "target": target.name_or_path,
            "dtype": target.dtype,
            "backend": target.backend,
            "exactness": target.exactness,
            "prompts": f"{self.num_prompts} of the test split, domains in turn",
            "max_new_tokens": self.max_new_tokens,
            "num_draft_tokens": self.num_draft_tokens,
            "device": workspace.runtime.resolved_device(),
            "hardware": hardware(),
            "packages": package_versions(),
            **git_state(),
        }

    def _target(self, workspace: Workspace) -> TargetConfig:
        config: TargetConfig = workspace.groups["target"]
        return replace(config, dtype=GREEDY_DTYPE) if self.suite == "greedy" else config

    def _decoding(self, workspace: Workspace) -> dict[str, Any]:
        target = load_target(self._target(workspace), workspace.runtime)
        drafters = build_drafters(workspace.groups["pool"], target, workspace.inputs)
        rows = _in_turn(load_prompts(workspace.inputs["data"])["test"], self.num_prompts)
        prompts = [prompt_ids(target.tokenizer, row) for row in rows]
        if self.suite == "greedy":
            return self._greedy(target, drafters, prompts, workspace.runtime.make_clock())
        return self._beside_transformers(target, drafters, prompts, workspace)

    def _greedy(
        self,
        target: TransformersTarget,
        drafters: Mapping[str, Drafter],
        prompts: Sequence[Sequence[int]],
        clock: Clock,
    ) -> dict[str, Any]:
        costs = quick_costs(target, drafters, clock)  # a profile is of the target's own dtype
        policies = {name: policy_config(name) for name in POLICIES}
        ways = greedy_ways(target, drafters, policies, costs, self.num_draft_tokens)
        with progress("benchmark: greedy equality", len(ways) + 1, "ways") as meter:
            rows = greedy_suite(target, ways, prompts, self.max_new_tokens, meter.advance)
        table = Table("way", "equal texts", "tokens", "tokens per pass", title="greedy equality")
        for row in rows:
            equal = f"{row.num_equal} of {row.num_prompts}"
            table.add_row(row.name, equal, str(row.num_tokens), f"{row.tokens_per_pass:.2f}")
        console.print(table)
        return {
            "rows": [asdict(row) for row in rows],
            "metrics": {
                "num_texts": sum(row.num_prompts for row in rows),
                "num_different": sum(row.num_prompts - row.num_equal for row in rows),
            },
        }

    def _beside_transformers(
        self,
        target: TransformersTarget,
        drafters: Mapping[str, Drafter],
        prompts: Sequence[list[int]],
        workspace: Workspace,
    ) -> dict[str, Any]:
        """Whole calls, prefill included, every prompt through every way in turn."""
        clock = workspace.runtime.make_clock()
        costs = read_costs(workspace.inputs["costs"], costs_key(target))
        policy = policy_config("posterior").build(costs, list(drafters), workspace.seed)
        plain = SpeculativeDecoder(target, {}, clock=clock)
        routed = SpeculativeDecoder(target, drafters, policy, clock=clock)
        ways = {
            "transformers generate": lambda ids: own_text(target, ids, self.max_new_tokens),
            "transformers prompt lookup": lambda ids: _lookup(target, ids, self.max_new_tokens),
            "plain": lambda ids: plain.generate([ids], self.max_new_tokens).token_ids[0],
            "posterior": lambda ids: routed.generate([ids], self.max_new_tokens).token_ids[0],
        }
        rates = _rates(ways, prompts, clock)
        first = rates["transformers generate"]
        table = Table("way", "tokens/s (median)", "over transformers (median of ratios)")
        rows: list[dict[str, Any]] = []
        ratios: dict[str, float] = {}
        for name, values in rates.items():
            ratio = median(a / b for a, b in zip(values, first, strict=True))
            table.add_row(name, f"{median(values):.1f}", f"{ratio:.2f}x")
            rows.append({"way": name, "tokens_per_second": values})
            ratios[name] = round(ratio, 4)
        console.print(table)
        return {"rows": rows, "metrics": ratios}


def _lookup(target: TransformersTarget, ids: Sequence[int], max_new_tokens: int) -> list[int]:
    return own_text(target, ids, max_new_tokens, prompt_lookup_num_tokens=10)


def _rates(
    ways: Mapping[str, Any], prompts: Sequence[list[int]], clock: Clock
) -> dict[str, list[float]]:
    """Tokens per second of each prompt by way; the first prompt runs once untimed, to warm up."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way(prompts[0])
    with progress("benchmark: decoding", len(prompts) * len(ways), "texts") as meter:
        for prompt in prompts:
            for name, way in ways.items():
                start = clock.now()
                text = way(prompt)
                rates[name].append(len(text) / (clock.now() - start))
                meter.advance()
    return rates


def _in_turn(rows: Any, count: int) -> list[dict[str, Any]]:
    """The first rows of each domain, one domain after the other, `count` in all."""
    by_domain: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_domain.setdefault(row["domain"], []).append(row)
    turns = chain.from_iterable(zip_longest(*by_domain.values()))
    return [row for row in turns if row is not None][:count]

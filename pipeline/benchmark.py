"""Stage benchmark: figures worth quoting, each with its conditions, beside what others do."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from pipeline.bench_arms import PEERS
from pipeline.bench_prompts import bench_prompts, split_prompts
from pipeline.bench_suites import Parts, batch, decode, forward, greedy
from pipeline.bench_table import RENDERED, rendered
from pipeline.benches import BenchData
from pipeline.build import build_drafters, drafter_needs, load_target
from pipeline.digests import model_identity
from pipeline.files import write_json
from pipeline.headline import finite
from pipeline.manifest import circumstances
from pipeline.models import TargetConfig
from pipeline.progress import console
from pipeline.stage import Need, Stage, Workspace, describe
from pipeline.wallclock import EvalPrompt

SUITES = ("greedy", "decode", "batch", "forward", "kernels")
ALONE = ("forward", "kernels")  # that need no prompts and no drafters
GREEDY_DTYPE = "float32"  # in bfloat16 transformers itself breaks ties by the width of a pass


@dataclass(frozen=True, kw_only=True)
class Benchmark(Stage):
    """One suite of measurements."""

    reads: ClassVar[tuple[str, ...]] = ("target", "pool", "bench")
    format_version: ClassVar[int] = 2
    times: ClassVar[bool] = True
    summary: ClassVar[str] = "measure beside others: greedy equality, decoding, batches, kernels"

    suite: str
    num_prompts: int
    prompts_per_bench: dict[str, int]
    max_new_tokens: dict[str, int]
    num_draft_tokens: int
    draft_lengths: list[int]
    drafters: dict[str, str]
    composite_min_match: int | None
    policies: list[str]
    exported: str | None
    peers: list[str]
    assistant: str | None
    batch_sizes: list[int]
    batch_rounds: int
    rounds: int
    context_tokens: int
    publish: str | None

    def __post_init__(self) -> None:
        known = {"suite": ([self.suite], SUITES), "peers": (self.peers, PEERS)}
        for name, (given, choices) in known.items():
            if wrong := [value for value in given if value not in choices]:
                raise ValueError(
                    f"stages.benchmark.{name}={wrong[0]} is not known; "
                    f"choose one of {', '.join(choices)}"
                )

    def identity(self) -> dict[str, Any]:
        """The settings, with what lies in the folders that they name."""
        values = {name: describe(value) for name, value in vars(self).items() if name != "publish"}
        values["drafters"] = {name: _content(path) for name, path in self.drafters.items()}
        return {**values, **{key: _content(values[key]) for key in ("assistant", "exported")}}

    def needs(self, groups: Mapping[str, Any]) -> dict[str, Need]:
        if self.suite in ALONE:
            return {}
        own = drafter_needs(groups["pool"])
        return own if self._on_benches(groups) else {"data": Need("prepare"), **own}

    def run(self, workspace: Workspace) -> dict[str, Any]:
        content = {"conditions": self._conditions(workspace), **finite(self._measured(workspace))}
        write_json(workspace.out / f"{self.suite}.json", content)
        if self.publish:
            published = Path("outputs", "published", f"{self.publish}.json")
            published.parent.mkdir(parents=True, exist_ok=True)
            write_json(published, content)
        if self.suite in RENDERED:
            console.print(rendered(content), markup=False, highlight=False, soft_wrap=True)
        return content["metrics"]

    def _measured(self, workspace: Workspace) -> dict[str, Any]:
        if self.suite == "kernels":
            from pipeline.bench_kernels import kernel_suite

            return kernel_suite(workspace.out)
        config = self._target(workspace)
        if self.suite == "forward":
            device = workspace.runtime.resolved_device()
            return forward(config, device, self)
        target = load_target(config, workspace.runtime)
        drafters = build_drafters(workspace.groups["pool"], target, workspace.inputs)
        prompts, clock = self._prompts(workspace, target), workspace.runtime.make_clock()
        run = {"greedy": greedy, "decode": decode, "batch": batch}[self.suite]
        found = run(Parts(target, drafters, prompts, clock), self)
        return {"num_prompts": dict(Counter(prompt.split for prompt in prompts)), **found}

    def _prompts(self, workspace: Workspace, target: Any) -> list[EvalPrompt]:
        """The bench files' first turns, or the test split's prompts where no bench is chosen."""
        if not self._on_benches(workspace.groups):
            number = self.num_prompts if self.suite != "batch" else max(self.batch_sizes)
            return split_prompts(workspace.inputs["data"], number, target.tokenizer)
        data: BenchData = workspace.groups["bench"]
        at_least = max(self.batch_sizes) if self.suite == "batch" else 0
        return bench_prompts(data, self.prompts_per_bench, target.tokenizer, at_least)

    def _on_benches(self, groups: Mapping[str, Any]) -> bool:
        return groups["bench"].chosen and self.suite != "greedy"

    def _target(self, workspace: Workspace) -> TargetConfig:
        config: TargetConfig = workspace.groups["target"]
        return replace(config, dtype=GREEDY_DTYPE) if self.suite == "greedy" else config

    def _conditions(self, workspace: Workspace) -> dict[str, Any]:
        """What the figures hold for. Folders are told by their names: paths are one machine's."""
        target = self._target(workspace).resolved(workspace.runtime)
        local = Path(target.name_or_path).is_dir()
        said: dict[str, Any] = {
            "suite": self.suite,
            "target": Path(target.name_or_path).name if local else target.name_or_path,
            "dtype": target.dtype,
            "backend": target.backend,
            "exactness": target.exactness,
            "device": workspace.runtime.resolved_device(),
            **circumstances(),
        }
        if self.suite not in ALONE:
            said |= self._asked(workspace.groups)
        return said

    def _asked(self, groups: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "max_new_tokens": self.max_new_tokens[self.suite],
            "num_draft_tokens": self.num_draft_tokens,
            "draft_lengths": self.draft_lengths,
            "drafters": [*groups["pool"].entries, *self.drafters],
            "assistant": Path(self.assistant).name if self.assistant else None,
        }


def _content(name: str | None) -> Any:
    """A folder by the models in it, anything else by its name."""
    folder = None if name is None else Path(name)
    return model_identity(folder) if folder is not None and folder.is_dir() else name

"""Stage evaluate: what each part was worth here, in wall clock and by replay, and what to
deploy.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from rich.console import Group

from decode.policies.base import PolicyConfig
from decode.policies.named import policy_config
from decode.targets.transformers import TransformersTarget
from decode.types import Sampling
from pipeline.answers import Answers
from pipeline.bench import Bench, open_bench
from pipeline.bench_evaluation import (
    context_room,
    decoded_texts,
    quality,
    recorded_texts,
    wall_prompts,
)
from pipeline.benches import BenchData
from pipeline.build import drafter_needs
from pipeline.chat import load_prompts, prompt_ids
from pipeline.compare import read_comparison
from pipeline.families import check_laws
from pipeline.files import write_json
from pipeline.headline import finite, headline, replay_error
from pipeline.leaderboard import grid, limited, play
from pipeline.learning import behind
from pipeline.manifest import git_state, package_versions
from pipeline.progress import console
from pipeline.regenerate import balanced
from pipeline.report import findings, write_report
from pipeline.runtime import hardware
from pipeline.scores import HEADLINE_SPLIT, audit, scoreboard
from pipeline.spans import samples
from pipeline.stage import Need, Stage, Workspace, describe
from pipeline.verdict import best_lengths, deployment_sentence, recommendations, requirements
from pipeline.wallclock import Cell, EvalPrompt, Journal, Race, make_prompt

RESULTS = "results.json"


@dataclass(frozen=True, kw_only=True)
class Evaluate(Stage):
    """Decodes test prompts by every method in turn; replays every arm, policy and oracle."""

    reads: ClassVar[tuple[str, ...]] = ("target", "pool", "policy", "encoder", "bench")
    times: ClassVar[bool] = True
    resumes: ClassVar[bool] = True
    format_version: ClassVar[int] = 3
    summary: ClassVar[str] = "what each part is worth on this machine, and what to deploy"

    prompts_per_domain: dict[str, int]
    temperatures: dict[str, float]
    max_new_tokens: int
    num_repeats: int
    draft_lengths: list[int]
    replay_prompts_per_domain: int
    replay_policies: list[str]
    num_resamples: int
    samples_per_domain: int
    bench_prompts: int  # of each benchmark and domain, decoded in wall clock; 0: none
    quality: bool  # whether answers to benchmarks are graded: this runs code that a model wrote
    quality_seconds: float  # for each program

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "num_repeats", "num_resamples"):
            if getattr(self, name) < 1:
                raise ValueError(f"stages.evaluate.{name}={getattr(self, name)} must be at least 1")
        if self.bench_prompts < 0 or self.quality_seconds <= 0:
            raise ValueError(
                f"stages.evaluate.bench_prompts={self.bench_prompts} must be 0 or more, and "
                f"quality_seconds={self.quality_seconds:g} more than 0"
            )
        if not self.draft_lengths:
            raise ValueError("stages.evaluate.draft_lengths is empty; give the K to compare")
        if "test" not in self.prompts_per_domain or not self.temperatures:
            raise ValueError(
                "stages.evaluate needs prompts_per_domain.test and at least one law in temperatures"
            )

    def needs(self, groups: Mapping[str, Any]) -> dict[str, Need]:
        bench = groups["bench"]
        answered = {"bench_answers": Need("regenerate", {"data": bench})}
        return {
            "prompts": Need("prepare"),
            "answers": Need("regenerate"),
            "acceptance": Need("collect"),
            "costs": Need("profile"),
            "router": Need("train_router"),
            "comparison": Need("compare"),
            **(answered if bench.chosen else {}),
            **drafter_needs(groups["pool"]),
        }

    def run(self, workspace: Workspace) -> dict[str, Any]:
        bench = open_bench(
            workspace, list(self.temperatures), self.draft_lengths, self.num_resamples
        )
        check_laws(bench.frame, self.temperatures)
        race, cells = self._race(bench, workspace)
        bench_race, bench_cells = self._bench_race(bench, workspace)
        methods, every = race.methods, [*cells, *bench_cells]
        prompts = [*race.prompts, *bench_race.prompts]
        results = {
            "conditions": self._conditions(bench, workspace, race.prompts),
            "fixed": {law: list(arm) for law, arm in bench.fixed.items()},
            "wall": scoreboard(every, methods, bench.resampling),
            "audit": audit(every, self._greedy_laws(), prompts, bench.target),
            **self._replay(bench),
            **read_comparison(workspace.inputs["comparison"]),
            **self._quality(bench, workspace, bench_cells),
        }
        results["replay_error"] = replay_error(results["wall"], results["replay"])
        results["deployment"] = deployment_sentence(results)
        results["recommendations"] = recommendations(results)
        results["requirements"] = requirements(results)
        results["samples"] = self._samples(bench, workspace, best_lengths(results))
        results |= behind(workspace.inputs, timed=workspace.runtime.clock == "system")
        write_json(workspace.out / RESULTS, finite(results))
        write_report(results, workspace.out)
        return headline(results)

    def shown(self, out: Path) -> Group:
        return findings(json.loads((out / RESULTS).read_text(encoding="utf-8")))

    def identity(self) -> dict[str, Any]:
        """The settings, with what the names of policies stand for."""
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "replay_policies": {name: describe(config) for name, config in self.rivals().items()},
        }

    def rivals(self) -> dict[str, PolicyConfig]:
        """The policies that replay compares, as conf/policy holds them."""
        return {name: policy_config(name) for name in self.replay_policies}

    def samplings(self, seed: int) -> dict[str, Sampling]:
        """The laws that are decoded."""
        return {
            law: Sampling(temperature=value, seed=seed) for law, value in self.temperatures.items()
        }

    def _greedy_laws(self) -> list[str]:
        return [law for law, temperature in self.temperatures.items() if temperature == 0]

    def _race(self, bench: "Bench", workspace: Workspace) -> tuple[Race, list[Cell]]:
        prompts = self._prompts(bench.target, workspace)
        race = self._race_over(prompts, self.max_new_tokens, bench, workspace)
        return race, race.run(Journal(workspace.out / "cells.jsonl"))

    def _race_over(
        self, prompts: Sequence[EvalPrompt], length: int, bench: "Bench", workspace: Workspace
    ) -> Race:
        return Race(
            target=bench.target,
            drafters=bench.drafters,
            methods={law: bench.methods(law) for law in self.temperatures},
            prompts=prompts,
            laws=self.samplings(workspace.seed),
            repeats=self.num_repeats,
            max_new_tokens=length,
            make_clock=workspace.runtime.make_clock,
        )

    def _bench_race(self, bench: "Bench", workspace: Workspace) -> tuple[Race, list[Cell]]:
        """The same methods on some prompts of the benchmark, if there is one."""
        data: BenchData = workspace.groups["bench"]
        prompts: list[EvalPrompt] = []
        if data.chosen and self.bench_prompts:
            room = context_room(bench.target, data)
            folder = workspace.inputs["bench_answers"]
            prompts = wall_prompts(folder, self.bench_prompts, workspace.seed, room)
        race = self._race_over(prompts, data.max_new_tokens, bench, workspace)
        return race, race.run(Journal(workspace.out / "bench_cells.jsonl"))

    def _prompts(self, target: TransformersTarget, workspace: Workspace) -> list[EvalPrompt]:
        """Prompts in an order that mixes domains, those that fit the target's context."""
        splits, room = load_prompts(workspace.inputs["prompts"]), target.max_context
        chosen = []
        for split, number in self.prompts_per_domain.items():
            for _, row in (
                balanced(splits[split], number, workspace.seed) if split in splits else ()
            ):
                ids = prompt_ids(target.tokenizer, row)
                if 0 < len(ids) <= room - self.max_new_tokens:
                    chosen.append(make_prompt(row, split, ids))
        if not any(prompt.split == "test" for prompt in chosen):
            raise ValueError(
                f"no prompt of split test fits the target's context of {room} tokens with "
                f"max_new_tokens={self.max_new_tokens}; lower stages.evaluate.max_new_tokens"
            )
        return chosen

    def _replay(self, bench: "Bench") -> dict[str, Any]:
        cases = [
            case
            for split in self.prompts_per_domain
            for case in limited(bench.cases(split), self.replay_prompts_per_domain)
            if case.law in self.temperatures
        ]
        if not cases:
            raise ValueError(
                "the acceptance artifact holds no answers of the evaluated splits; add test to "
                "stages.collect.splits"
            )
        with console.status("evaluate: replaying every arm, policy and oracle"):
            players = bench.players(self.rivals())
            table = play(
                cases, players, bench.fixed, bench.costs, self.draft_lengths, bench.resampling
            )
            arms = grid(cases, bench.costs, self.draft_lengths, bench.resampling)
        return {"grid": arms, "replay": table}

    def _quality(self, bench: Bench, workspace: Workspace, cells: Sequence[Cell]) -> dict[str, Any]:
        """Whether answers to benchmarks are right, by every method; nothing where it is off."""
        data: BenchData = workspace.groups["bench"]
        if not (self.quality and data.chosen):
            return {"quality": [], "quality_audit": None, "sandbox": []}
        tokenizer = bench.target.tokenizer
        recorded = recorded_texts(workspace.inputs["bench_answers"], self.temperatures, tokenizer)
        texts = [*recorded, *decoded_texts(cells, tokenizer)]
        return quality(data, texts, self._greedy_laws(), self.quality_seconds)

    def _samples(
        self, bench: Bench, workspace: Workspace, lengths: Mapping[tuple[str, str], int]
    ) -> list[dict[str, Any]]:
        """What drafters guess of the target's own answers to test prompts."""
        answers = Answers(workspace.inputs["answers"]).rows(HEADLINE_SPLIT, with_teacher=False)
        cases = [case for case in bench.cases(HEADLINE_SPLIT) if case.law in self.temperatures]
        tokenizer = bench.target.tokenizer
        assert tokenizer is not None, "prompts were tokenized"
        decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        number = self.samples_per_domain
        return samples(cases, answers, decode, lengths, number, workspace.seed)

    def _conditions(
        self, bench: Bench, workspace: Workspace, prompts: Sequence[EvalPrompt]
    ) -> dict[str, Any]:
        """Everything without which the figures mean nothing."""
        target = bench.target
        return {
            "hardware": hardware(),
            "threads": torch.get_num_threads(),
            "device": target.device,
            "clock": workspace.runtime.clock,
            "target": workspace.groups["target"].name_or_path,
            "dtype": workspace.groups["target"].dtype,
            "backend": target.backend,
            "exactness": getattr(target, "exactness", "law"),
            "width_dependence": getattr(target, "width_dependence", None),
            "batch": 1,
            "pool": list(bench.drafters),
            "policy": type(bench.policy).__module__.rpartition(".")[2],
            "prompts": {
                split: sum(prompt.split == split for prompt in prompts)
                for split in self.prompts_per_domain
            },
            "temperatures": dict(self.temperatures),
            "max_new_tokens": self.max_new_tokens,
            "benchmarks": workspace.groups["bench"].names,
            "repeats": self.num_repeats,
            "num_resamples": self.num_resamples,
            "seed": workspace.seed,
            "plain_step_ms": 1e3 * bench.costs.plain_seconds,
            "memory_bytes": dict(bench.costs.memory_bytes),
            "first_token_seconds": dict(bench.costs.first_token_seconds),
            "commit": git_state()["commit"],
            "packages": package_versions(),
            "command": "python -m pipeline stage=evaluate",
        }

"""Stage evaluate: what each part was worth here, in wall clock and by replay, and what to
deploy.
"""

import json
import math
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
from pipeline.build import drafter_needs
from pipeline.chat import load_prompts, prompt_ids
from pipeline.files import write_json
from pipeline.leaderboard import grid, play
from pipeline.learning import behind
from pipeline.manifest import git_state, package_versions
from pipeline.progress import console
from pipeline.regenerate import balanced
from pipeline.replay import Case
from pipeline.report import findings, write_report
from pipeline.runtime import hardware
from pipeline.scores import ALL, HEADLINE_SPLIT, audit, scoreboard
from pipeline.spans import samples
from pipeline.stage import Need, Stage, Workspace, describe
from pipeline.verdict import best_lengths, deployment_sentence, recommendations, requirements
from pipeline.wallclock import PLAIN, Cell, EvalPrompt, Journal, Race, make_prompt

RESULTS = "results.json"


@dataclass(frozen=True, kw_only=True)
class Evaluate(Stage):
    """Decodes test prompts by every method in turn; replays every arm, policy and oracle."""

    reads: ClassVar[tuple[str, ...]] = ("target", "pool", "policy", "encoder")
    times: ClassVar[bool] = True
    resumes: ClassVar[bool] = True
    format_version: ClassVar[int] = 2
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

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "num_repeats", "num_resamples"):
            if getattr(self, name) < 1:
                raise ValueError(f"stages.evaluate.{name}={getattr(self, name)} must be at least 1")
        if not self.draft_lengths:
            raise ValueError("stages.evaluate.draft_lengths is empty; give the K to compare")
        if "test" not in self.prompts_per_domain or not self.temperatures:
            raise ValueError(
                "stages.evaluate needs prompts_per_domain.test and at least one law in temperatures"
            )

    def needs(self, groups: Mapping[str, Any]) -> dict[str, Need]:
        return {
            "prompts": Need("prepare"),
            "answers": Need("regenerate"),
            "acceptance": Need("collect"),
            "costs": Need("profile"),
            "router": Need("train_router"),
            **drafter_needs(groups["pool"]),
        }

    def run(self, workspace: Workspace) -> dict[str, Any]:
        bench = open_bench(
            workspace, list(self.temperatures), self.draft_lengths, self.num_resamples
        )
        race, cells = self._race(bench, workspace)
        results = {
            "conditions": self._conditions(bench, workspace, race.prompts),
            "fixed": {law: list(arm) for law, arm in bench.fixed.items()},
            "wall": scoreboard(cells, race.methods, bench.resampling),
            "audit": audit(cells, self._greedy_laws(), race.prompts, bench.target),
            **self._replay(bench),
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
        race = Race(
            target=bench.target,
            drafters=bench.drafters,
            methods={law: bench.methods(law) for law in self.temperatures},
            prompts=self._prompts(bench.target, workspace),
            laws=self.samplings(workspace.seed),
            repeats=self.num_repeats,
            max_new_tokens=self.max_new_tokens,
            make_clock=workspace.runtime.make_clock,
        )
        return race, race.run(Journal(workspace.out / "cells.jsonl"))

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
            "dtype": str(next(target.model.parameters()).dtype).removeprefix("torch."),
            "backend": target.backend,
            "batch": 1,
            "pool": list(bench.drafters),
            "policy": type(bench.policy).__module__.rpartition(".")[2],
            "prompts": {
                split: sum(prompt.split == split for prompt in prompts)
                for split in self.prompts_per_domain
            },
            "temperatures": dict(self.temperatures),
            "max_new_tokens": self.max_new_tokens,
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


def limited(cases: Sequence[Case], per_domain: int) -> list[Case]:
    """The first `per_domain` prompts of each domain, under every law; 0: all."""
    known: dict[str, set[str]] = {}
    chosen = []
    for case in cases:
        ids = known.setdefault(case.domain, set())
        if not per_domain or len(ids) < per_domain or case.prompt_id in ids:
            ids.add(case.prompt_id)
            chosen.append(case)
    return chosen


def replay_error(
    wall: Sequence[Mapping[str, Any]], replay: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Predicted against measured speed ratio, for the methods that both have."""
    predicted = {
        (row["law"], row["policy"]): row["speed_ratio"]["value"]
        for row in replay
        if row["domain"] == ALL
    }
    names = {"router only": "router_only + router"}
    rows = []
    for row in wall:
        key = (row["law"], names.get(row["method"], row["method"]))
        if row["domain"] == ALL and row["method"] != PLAIN and key in predicted:
            measured = row["speed_ratio"]["value"]
            found = {"predicted": predicted[key], "measured": measured}
            error = predicted[key] / measured - 1 if measured else math.nan
            rows.append({"law": row["law"], "method": row["method"], **found, "error": error})
    return rows


def finite(value: Any) -> Any:
    """The same content with null for what is not a finite number, so that it is JSON."""
    if isinstance(value, Mapping):
        return {str(key): finite(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [finite(child) for child in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def headline(results: Mapping[str, Any]) -> dict[str, Any]:
    """The figures that the menu and the tracker show."""
    figures: dict[str, Any] = {"deployment": results["deployment"]}
    for row in results["wall"]:
        if row["domain"] == ALL:
            name = f"{row['law']}/{row['method']}"
            figures[f"{name}/tokens_per_second"] = row["tokens_per_second"]
            if row["method"] != PLAIN:
                figures[f"{name}/speed_ratio"] = row["speed_ratio"]["value"]
    figures["greedy_texts_different"] = sum(results["audit"]["different"].values())
    return finite(figures)

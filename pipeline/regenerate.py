"""The target answers the prompts: the text that trains drafters, router and costs is its own."""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from decode.targets.choices import fast_dtype
from decode.targets.transformers import TransformersTarget
from decode.types import Sampling
from pipeline.answering import Row, answer_shards, cut, speed, summary
from pipeline.answers import AnswerWriter
from pipeline.benches import BenchData
from pipeline.build import load_target
from pipeline.chat import load_prompts, prompt_ids
from pipeline.generation import Generates, Generator, Job
from pipeline.launch import launch, meet, rank_and_size, sole_writer
from pipeline.lint import lint_answers, lint_prompts
from pipeline.models import TargetConfig
from pipeline.runtime import Runtime
from pipeline.stage import Need, Stage, Workspace
from pipeline.turns import completed, num_awaited

log = logging.getLogger(__name__)

GREEDY, SAMPLED = "greedy", "sampled"
ENGINES = ("auto", "padded", "slots")
LAWS = {"greedy": (GREEDY,), "sampled": (SAMPLED,), "both": (GREEDY, SAMPLED), "alternate": ()}


@dataclass(frozen=True, kw_only=True)
class Regenerate(Stage):
    reads: ClassVar[tuple[str, ...]] = ("target",)
    summary: ClassVar[str] = "the target answers the prompts, and notes its own law at every token"
    resumes: ClassVar[bool] = True
    format_version: ClassVar[int] = 3  # one stream of random numbers an answer

    laws: dict[str, str]  # split -> greedy, sampled, both, or alternate (one of the two, in turn)
    prompts_per_domain: dict[str, int]  # split -> most prompts of each domain; 0: all
    max_new_tokens: dict[str, int]  # split -> most tokens of an answer
    max_prompt_tokens: int  # a longer prompt is left out, and counted
    temperature: float  # of the law called "sampled"
    top_p: float
    batch_size: int  # rows at once
    shard_rows: int  # rows sorted by length and written together; the unit of resuming
    num_top_logits: int  # 0: distill needs teacher=model then
    engine: str  # one of ENGINES
    dtype: str  # while it answers; "auto": bfloat16 where the hardware multiplies it, else float32

    def __post_init__(self) -> None:
        for name in ("prompts_per_domain", "max_new_tokens"):
            if set(getattr(self, name)) != set(self.laws):
                raise ValueError(
                    f"stages.regenerate.{name} names the splits {sorted(getattr(self, name))} but "
                    f"laws names {sorted(self.laws)}; give each split one value in each of them"
                )
        for name, least in (("batch_size", 1), ("shard_rows", 1), ("num_top_logits", 0)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"stages.regenerate.{name}={getattr(self, name)} must be at least {least}"
                )
        if self.engine not in ENGINES:
            raise ValueError(
                f"stages.regenerate.engine={self.engine} is unknown; use one of "
                f"{', '.join(ENGINES)}"
            )
        for split, choice in self.laws.items():
            if choice not in LAWS:
                raise ValueError(
                    f"stages.regenerate.laws.{split}={choice} is unknown; "
                    f"choose one of {', '.join(LAWS)}"
                )

    def for_groups(self, groups: Mapping[str, Any]) -> "Regenerate":
        """A benchmark says how its prompts are answered; the laws themselves stay these."""
        data = groups.get("data")
        return replace(self, **data.answering()) if isinstance(data, BenchData) else self

    def resolved(self, runtime: Runtime) -> "Regenerate":
        if self.dtype != "auto":
            return self
        return replace(self, dtype=fast_dtype(runtime.resolved_device()))

    def needs(self, groups: Mapping[str, Any]) -> dict[str, Need]:
        return {"prompts": Need("prepare")}

    def run(self, workspace: Workspace) -> dict[str, Any]:
        return launch(self.answer, workspace, runtime=workspace.runtime)

    def answer(self, workspace: Workspace) -> dict[str, Any]:
        """The work of one process of those that answer together; the first tells of all of it."""
        with sole_writer(workspace.out, workspace.runtime):
            config: TargetConfig = workspace.groups["target"]
            target = load_target(config, workspace.runtime, dtype=self.dtype, whole=True)
            prompts = workspace.inputs["prompts"]
            rows = list(self.rows(prompts, target, workspace.seed))
            self._check(rows, target)
            laws = self.samplings(workspace.seed)
            writer = self._writer(workspace.out, laws, target)
            left_out = num_shards = turn = 0
            while rows:
                fitting = [row for row in rows if self._fits(row, target.max_context)]
                left_out += len(rows) - len(fitting)
                if fitting:
                    shards = list(cut(fitting, self.shard_rows))
                    answer_shards(
                        self._generator(target, fitting),
                        shards,
                        partial(self._job, laws=laws),
                        writer,
                        workspace.runtime.make_clock(),
                        next(target.model.parameters()).dtype,
                        num_before=num_shards,
                    )
                    num_shards += len(shards)
                turn += 1
                rows = list(self.later_rows(prompts, workspace.out, target, turn))
            if not writer.leads:
                return {}
            found = lint_answers(workspace.out, target)
            found.tell()
            return {
                **summary(workspace.out),
                **speed(workspace.out, target.model, workspace.runtime),
                "prompts_left_out": left_out,
                **found.metrics,
            }

    def _check(self, rows: Sequence[Row], target: TransformersTarget) -> None:
        """Raise ValueError where no row can be answered, or one must not be."""
        fitting = [row for row in rows if self._fits(row, target.max_context)]
        if not fitting:
            raise ValueError(
                f"none of {len(rows)} prompts fits stages.regenerate.max_prompt_tokens="
                f"{self.max_prompt_tokens} and, with an answer of max_new_tokens, the target's "
                f"context of {target.max_context}; lower max_new_tokens or give shorter prompts"
            )
        if rank_and_size()[0] == 0:  # the others would find the same
            lint_prompts(((row.prompt, row.prompt_ids) for row in fitting), target.tokenizer)

    def _writer(
        self, out: Path, laws: dict[str, Sampling], target: TransformersTarget
    ) -> AnswerWriter:
        """A writer on what is there, which the first process has looked at before the others."""
        leads = rank_and_size()[0] == 0
        dtype = str(next(target.model.parameters()).dtype).removeprefix("torch.")
        if not leads:
            meet()
        writer = AnswerWriter(
            out, laws, leads=leads, num_top_logits=self.num_top_logits, dtype=dtype
        )
        if leads:
            meet()
        return writer

    def samplings(self, seed: int) -> dict[str, Sampling]:
        """The named laws."""
        sampled = Sampling(temperature=self.temperature, top_p=self.top_p, seed=seed)
        return {GREEDY: Sampling(seed=seed), SAMPLED: sampled}

    def rows(self, prompts: Path, target: Any, seed: int) -> Iterator[Row]:
        """Every (prompt, law) to answer, in an order that seed and prompts decide."""
        splits = load_prompts(prompts)
        for split, choice in self.laws.items():
            if split not in splits:
                log.info("the data has no split called %s, so none of it is answered", split)
                continue
            begun = [prompt for prompt in splits[split] if not num_awaited(prompt)]
            for place, prompt in balanced(begun, self.prompts_per_domain[split], seed):
                laws = LAWS[choice] or ((GREEDY, SAMPLED)[place % 2],)
                ids = prompt_ids(target.tokenizer, prompt)
                if max(ids, default=0) >= target.vocab_size:
                    raise ValueError(
                        f"prompt {prompt['id']} holds token id {max(ids)}, but the target knows "
                        f"{target.vocab_size}: its tokenizer is another model's; put the right "
                        "one beside the weights"
                    )
                for law in laws:
                    yield Row(prompt, split, law, ids)

    def later_rows(self, prompts: Path, out: Path, target: Any, num_before: int) -> Iterator[Row]:
        """Every (prompt, law) that goes on after so many answers, which are in `out` already."""
        splits = load_prompts(prompts)
        for split in self.laws:
            waiting = [row for row in splits.get(split, ()) if num_awaited(row) == num_before]
            if waiting:
                for law, prompt in completed(waiting, out, split, target.tokenizer):
                    yield Row(prompt, split, law, prompt_ids(target.tokenizer, prompt))

    def _fits(self, row: Row, max_context: int) -> bool:
        room = max_context - self.max_new_tokens[row.split]
        return 0 < len(row.prompt_ids) <= min(self.max_prompt_tokens, room)

    def _generator(self, target: TransformersTarget, rows: Sequence[Row]) -> Generates:
        """Rows padded to one batch after another, or kept in slots of fixed shape."""
        model, eos, top = target.model, target.eos_token_ids, self.num_top_logits
        if self.engine == "slots" or (self.engine == "auto" and target.device.startswith("cuda")):
            from pipeline.slots import SlotGenerator, fixed_shapes_fit

            if self.engine == "slots" or fixed_shapes_fit(model):
                longest = max(len(row.prompt_ids) + self.max_new_tokens[row.split] for row in rows)
                return SlotGenerator(model, eos, top, self.batch_size, longest)
        return Generator(model, eos, top, self.batch_size)

    def _job(self, row: Row, *, laws: Mapping[str, Sampling]) -> Job:
        key = f"{row.prompt['id']}/{row.law}"
        return Job(key, row.prompt_ids, laws[row.law], self.max_new_tokens[row.split])


def balanced(
    prompts: Sequence[Mapping[str, Any]], per_domain: int, seed: int
) -> list[tuple[int, Mapping[str, Any]]]:
    """At most `per_domain` prompts of each domain, in turn, each with its place within its domain.

    Which ones, and in which order, follows from a hash of (seed, id), not from the data's order.
    """

    def lot(prompt: Mapping[str, Any]) -> bytes:
        return hashlib.sha256(f"{seed}:{prompt['id']}".encode()).digest()

    domains: dict[str, list[Mapping[str, Any]]] = {}
    for prompt in prompts:
        domains.setdefault(prompt["domain"], []).append(prompt)
    chosen = [
        (place, name, prompt)
        for name, members in domains.items()
        for place, prompt in enumerate(sorted(members, key=lot)[: per_domain or None])
    ]
    return [(place, prompt) for place, _, prompt in sorted(chosen, key=lambda entry: entry[:2])]

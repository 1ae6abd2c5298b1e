"""The target answers the prompts: the text that trains drafters, router and costs is its own."""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from decode.types import Sampling
from pipeline.answers import Answer, Answers, AnswerWriter
from pipeline.build import load_target
from pipeline.chat import load_prompts, prompt_ids
from pipeline.generation import Generator, Job, Trace
from pipeline.progress import progress
from pipeline.stage import Need, Stage, Workspace

log = logging.getLogger(__name__)

GREEDY, SAMPLED = "greedy", "sampled"
LAWS = {"greedy": (GREEDY,), "sampled": (SAMPLED,), "both": (GREEDY, SAMPLED), "alternate": ()}


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt under one law, ready to be answered."""

    prompt: Mapping[str, Any]
    split: str
    law: str
    prompt_ids: list[int]


@dataclass(frozen=True, kw_only=True)
class Regenerate(Stage):
    reads: ClassVar[tuple[str, ...]] = ("target",)
    summary: ClassVar[str] = "the target answers the prompts, and notes its own law at every token"
    resumes: ClassVar[bool] = True
    format_version: ClassVar[int] = 2  # each shard says how long it took

    laws: dict[str, str]  # split -> greedy, sampled, both, or alternate (one of the two, in turn)
    prompts_per_domain: dict[str, int]  # split -> most prompts of each domain; 0: all
    max_new_tokens: dict[str, int]  # split -> most tokens of an answer
    max_prompt_tokens: int  # a longer prompt is left out, and counted
    temperature: float  # of the law called "sampled"
    top_p: float
    batch_size: int
    shard_rows: int  # rows sorted by length and written together; the unit of resuming
    num_top_logits: int
    dtype: str  # while it answers; "auto": bfloat16 where the hardware multiplies it, else float32

    def __post_init__(self) -> None:
        for name in ("prompts_per_domain", "max_new_tokens"):
            if set(getattr(self, name)) != set(self.laws):
                raise ValueError(
                    f"stages.regenerate.{name} names the splits {sorted(getattr(self, name))} but "
                    f"laws names {sorted(self.laws)}; give each split one value in each of them"
                )
        for name in ("batch_size", "shard_rows", "num_top_logits"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"stages.regenerate.{name}={getattr(self, name)} must be at least 1"
                )
        for split, choice in self.laws.items():
            if choice not in LAWS:
                raise ValueError(
                    f"stages.regenerate.laws.{split}={choice} is unknown; "
                    f"choose one of {', '.join(LAWS)}"
                )

    def needs(self, groups: Mapping[str, Any]) -> dict[str, Need]:
        return {"prompts": Need("prepare")}

    def run(self, workspace: Workspace) -> dict[str, Any]:
        target = load_target(workspace.groups["target"], workspace.runtime, dtype=self.dtype)
        laws = self.samplings(workspace.seed)
        dtype = next(target.model.parameters()).dtype
        writer = AnswerWriter(
            workspace.out,
            laws,
            num_top_logits=self.num_top_logits,
            dtype=str(dtype).removeprefix("torch."),
        )
        rows = list(self.rows(workspace.inputs["prompts"], target, workspace.seed))
        fitting = [row for row in rows if self._fits(row, target.max_context)]
        if not fitting:
            raise ValueError(
                f"none of {len(rows)} prompts fits stages.regenerate.max_prompt_tokens="
                f"{self.max_prompt_tokens} and, with an answer of max_new_tokens, the target's "
                f"context of {target.max_context}; lower max_new_tokens or give shorter prompts"
            )
        generator = Generator(target.model, target.eos_token_ids, self.num_top_logits)
        self._answer(generator, fitting, laws, writer, workspace)
        return {**summary(workspace.out), "prompts_left_out": len(rows) - len(fitting)}

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
            for place, prompt in balanced(splits[split], self.prompts_per_domain[split], seed):
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

    def _fits(self, row: Row, max_context: int) -> bool:
        room = max_context - self.max_new_tokens[row.split]
        return 0 < len(row.prompt_ids) <= min(self.max_prompt_tokens, room)

    def _answer(
        self,
        generator: Generator,
        rows: Sequence[Row],
        laws: Mapping[str, Sampling],
        writer: AnswerWriter,
        workspace: Workspace,
    ) -> None:
        """Write the shards that are not there yet."""
        clock = workspace.runtime.make_clock()
        shards = list(cut(rows, self.shard_rows))
        done = len(writer.shards)
        behind = sum(map(len, shards[:done]))
        with progress("regenerate", len(rows), "answers", done=behind) as meter:
            for shard in shards[done:]:
                started = clock.now()
                answers: list[Answer] = []
                for batch in cut_batches(shard, self.batch_size):
                    answers += self._batch(generator, batch, laws)
                    meter.advance(len(batch))
                dtype, seconds = next(generator.model.parameters()).dtype, clock.now() - started
                writer.write(shard[0].split, answers, dtype, seconds)

    def _batch(
        self, generator: Generator, batch: Sequence[Row], laws: Mapping[str, Sampling]
    ) -> list[Answer]:
        jobs = [
            Job(
                f"{row.prompt['id']}/{row.law}",
                row.prompt_ids,
                laws[row.law],
                self.max_new_tokens[row.split],
            )
            for row in batch
        ]
        traces = generator.answer(jobs)
        return [
            as_answer(row, laws[row.law], trace) for row, trace in zip(batch, traces, strict=True)
        ]


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


def cut(rows: Sequence[Row], shard_rows: int) -> Iterator[list[Row]]:
    """Shards of one split each; inside, rows stand by length: little padding."""
    for split in dict.fromkeys(row.split for row in rows):
        members = [row for row in rows if row.split == split]
        for start in range(0, len(members), shard_rows):
            yield sorted(members[start : start + shard_rows], key=lambda row: len(row.prompt_ids))


def cut_batches(rows: Sequence[Row], batch_size: int) -> Iterator[Sequence[Row]]:
    for start in range(0, len(rows), batch_size):
        yield rows[start : start + batch_size]


def as_answer(row: Row, sampling: Sampling, trace: Trace) -> Answer:
    """The record that is kept."""
    return Answer(
        **{name: row.prompt[name] for name in ("id", "domain", "family", "text")},
        split=row.split,
        law=row.law,
        sampling=sampling,
        token_ids=torch.tensor(row.prompt_ids + trace.token_ids),
        num_prompt_tokens=len(row.prompt_ids),
        logprobs=torch.tensor(trace.logprobs),
        lse=torch.tensor(trace.lse),
        topk_ids=torch.stack(trace.topk_ids),
        topk_logits=torch.stack(trace.topk_logits),
        finish_reason=trace.finish_reason,
    )


def summary(folder: Path) -> dict[str, float]:
    """What the answers are like: how many, how long, how many end by themselves or repeat.

    The speed counts what earlier runs wrote, as the shards tell it.
    """
    lengths: list[int] = []
    ended = distinct = total = 0
    reader = Answers(folder)
    for answer in reader.rows():
        ids = answer.answer_ids.tolist()
        grams = list(zip(*(ids[offset:] for offset in range(8)), strict=False))
        lengths.append(len(ids))
        ended += answer.finish_reason == "eos"
        distinct, total = distinct + len(set(grams)), total + len(grams)
    return {
        "tokens_per_second": sum(lengths) / sum(shard.seconds for shard in reader.shards),
        "num_answers": len(lengths),
        "num_tokens": sum(lengths),
        "mean_answer_tokens": sum(lengths) / len(lengths),
        "eos_share": ended / len(lengths),
        "distinct_8gram_share": distinct / max(total, 1),
    }

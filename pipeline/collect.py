"""How every drafter of the pool would have fared on the target's answers, without decoding them.

A decoded sample says how far the estimate is from what the decoder really does.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, repeat
from typing import Any, ClassVar

import numpy as np

from decode import SpeculativeDecoder
from decode.policies.fixed import FixedPolicy
from decode.targets.transformers import TransformersTarget
from decode.types import Drafter
from pipeline.acceptance import AcceptanceWriter
from pipeline.answers import Answer, Answers
from pipeline.benches import BENCH, SCORED
from pipeline.build import build_drafters, drafter_needs, load_target
from pipeline.progress import progress
from pipeline.scoring import passes_of, score_all
from pipeline.stage import Need, Stage, Workspace

AT_ONCE = 256  # answers that are scored together


@dataclass(frozen=True, kw_only=True)
class Collect(Stage):
    reads: ClassVar[tuple[str, ...]] = ("target", "pool")
    summary: ClassVar[str] = "per-prompt acceptance of every drafter, checked by a decoded sample"

    splits: list[str]  # those whose answers are scored
    max_depth: int  # drafted tokens that are looked at from each position
    check_split: str  # where the decoded sample comes from
    check_prompts: int  # of the sample, for each law; 0: no check
    check_num_draft_tokens: int  # K of the arms that decode it

    def __post_init__(self) -> None:
        if not 1 <= self.check_num_draft_tokens <= self.max_depth:
            raise ValueError(
                f"check_num_draft_tokens={self.check_num_draft_tokens} must lie between 1 and "
                f"max_depth={self.max_depth}"
            )

    def needs(self, groups: Mapping[str, Any]) -> dict[str, Need]:
        bench = {"data": groups[SCORED]} if SCORED in groups else {}
        return {"answers": Need("regenerate", bench), **drafter_needs(groups["pool"])}

    def for_groups(self, groups: Mapping[str, Any]) -> "Collect":
        """Of a benchmark there is one split, and nothing to learn from a decoded sample of it."""
        return replace(self, splits=[BENCH], check_prompts=0) if SCORED in groups else self

    def run(self, workspace: Workspace) -> dict[str, Any]:
        target = load_target(workspace.groups["target"], workspace.runtime)
        drafters = build_drafters(workspace.groups["pool"], target, workspace.inputs)
        answers = Answers(workspace.inputs["answers"])
        totals = self._score(answers, drafters, workspace)
        sample = self._sample(answers)
        return {**lengths(totals), **self._check(sample, drafters, target)}

    def _score(
        self, answers: Answers, drafters: Mapping[str, Drafter], workspace: Workspace
    ) -> dict[tuple[str, str], list[float]]:
        """Write one row for every (answer, drafter); returns [tokens, passes] by (drafter, law)."""
        totals: dict[tuple[str, str], list[float]] = {}
        total = sum(shard.num_rows for shard in answers.shards if shard.split in self.splits)
        if not total:
            raise ValueError(
                f"no answers in the splits {', '.join(self.splits)}; "
                "add them to stages.regenerate.laws"
            )
        with (
            AcceptanceWriter(workspace.out) as writer,
            progress("collect", total, "answers") as meter,
        ):
            for split in self.splits:
                for some in chunks(answers.rows(split=split, with_teacher=False), AT_ONCE):
                    for name, tables in score_all(drafters, some, self.max_depth).items():
                        accepts = [table.numpy().astype(np.float32) for table in tables]
                        writer.write(list(map(record, some, repeat(name), accepts)))
                        add(totals, name, some, passes_of(accepts, self.check_num_draft_tokens))
                    meter.advance(len(some))
        return totals

    def _sample(self, answers: Answers) -> list[Answer]:
        """The first prompts of the check split, as many under each law."""
        chosen: dict[str, list[Answer]] = {}
        for answer in answers.rows(split=self.check_split) if self.check_prompts else ():
            held = chosen.setdefault(answer.law, [])
            if len(held) < self.check_prompts:
                held.append(answer)
        return [answer for held in chosen.values() for answer in held]

    def _check(
        self, sample: Sequence[Answer], drafters: Mapping[str, Drafter], target: TransformersTarget
    ) -> dict[str, float]:
        """For each drafter and law: acceptance_length foretold from answers, and decoded."""
        metrics: dict[str, float] = {}
        k = self.check_num_draft_tokens
        arms = [(name, law) for name in drafters for law in sorted({a.law for a in sample})]
        with progress("decode a sample", len(arms), "arms") as meter:
            for name, law in arms:
                answers = [answer for answer in sample if answer.law == law]
                scored = score_all({name: drafters[name]}, answers, k)[name]
                tables = [table.numpy() for table in scored]
                foretold = sum(map(len, tables)) / passes_of(tables, k).sum()
                decoded = decoded_length(target, name, drafters[name], k, answers)
                key = f"{name}_{law}"
                metrics[f"predicted_acceptance_length_{key}"] = foretold
                metrics[f"decoded_acceptance_length_{key}"] = decoded
                metrics[f"acceptance_length_error_{key}"] = foretold - decoded
                meter.advance()
        return metrics


def chunks(answers: Iterable[Answer], size: int) -> Iterator[list[Answer]]:
    """Lists of at most `size`."""
    rest = iter(answers)
    while some := list(islice(rest, size)):
        yield some


def add(
    totals: dict[tuple[str, str], list[float]],
    drafter: str,
    answers: Sequence[Answer],
    passes: Iterable[float],
) -> None:
    """Count the answers' tokens and passes, by law."""
    for answer, count in zip(answers, passes, strict=True):
        held = totals.setdefault((drafter, answer.law), [0.0, 0.0])
        held[0], held[1] = held[0] + len(answer.logprobs), held[1] + float(count)


def record(answer: Answer, drafter: str, accept: np.ndarray) -> dict[str, Any]:
    """One row of the artifact."""
    return {
        "prompt_id": answer.id,
        "split": answer.split,
        "domain": answer.domain,
        "family": answer.family,
        "text": answer.text,
        "num_prompt_tokens": answer.num_prompt_tokens,
        "law": answer.law,
        "temperature": answer.sampling.temperature,
        "drafter": drafter,
        "accept": accept,
    }


def lengths(totals: Mapping[tuple[str, str], Sequence[float]]) -> dict[str, float]:
    """acceptance_length over all scored answers, by drafter and law."""
    return {
        f"acceptance_length_{name}_{law}": tokens / passes
        for (name, law), (tokens, passes) in totals.items()
    }


def decoded_length(
    target: TransformersTarget,
    name: str,
    drafter: Drafter,
    num_draft_tokens: int,
    answers: Sequence[Answer],
) -> float:
    """Tokens per target pass when the answers' prompts are decoded with one fixed arm."""
    policy = FixedPolicy(name, num_draft_tokens, None)
    decoder = SpeculativeDecoder(target, {name: drafter}, policy)
    tokens = passes = 0
    for answer in answers:
        result = decoder.generate(
            [answer.token_ids[: answer.num_prompt_tokens].tolist()],
            max_new_tokens=len(answer.logprobs),
            sampling=answer.sampling,
            request_ids=[f"{answer.id}/{answer.law}"],
        )
        if name in decoder.pool.dropped:
            raise ValueError(f"drafter {name} failed while decoding: {decoder.pool.dropped[name]}")
        tokens += len(result.token_ids[0])
        passes += len(result.records[0])
    return tokens / passes

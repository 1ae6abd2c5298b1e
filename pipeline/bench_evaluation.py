"""What stage evaluate makes of a benchmark: acceptance by task family from scored answers, some
prompts in wall clock, and whether the answers are right.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode.targets.transformers import TransformersTarget
from pipeline.answers import Answer, Answers
from pipeline.benches import BENCH, BenchData, bench_of
from pipeline.chat import load_prompts
from pipeline.data import bench_texts
from pipeline.leaks import HeldOut, Rule, leaks_against
from pipeline.progress import progress
from pipeline.quality.grading import grade
from pipeline.quality.sandbox import FAILED, LAYERS, PASSED, Limits, layers
from pipeline.rows import COLUMNS, Row, fraction
from pipeline.wallclock import PLAIN, Cell, EvalPrompt

log = logging.getLogger(__name__)

RECORDED = "recorded"  # the method of stage regenerate: the target alone, many answers at once
FIRST_TURN = "/1"  # what the ids of first turns end with


@dataclass(frozen=True, slots=True)
class Text:
    """An answer to be graded, whoever wrote it."""

    prompt_id: str
    bench: str
    law: str
    repeat: int
    method: str
    answer: str


def wall_prompts(folder: Path, per_domain: int, seed: int, room: int) -> list[EvalPrompt]:
    """The first turns that are decoded: so many of each benchmark and domain, those that fit."""
    found: dict[tuple[str, str], dict[str, Answer]] = {}
    for answer in Answers(folder).rows(BENCH, with_teacher=False):
        if answer.id.endswith(FIRST_TURN) and answer.num_prompt_tokens <= room:
            found.setdefault((bench_of(answer.family), answer.domain), {})[answer.id] = answer
    return [
        EvalPrompt(
            answer.id,
            bench,
            answer.domain,
            answer.text,
            tuple(answer.token_ids[: answer.num_prompt_tokens].tolist()),
        )
        for (bench, _), answers in found.items()
        for answer in sorted(answers.values(), key=lambda a: fraction(seed, a.id))[:per_domain]
    ]


def recorded_texts(folder: Path, laws: Iterable[str], tokenizer: Any) -> list[Text]:
    """The target's answers to first turns, as stage regenerate has them."""
    return [
        Text(
            answer.id,
            bench_of(answer.family),
            answer.law,
            0,
            RECORDED,
            tokenizer.decode(answer.answer_ids, skip_special_tokens=True),
        )
        for law in laws
        for answer in Answers(folder).rows(BENCH, law=law, with_teacher=False)
        if answer.id.endswith(FIRST_TURN)
    ]


def decoded_texts(cells: Sequence[Cell], tokenizer: Any) -> list[Text]:
    """What every method wrote in wall clock."""
    return [
        Text(
            cell.id,
            cell.split,
            cell.law,
            cell.repeat,
            cell.method,
            tokenizer.decode(cell.token_ids, skip_special_tokens=True),
        )
        for cell in cells
    ]


def quality(
    data: BenchData, texts: Sequence[Text], greedy_laws: Sequence[str], seconds: float
) -> dict[str, Any]:
    """The share of right answers by benchmark, law and method, and whether decoding moved it."""
    problems = data.problems()
    graded = [text for text in texts if text.prompt_id in problems]
    held: list[str] = []
    if any(problems[text.prompt_id].tests for text in graded):
        held = list(layers())
        for name in set(LAYERS) - set(held):
            log.warning("the sandbox lacks %s on this machine", LAYERS[name])
    pairs = [(problems[text.prompt_id], text.answer) for text in graded]
    programs = len({pair for pair in pairs if pair[0].tests})
    with progress("evaluate: grading answers", programs, "programs") as meter:
        statuses = [outcome.status for outcome in grade(pairs, Limits(seconds), meter.advance)]
    return {
        "quality": quality_rows(graded, statuses),
        "quality_audit": quality_audit(graded, statuses, greedy_laws),
        "sandbox": held,
    }


def quality_rows(texts: Sequence[Text], statuses: Sequence[str]) -> list[dict[str, Any]]:
    """Counts of each outcome, and the share that passed; methods only compare on the same prompts:
    those decoded in wall clock are fewer than the recorded ones.
    """
    groups: dict[tuple[str, str, str], Counter[str]] = {}
    for text, status in zip(texts, statuses, strict=True):
        groups.setdefault((text.bench, text.law, text.method), Counter())[status] += 1
    rows = []
    for (bench, law, method), counts in groups.items():
        total = counts.total()
        numbers = {"num_answers": total, PASSED: counts[PASSED], FAILED: counts[FAILED]}
        rest = {name: counts[name] for name in ("timeout", "error")}
        share = {"share_passed": counts[PASSED] / total}
        rows.append({"bench": bench, "law": law, "method": method, **numbers, **rest, **share})
    return rows


def quality_audit(
    texts: Sequence[Text], statuses: Sequence[str], greedy_laws: Sequence[str]
) -> dict[str, Any]:
    """Greedy answers that are right by a method and wrong by plain decoding, or the other way
    round: none, where texts are equal.
    """
    passed = {
        (text.prompt_id, text.law, text.repeat, text.method): status == PASSED
        for text, status in zip(texts, statuses, strict=True)
        if text.law in greedy_laws
    }
    compared: Counter[str] = Counter()
    moved = []
    for (prompt, law, repeat, method), right in passed.items():
        plain = passed.get((prompt, law, repeat, PLAIN))
        if plain is not None and method not in (PLAIN, RECORDED):
            compared[method] += 1
            if right != plain:
                moved.append({"id": prompt, "law": law, "repeat": repeat, "method": method})
    return {"compared": dict(compared), "moved": moved, "is_equal": not moved}


def leaks(data: BenchData, prompts: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Prompts that something learned from and that share text with a benchmark, counted by both."""
    rule = Rule(settings["leak_words"], settings["boilerplate_rows"])
    texts: list[HeldOut] = [text for path in data.paths() for text in bench_texts(path)]
    splits, rows = load_prompts(prompts), []
    for split in ("drafter_train", "router_train", "validation"):
        members = [Row(**{name: row[name] for name in COLUMNS}) for row in splits.get(split, ())]
        found: dict[str, list[str]] = {}
        for leak in leaks_against(members, texts, rule):
            found.setdefault(leak.other_name, []).append(leak.row.text)
        for bench, shared in found.items():
            rows.append(
                {"split": split, "bench": bench, "num_prompts": len(shared), "example": shared[0]}
            )
            log.warning(
                "%d prompts of split %s share text with %s; name its file in "
                "stages.prepare.benches to keep such prompts out",
                *(len(shared), split, bench),
            )
    return rows


def context_room(target: TransformersTarget, data: BenchData) -> int:
    """Tokens of the longest prompt that can be answered."""
    return min(data.max_prompt_tokens, target.max_context - data.max_new_tokens)

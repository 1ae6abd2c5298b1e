"""Shards of prompts, answered by one process or dealt to several, and how fast that was.

Shard k belongs to process k mod N. With engine=padded its batches are its own, and every answer has
random numbers of its own, so its file does not depend on N (on a CPU, as long as a process has as
many threads). With engine=slots a row's neighbours do depend on it, since the last rows of a shard
share the slots with the first of the process's next one: the numbers drawn are the same, but sums
come in another order, so logits differ by rounding, and a token where two are that close. A resumed
run differs from an undisturbed one in the same way.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from decode.clock import Clock
from decode.types import Sampling
from pipeline.answers import Answer, Answers, AnswerWriter
from pipeline.generation import EOS, Generates, Job, Trace
from pipeline.launch import rank_and_size
from pipeline.progress import progress
from pipeline.runtime import Runtime
from pipeline.throughput import Weights, Work

WAIT_SECONDS = 0.05  # between two looks at what the other processes have written


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt under one law, ready to be answered."""

    prompt: Mapping[str, Any]
    split: str
    law: str
    prompt_ids: list[int]


def cut(rows: Sequence[Row], shard_rows: int) -> Iterator[list[Row]]:
    """Shards of one split each; inside, rows stand by length: little padding."""
    for split in dict.fromkeys(row.split for row in rows):
        members = [row for row in rows if row.split == split]
        for start in range(0, len(members), shard_rows):
            yield sorted(members[start : start + shard_rows], key=lambda row: len(row.prompt_ids))


def as_answer(row: Row, sampling: Sampling, trace: Trace) -> Answer:
    """The record that is kept."""
    return Answer(
        **{name: row.prompt[name] for name in ("id", "domain", "family", "text")},
        split=row.split,
        law=row.law,
        sampling=sampling,
        token_ids=torch.cat([torch.tensor(row.prompt_ids), trace.token_ids]),
        num_prompt_tokens=len(row.prompt_ids),
        logprobs=trace.logprobs,
        lse=trace.lse,
        topk_ids=trace.topk_ids,
        topk_logits=trace.topk_logits,
        finish_reason=trace.finish_reason,
    )


def answer_shards(
    generator: Generates,
    shards: Sequence[Sequence[Row]],
    job: Callable[[Row], Job],
    writer: AnswerWriter,
    clock: Clock,
    dtype: torch.dtype,
    num_before: int,
) -> None:
    """Write what is missing of this process's shards, in order, each as soon as it is whole.

    Returns when the index names all shards, whoever answers them. `num_before` shards belong to
    earlier turns; `dtype` is that of the logits which are kept.
    """
    rank, size = rank_and_size()
    rows = dict(enumerate(shards, num_before))
    kept = {number for number in rows if writer.has(number)}
    todo = [number for number in rows if number % size == rank and number not in kept]
    jobs = [[job(row) for row in rows[number]] for number in todo]
    answers: list[list[Answer | None]] = [[None] * len(shard) for shard in jobs]
    missing = [len(shard) for shard in jobs]
    started, written = clock.now(), 0

    def gather() -> int:
        """How many answers of other processes have come to be in the index."""
        return sum(len(rows[n]) for n in set(writer.gather()) - kept - set(todo))

    done, total = sum(len(rows[number]) for number in kept), sum(map(len, shards))
    with progress("regenerate", total, "answers", done=done) as meter:
        for turn, spot, trace in generator.stream(jobs):
            row, sampling = rows[todo[turn]][spot], jobs[turn][spot].sampling
            answers[turn][spot] = as_answer(row, sampling, trace)
            missing[turn] -= 1
            meter.advance()
            while written < len(todo) and not missing[written]:
                number = todo[written]
                whole = [answer for answer in answers[written] if answer is not None]
                now = clock.now()
                writer.write(rows[number][0].split, whole, dtype, now - started, number)
                meter.advance(gather())
                answers[written], started, written = [], now, written + 1
        while len(writer.shards) < num_before + len(shards):
            time.sleep(WAIT_SECONDS)
            meter.advance(gather())


def summary(folder: Path) -> dict[str, float]:
    """What the answers are like: how many, how long, how many end by themselves or repeat."""
    lengths: list[int] = []
    ended = distinct = total = 0
    for answer in Answers(folder).rows(with_teacher=False):
        ids = answer.answer_ids.tolist()
        grams = list(zip(*(ids[offset:] for offset in range(8)), strict=False))
        lengths.append(len(ids))
        ended += answer.finish_reason == EOS
        distinct, total = distinct + len(set(grams)), total + len(grams)
    return {
        "num_answers": len(lengths),
        "num_tokens": sum(lengths),
        "mean_answer_tokens": sum(lengths) / len(lengths),
        "eos_share": ended / len(lengths),
        "distinct_8gram_share": distinct / max(total, 1),
    }


def speed(folder: Path, model: Any, runtime: Runtime) -> dict[str, float | None]:
    """How fast the processes were together, and which share of their devices' peak they used.

    From the seconds in the index, so that work of earlier runs counts: those of the process that
    took longest, as these processes share the shards. What a text of L tokens asks for: L - 1 read
    (the last is only chosen), each looking at those before it; the head, once an answer token.
    `flop_utilisation` is None where the device's peak is not known.
    """
    reader, work = Answers(folder), Work(0, 0, 0)
    for answer in reader.rows(with_teacher=False):
        num_read = len(answer.token_ids) - 1
        work += Work(num_read, len(answer.answer_ids), num_read * (num_read + 1) / 2)
    size, peak = rank_and_size()[1], runtime.device_peak_flops()
    seconds = max(sum(shard.seconds for shard in reader.shards[n::size]) for n in range(size))
    flops = Weights.of_model(model).forward_flops(work) / seconds
    return {
        "num_processes": size,
        "tokens_per_second": work.num_predicted / seconds,
        "tflops_per_second": flops / 1e12,
        "flop_utilisation": None if peak is None else flops / (size * peak),
    }

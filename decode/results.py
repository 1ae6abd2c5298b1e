"""What decoding hands back: token ids, texts, records and the figures computed from them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from decode.types import StepRecord

FinishReason = Literal["eos", "stop", "length", "context"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """One request in numbers: sums and counts over its steps. Plain numbers and short text only.

    In a batch a row's verify and host seconds are its equal share of the step, so that rows add up
    to the time that passed. A rate is NaN where nothing was counted.
    """

    num_prompt_tokens: int
    num_new_tokens: int
    num_target_passes: int
    num_drafted: int
    num_accepted: int
    acceptance_length: float  # tokens emitted per target pass, recovered or bonus token included
    acceptance_rate: float  # share of the drafted tokens that were accepted
    prefill_seconds: float
    draft_seconds: float
    verify_seconds: float
    host_seconds: float
    decode_seconds: float  # all steps, prefill apart
    first_token_seconds: float  # prefill and the first step
    tokens_per_second: float  # new tokens over decode_seconds
    p50_token_seconds: float  # a step's seconds are spread evenly over the tokens it emitted
    p95_token_seconds: float
    finish_reason: FinishReason
    verifier: str  # "triton" or "reference"
    backend: str  # the target's


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """Lists with one entry a prompt, in the order of the prompts."""

    token_ids: list[list[int]]  # new tokens, with EOS or what completes a stop string
    texts: list[str]  # without EOS and stop string; empty where the decoder has no tokenizer
    records: list[list[StepRecord]]
    metrics: list[Metrics]


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """What one step adds to a streamed text; all texts joined are the text of generate()."""

    text: str  # may be empty: half a character, or what may yet become a stop string, is held back
    token_ids: list[int]
    drafter: str  # the pool member that was asked, or "off"
    source: str  # the part of it that guessed; empty where nothing was drafted
    num_drafted: int
    num_accepted: int
    finish_reason: FinishReason | None  # None: more follows
    metrics: Metrics | None  # with the last chunk


def summarise(
    records: Sequence[StepRecord],
    *,
    num_prompt_tokens: int,
    prefill_seconds: float,
    finish_reason: FinishReason,
    verifier: str,
    backend: str,
) -> Metrics:
    """The metrics of one finished request."""
    new_tokens = sum(r.num_emitted for r in records)
    drafted = sum(r.num_drafted for r in records)
    accepted = sum(r.num_accepted for r in records)
    seconds = sum(r.seconds for r in records)
    per_token = [(r.seconds / r.num_emitted, r.num_emitted) for r in records]
    return Metrics(
        num_prompt_tokens=num_prompt_tokens,
        num_new_tokens=new_tokens,
        num_target_passes=len(records),
        num_drafted=drafted,
        num_accepted=accepted,
        acceptance_length=ratio(new_tokens, len(records)),
        acceptance_rate=ratio(accepted, drafted),
        prefill_seconds=prefill_seconds,
        draft_seconds=sum(r.draft_seconds for r in records),
        verify_seconds=sum(r.verify_seconds for r in records),
        host_seconds=sum(r.host_seconds for r in records),
        decode_seconds=seconds,
        first_token_seconds=prefill_seconds + (records[0].seconds if records else math.nan),
        tokens_per_second=ratio(new_tokens, seconds),
        p50_token_seconds=weighted_percentile(per_token, 0.50),
        p95_token_seconds=weighted_percentile(per_token, 0.95),
        finish_reason=finish_reason,
        verifier=verifier,
        backend=backend,
    )


def ratio(part: float, whole: float) -> float:
    """part / whole; NaN where there is no whole."""
    return part / whole if whole else math.nan


def weighted_percentile(values: Sequence[tuple[float, int]], share: float) -> float:
    """The smallest value that `share` of the weight does not exceed; NaN for no values."""
    total = sum(weight for _, weight in values)
    passed = 0
    for value, weight in sorted(values):
        passed += weight
        if passed >= share * total:
            return value
    return math.nan

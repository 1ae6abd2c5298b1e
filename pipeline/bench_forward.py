"""What a forward costs: plain decoding and passes of several widths, ours beside transformers'.

    python -m pipeline.bench_forward TARGET --dtype bfloat16 --out forward.json

All ways run on the same weights in the same process, one after the other in every round, the order
rotating, so that what else the machine does falls on all of them; ratios are taken within a round
and their median is told with a 95% bootstrap interval over rounds. Tokens per second are those of a
greedy text after its first token, over the seconds since then, so prefill is apart; a text ends at
its EOS or after --max-new-tokens, and no way may write another number of tokens unnoticed.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from decode import SpeculativeDecoder
from decode.clock import Clock, SystemClock
from decode.native.exactness import width_dependence
from decode.resolve import resolve_target
from decode.results import ratio
from pipeline.bench_command import command, conditions, show, told
from pipeline.bench_greedy import own_text
from pipeline.chat import prompt_ids
from pipeline.intervals import LEVEL, Interval
from pipeline.progress import progress
from pipeline.wallclock import rotated

REFERENCE = "transformers generate"
WIDTHS = (1, 2, 4, 6, 8, 16)
NUM_RESAMPLES = 2000
QUESTIONS = (
    "Write a Python function that returns the prime numbers below n, and explain how it works.",
    "Describe a walk through a small town by the sea, in about a hundred words.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it take? Explain each step.",
)


@dataclass(frozen=True)
class Text:
    """What one way wrote in one round."""

    token_ids: list[int]
    seconds: float  # from the first token to the last

    @property
    def rate(self) -> float:
        """Tokens a second; NaN for a text that ended with its first token."""
        return ratio(len(self.token_ids) - 1, self.seconds)


Way = Callable[[list[int], int], Text]


def generate_way(target: Any, clock: Clock) -> Way:
    """transformers' own greedy loop over a target's model."""

    def write(prompt: list[int], max_new_tokens: int) -> Text:
        times: list[float] = []

        def note(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            times.append(clock.now())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

        token_ids = own_text(target, prompt, max_new_tokens, stopping_criteria=[note])
        return Text(token_ids, times[-1] - times[0])

    return write


def decoder_way(target: Any, clock: Clock) -> Way:
    """Plain decoding in our loop."""
    decoder = SpeculativeDecoder(target, clock=clock)

    def write(prompt: list[int], max_new_tokens: int) -> Text:
        token_ids: list[int] = []
        times: list[float] = []
        for chunk in decoder.stream([prompt], max_new_tokens):
            times.append(clock.now())
            token_ids += chunk.token_ids
        return Text(token_ids, times[-1] - times[0])

    return write


def compare(
    name: str,
    *,
    dtype: str,
    device: str,
    exactness: Sequence[str],
    rounds: int,
    max_new_tokens: int,
    context_tokens: int,
    make_clock: type[Clock] = SystemClock,
) -> dict[str, Any]:
    """Every figure with its conditions."""
    clock = make_clock()
    targets = {"transformers": _load(name, dtype, device, "transformers", "law")}
    for kind in exactness:
        targets[f"native, {kind}"] = _load(name, dtype, device, "native", kind)
    ways = {REFERENCE: generate_way(targets["transformers"], clock)}
    ways |= {kind: decoder_way(target, clock) for kind, target in targets.items()}
    rows = [
        {"text": text, "messages_json": json.dumps([{"role": "user", "content": text}])}
        for text in QUESTIONS
    ]
    prompts = [prompt_ids(targets["transformers"].tokenizer, row) for row in rows]
    with progress("forward: texts", rounds * len(ways), "texts") as meter:
        texts = write_in_turn(ways, prompts, rounds, max_new_tokens, meter.advance)
    with progress("forward: passes", rounds * len(targets), "rounds") as meter:
        passes = pass_in_turn(targets, context_tokens, rounds, clock, meter.advance)
    return {
        **conditions(targets["transformers"]),
        "threads": torch.get_num_threads(),
        "target": Path(name).name,
        "rounds": rounds,
        "max_new_tokens": max_new_tokens,
        "context_tokens": context_tokens,
        "width_dependence": {kind: width_dependence(target) for kind, target in targets.items()},
        "plain": told_texts(texts),
        "passes": told_passes(passes),
    }


def write_in_turn(
    ways: Mapping[str, Way],
    prompts: Sequence[list[int]],
    rounds: int,
    max_new_tokens: int,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, list[Text]]:
    """A text of every way in every round; the first prompt is written once before, to warm up."""
    texts: dict[str, list[Text]] = {name: [] for name in ways}
    for way in ways.values():
        way(prompts[0], min(8, max_new_tokens))
    for number in range(rounds):
        for name in rotated(list(ways), number):
            texts[name].append(ways[name](prompts[number % len(prompts)], max_new_tokens))
            advance()
    return texts


@torch.inference_mode()
def pass_in_turn(
    targets: Mapping[str, Any],
    context_tokens: int,
    rounds: int,
    clock: Clock,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, dict[int, list[float]]]:
    """Seconds of one pass by target and width, over a row that has read `context_tokens`."""
    seconds: dict[str, dict[int, list[float]]] = {
        name: {width: [] for width in WIDTHS} for name in targets
    }
    rows = {name: target.open() for name, target in targets.items()}
    for name, target in targets.items():
        target.prefill(rows[name], [1 + i % 31 for i in range(context_tokens)])
    for number in range(rounds + 1):
        for name in rotated(list(targets), number):
            for width in WIDTHS:
                spent = _one_pass(targets[name], rows[name], width, clock)
                if number:  # the first round warms up
                    seconds[name][width].append(spent)
            if number:
                advance()
    return seconds


def _one_pass(target: Any, row: Any, width: int, clock: Clock) -> float:
    length, on_gpu = row.length, target.device.startswith("cuda")
    start = clock.now()
    target.score([row], [[1 + i for i in range(width)]])
    if on_gpu:
        torch.cuda.synchronize()
    spent = clock.now() - start
    target.rollback(row, length)
    return spent


def told_texts(texts: Mapping[str, list[Text]]) -> dict[str, Any]:
    """By way: median tokens a second, its ratio to the reference, and equal texts."""
    first = texts[REFERENCE]
    return {
        name: {
            "tokens_per_second": float(np.nanmedian([text.rate for text in ours])),
            "over_generate": median_ratio(
                [text.rate for text in ours], [text.rate for text in first]
            ).plain(),
            "num_tokens": sum(len(text.token_ids) for text in ours),
            "equal_texts": sum(
                a.token_ids == b.token_ids for a, b in zip(ours, first, strict=True)
            ),
        }
        for name, ours in texts.items()
    }


def told_passes(passes: Mapping[str, Mapping[int, list[float]]]) -> dict[str, Any]:
    """By target and width: median milliseconds, over one token's pass and over transformers'."""
    first = passes["transformers"]
    return {
        name: {
            str(width): {
                "milliseconds": 1e3 * float(np.median(spent)),
                "over_one": median_ratio(spent, ours[1]).plain(),
                "faster_than_transformers": median_ratio(first[width], spent).plain(),
            }
            for width, spent in ours.items()
        }
        for name, ours in passes.items()
    }


def median_ratio(ours: Sequence[float], base: Sequence[float]) -> Interval:
    """The median of ratios within a round, rounds resampled for the interval."""
    ratios = np.asarray(ours) / np.asarray(base)
    ratios = ratios[np.isfinite(ratios)]
    if len(ratios) == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    draws = np.random.default_rng(0).integers(0, len(ratios), (NUM_RESAMPLES, len(ratios)))
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(np.median(ratios[draws], axis=1), [tail, 100 - tail])
    return Interval(float(np.median(ratios)), float(low), float(high), len(ratios))


def tables(results: Mapping[str, Any]) -> list[Table]:
    """Plain decoding by way; passes by width."""
    title = f"{results['target']}, {results['dtype']}, {results['hardware']['cpu']}"
    plain = Table("way", "tok/s", "over generate", "equal texts", title=f"plain decoding: {title}")
    for name, row in results["plain"].items():
        equal = f"{row['equal_texts']} of {results['rounds']}"
        rate = f"{row['tokens_per_second']:.1f}"
        plain.add_row(name, rate, str(Interval(**row["over_generate"])), equal)
    passes = Table("target", *(f"{w} wide" for w in WIDTHS), "6 over 1", title="one pass, ms")
    for name, row in results["passes"].items():
        times = [f"{row[str(width)]['milliseconds']:.1f}" for width in WIDTHS]
        passes.add_row(name, *times, str(Interval(**row["6"]["over_one"])))
    return [plain, passes]


def _load(name: str, dtype: str, device: str, backend: str, exactness: str) -> Any:
    return resolve_target(
        name, tokenizer=None, device=device, dtype=dtype, backend=backend, exactness=exactness
    )


def main(arguments: Sequence[str] | None = None) -> None:
    of_target = "folder or name of a causal LM of the Llama family"
    parser = command(__doc__, of_target, dtype="bfloat16", device="cpu")
    parser.add_argument("--exactness", nargs="+", default=["law", "bitwise"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--context-tokens", type=int, default=128)
    given = vars(parser.parse_args(arguments))
    out = given.pop("out")
    show(*tables(told(compare(given.pop("target"), **given), out)))


if __name__ == "__main__":
    main()

"""Suite batch: the same requests one by one and side by side, prompts of unequal length.

All requests are handed over at once and decoded so many at a time, the next one joining where one
has ended. At each batch size arms take turns in every round. Tokens per second are of all texts,
over the whole calls less the seconds that reading prompts took. A text must be the one that it is
alone.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from decode import SpeculativeDecoder
from decode.clock import Clock
from decode.results import ratio
from pipeline.progress import progress
from pipeline.scores import first_difference
from pipeline.wallclock import PLAIN, rotated

log = logging.getLogger(__name__)

WARM_UP_TOKENS = 8


def batch_suite(
    makers: Mapping[str, Callable[[int], SpeculativeDecoder]],  # of decoders of so many rows
    prompts: Sequence[list[int]],
    batch_sizes: Sequence[int],
    max_new_tokens: int,
    rounds: int,
    clock: Clock,
    gap: Callable[[list[int]], float],  # between the two best logits after these tokens
) -> dict[str, Any]:
    """Rows by arm and batch size; one that fails is said and left out."""
    rows: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    texts: dict[tuple[str, int], list[list[int]]] = {}
    with progress("batch", len(makers) * len(batch_sizes) * rounds, "calls") as meter:
        for size in batch_sizes:
            runs = {name: _Run(partial(make, size), prompts, size) for name, make in makers.items()}
            for turn in range(rounds):
                for name in rotated(list(makers), turn):
                    if name in runs:
                        try:
                            runs[name].go_on(max_new_tokens, clock)
                        except Exception as error:
                            del runs[name]
                            failures[f"{name}, {size} rows"] = f"{type(error).__name__}: {error}"
                            log.warning("%s with %d rows failed: %s", name, size, error)
                    meter.advance()
            for name, run in runs.items():
                rows.append({"arm": name, **run.row()})
                texts[name, size] = run.texts
    for row in rows:
        _compare(row, rows, texts, batch_sizes[0])
    return {
        "rows": rows,
        "differences": differences(texts, prompts, batch_sizes[0], gap),
        "prompt_lengths": [len(prompt) for prompt in prompts],
        "rounds": rounds,
        "failures": failures,
        "metrics": {
            **{f"{row['arm']}/{row['batch']}": row["tokens_per_second"] for row in rows},
            "num_different": sum(
                row["num_texts"] - row["equal_to_alone"]
                for row in rows
                if row["equal_to_alone"] is not None
            ),
            "num_failed": len(failures),
        },
    }


class _Run:
    """One arm at one batch size, over its rounds."""

    def __init__(
        self, make: Callable[[], SpeculativeDecoder], prompts: Sequence[list[int]], size: int
    ) -> None:
        self.make, self.prompts, self.size = make, prompts, size
        self.decoder: SpeculativeDecoder | None = None
        self.texts: list[list[int]] = []  # of the last round
        self.tokens, self.seconds, self.prefill = 0, 0.0, 0.0

    def go_on(self, max_new_tokens: int, clock: Clock) -> None:
        """One more round, after a warm-up before the first."""
        if self.decoder is None:
            self.decoder = self.make()
            warm_up = min(WARM_UP_TOKENS, max_new_tokens)
            self.decoder.generate(list(self.prompts[: self.size]), warm_up)
        start = clock.now()
        done = self.decoder.generate(list(self.prompts), max_new_tokens)
        spent = clock.now() - start
        if self.decoder.pool.dropped:
            raise ValueError(f"a drafter failed: {self.decoder.pool.dropped}")
        prefill = sum(metrics.prefill_seconds for metrics in done.metrics)
        self.texts = done.token_ids
        self.tokens += sum(len(ids) for ids in done.token_ids)
        self.seconds += spent - prefill
        self.prefill += prefill

    def row(self) -> dict[str, Any]:
        return {
            "batch": self.size,
            "num_texts": len(self.prompts),
            "num_tokens": self.tokens,
            "seconds": self.seconds,
            "prefill_seconds": self.prefill,
            "tokens_per_second": ratio(self.tokens, self.seconds),
        }


def _compare(
    row: dict[str, Any],
    rows: Sequence[Mapping[str, Any]],
    texts: Mapping[tuple[str, int], list[list[int]]],
    smallest: int,
) -> None:
    """Add what a row is beside the smallest batch of its arm, and beside plain decoding there."""
    ours = texts[row["arm"], row["batch"]]
    by_key = {(other["arm"], other["batch"]): other for other in rows}
    for name, key in (("alone", (row["arm"], smallest)), ("plain", (PLAIN, row["batch"]))):
        base = texts.get(key)
        row[f"equal_to_{name}"] = None if base is None else _equal(ours, base)
        known = by_key.get(key)
        rate = known["tokens_per_second"] if known else 0.0
        row[f"over_{name}"] = ratio(row["tokens_per_second"], rate)


def differences(
    texts: Mapping[tuple[str, int], list[list[int]]],
    prompts: Sequence[list[int]],
    smallest: int,
    gap: Callable[[list[int]], float],
) -> list[dict[str, Any]]:
    """Where texts part from those of the smallest batch, and how near a tie that was."""
    cases = []
    for (name, size), written in texts.items():
        for number, (ours, alone) in enumerate(
            zip(written, texts.get((name, smallest), []), strict=False)
        ):
            place = first_difference(ours, alone)
            if place is not None:
                case = {"arm": name, "batch": size, "request": number, "position": place}
                cases.append({**case, "gap": gap([*prompts[number], *alone[:place]])})
    return cases


def _equal(ours: Sequence[list[int]], base: Sequence[list[int]]) -> int:
    return sum(a == b for a, b in zip(ours, base, strict=True))

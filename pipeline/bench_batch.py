"""Suite batch: the same requests one by one and side by side, prompts of unequal length.

All requests are handed over at once and decoded so many at a time, the next one joining where one
has ended. Tokens per second are of all texts, over the whole call less the seconds that reading
prompts took. A text must be the one that it is alone.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from decode import SpeculativeDecoder
from decode.clock import Clock
from decode.results import ratio
from pipeline.progress import progress
from pipeline.scores import first_difference
from pipeline.wallclock import PLAIN

log = logging.getLogger(__name__)

WARM_UP_TOKENS = 8


def batch_suite(
    makers: Mapping[str, Callable[[int], SpeculativeDecoder]],  # of decoders of so many rows
    prompts: Sequence[list[int]],
    batch_sizes: Sequence[int],
    max_new_tokens: int,
    clock: Clock,
    gap: Callable[[list[int]], float],  # between the two best logits after these tokens
) -> dict[str, Any]:
    """Rows by arm and batch size; one that fails is said and left out."""
    rows: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    texts: dict[tuple[str, int], list[list[int]]] = {}
    with progress("batch", len(makers) * len(batch_sizes), "sizes") as meter:
        for size in batch_sizes:
            for name, make in makers.items():
                try:
                    row, written = _one(make(size), prompts, size, max_new_tokens, clock)
                except Exception as error:
                    failures[f"{name}, {size} rows"] = f"{type(error).__name__}: {error}"
                    log.warning("%s with %d rows failed and is left out: %s", name, size, error)
                else:
                    rows.append({"arm": name, **row})
                    texts[name, size] = written
                meter.advance()
    for row in rows:
        _compare(row, rows, texts, batch_sizes[0])
    return {
        "rows": rows,
        "differences": differences(texts, prompts, batch_sizes[0], gap),
        "prompt_lengths": [len(prompt) for prompt in prompts],
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


def _one(
    decoder: SpeculativeDecoder,
    prompts: Sequence[list[int]],
    size: int,
    max_new_tokens: int,
    clock: Clock,
) -> tuple[dict[str, Any], list[list[int]]]:
    decoder.generate(list(prompts[:size]), min(WARM_UP_TOKENS, max_new_tokens))
    start = clock.now()
    done = decoder.generate(list(prompts), max_new_tokens)
    spent = clock.now() - start
    if decoder.pool.dropped:
        raise ValueError(f"a drafter failed: {decoder.pool.dropped}")
    prefill = sum(metrics.prefill_seconds for metrics in done.metrics)
    tokens = sum(len(ids) for ids in done.token_ids)
    row = {
        "batch": size,
        "num_texts": len(prompts),
        "num_tokens": tokens,
        "seconds": spent - prefill,
        "prefill_seconds": prefill,
        "tokens_per_second": ratio(tokens, spent - prefill),
    }
    return row, done.token_ids


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

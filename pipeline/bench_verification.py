"""How fast verification is where it matters most, how fast its kernels are, and whether they agree.

Calls are played in turn inside a CUDA graph, their parameters on the device, each call with draws
of its own, so that drafts are kept and rejected as they come. At batch 64 the logits of all calls
exceed the cache several times over. The share of bandwidth counts every logit in use once.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from kernels import overlap, verify
from kernels.reference import verify as reference
from pipeline.bench_compiling import Job, prepare
from pipeline.bench_kernels import (
    Call,
    allowed,
    copy_bandwidth,
    make_call,
    microseconds,
    on_device,
    run,
)

log = logging.getLogger(__name__)

VOCAB, NUM_DRAFT = 151_936, 4
CASES = ((1, "temperature"), (1, "all rules"), (64, "temperature"), (64, "all rules"))
TURNS = {1: 16, 64: 3}  # calls in turn; 64 rows in three sets are 525 MB


def calls_of(batch: int, mode: str, turns: int | None = None) -> list[Call]:
    """Calls in turn, each with logits and draws of its own, all on the device."""
    make = partial(make_call, VOCAB, NUM_DRAFT, batch, torch.bfloat16, mode)
    return [on_device(make(seed=seed)) for seed in range(turns or TURNS[batch])]


def headline(out: Path) -> dict[str, Any]:
    """Microseconds of a verification and of its kernels."""
    found: dict[str, Any] = {"copy_bandwidth": copy_bandwidth(), "cases": []}
    prepare([Job(partial(calls_of, 1, mode, 1)) for mode in ("temperature", "all rules")])
    for batch, mode in CASES:
        calls = calls_of(batch, mode)
        spent = [microseconds(calls, mode, None) for _ in range(3)]
        kept = [run(verify.verify, call, check=False).num_accepted for call in calls]
        share = num_bytes(calls[0]) / (median(spent) * 1e-6) / found["copy_bandwidth"]
        row = {
            "batch": batch,
            "mode": mode,
            "overlap": overlap.mode_in_use(),
            "microseconds": round(median(spent), 2),
            "readings": [round(value, 2) for value in spent],
            "bandwidth_share": round(share, 3),
            "accepted": round(mean(float(n.double().mean()) for n in kept), 2),
            "kernels": kernel_times(calls),
        }
        found["cases"].append(row)
        (out / "headline.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
        log.info("%s", line(row))
    return found


def num_bytes(call: Call) -> int:
    """Bytes of the logits in use, once."""
    logits = [call["target_logits"], call["draft_logits"]]
    return sum(x.numel() * x.element_size() for x in logits if x is not None)


def kernel_times(calls: Sequence[Call]) -> dict[str, float]:
    """Median device microseconds of each kernel, by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for call in [*calls, *calls]:
            run(verify.verify, call, check=False)
        torch.cuda.synchronize()
    spent = defaultdict(list)
    for event in profile.events() or ():
        if event.name.endswith("_kernel"):
            spent[event.name].append(event.time_range.elapsed_us())
    return {name: round(median(times), 2) for name, times in spent.items()}


SHAPES = ((7, torch.float32), (1000, torch.float16), (VOCAB, torch.bfloat16))
ROWS = 16  # of a call
KINDS = ("temperature", "greedy", "lookup", "all rules", "nearly equal")  # of what is compiled


def agreement(out: Path, shapes: Sequence[tuple[int, torch.dtype]] = SHAPES) -> dict[str, Any]:
    """Rows compared with the float64 specification, those that differ, and those not allowed to."""
    counts: dict[str, Any] = {"rows": 0, "rejected": 0, "differ": 0, "wrong": 0, "which": []}
    prepare([Job(partial(named_call, *shape, name)) for shape in shapes for name in KINDS])
    for vocab, dtype in shapes:
        for name, call in hard_calls(vocab, dtype):
            call = _alike(call)
            want, got = run(reference, call), run(verify.verify, call)
            differ = (want.token_ids != got.token_ids).any(-1).nonzero()[:, 0].tolist()
            bad = [row for row in differ if not allowed(call, want, got, row)]
            counts["rows"] += len(want.num_accepted)
            counts["rejected"] += int((want.num_accepted < NUM_DRAFT).sum())
            counts["differ"] += len(differ)
            counts["wrong"] += len(bad)
            counts["which"] += [f"V={vocab} {dtype} {name}: row {row}" for row in bad]
        (out / "agreement.json").write_text(json.dumps(counts, indent=1), encoding="utf-8")
        log.info("up to V=%d, %s: %s", vocab, dtype, counts)
    return counts


def named_call(vocab: int, dtype: torch.dtype, name: str) -> list[Call]:
    """The hard call of that name."""
    return [_alike(next(call for given, call in hard_calls(vocab, dtype) if given == name))]


def _alike(call: Call) -> Call:
    """The call with a value for every rule where it has one, so that few kernels are compiled."""
    if not {"top_k", "top_p", "min_p"} & call.keys():
        return call
    batch, device = len(call["temperature"]), call["target_logits"].device
    neutral = {
        "top_k": torch.zeros(batch, dtype=torch.int64),
        "top_p": torch.ones(batch, dtype=torch.float64),
        "min_p": torch.zeros(batch, dtype=torch.float64),
        "repetition_penalty": torch.ones(batch),
        "seen_token_counts": torch.zeros(
            call["target_logits"].shape[::2], dtype=torch.int32, device=device
        ),
    }
    return on_device(neutral | call)


def hard_calls(vocab: int, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """Calls of ROWS rows: what is common, and what is hard to get right."""
    batch = ROWS
    for mode, seed in product(("temperature", "greedy", "lookup", "all rules"), range(2)):
        yield mode, make_call(vocab, NUM_DRAFT, batch, dtype, mode, seed=seed)
    plain = make_call(vocab, NUM_DRAFT, batch, dtype, "temperature", seed=9)
    for rules in ({"top_p": 0.95}, {"top_k": 300}, {"min_p": 1e-4}, {"top_k": 40, "top_p": 0.5}):
        made = {
            name: torch.full((batch,), value, dtype=None if name == "top_k" else torch.float64)
            for name, value in rules.items()
        }
        yield f"{rules}", plain | made
        yield f"{rules}, sharp", plain | made | {"temperature": 0.2 * plain["temperature"]}
    yield "ties", plain | {"target_logits": plain["target_logits"].round(), "top_p": made["top_p"]}
    yield (
        "one value",
        plain
        | {
            "target_logits": torch.zeros_like(plain["target_logits"]),
            "top_p": made["top_p"],
        },
    )
    yield "nearly equal", nearly_equal(plain, 1e-4)
    yield "equal but for a hair", nearly_equal(plain, 1e-6)
    yield "equal", nearly_equal(plain, 0.0)


def nearly_equal(call: Call, noise: float) -> Call:
    """The target for a drafter, float32 logits a little off; the first draft is rejected."""
    target = call["target_logits"].clone()
    draft = target[:, :-1].float()
    generator = torch.Generator(draft.device).manual_seed(1)
    wobble: Tensor = torch.randn(draft.shape, device=draft.device, generator=generator)
    draft = draft * (1 + noise * wobble)
    rows, first = torch.arange(len(target), device=draft.device), call["draft_token_ids"][:, 0]
    target[rows, 0, first] = -torch.inf
    draft[rows, 0, first] = -torch.inf if noise == 0 else -20.0
    return call | {"target_logits": target, "draft_logits": draft}


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """What headline() found, for people."""
    yield f"copy {found['copy_bandwidth'] / 1e12:.2f} TB/s, V={VOCAB}, K={NUM_DRAFT}, bfloat16"
    yield from map(line, found["cases"])


def line(row: Mapping[str, Any]) -> str:
    """One case of headline()."""
    kernels = ", ".join(f"{name} {spent}" for name, spent in row["kernels"].items())
    return (
        f"B={row['batch']} {row['mode']}, overlap {row['overlap']}: {row['microseconds']} us "
        f"{row['readings']}, {100 * row['bandwidth_share']:.0f}% of copy bandwidth, "
        f"{row['accepted']} accepted; {kernels}"
    )

"""How fast verification is where it matters most, how fast its kernels are, and whether they agree.

Calls are played in turn inside a CUDA graph, their parameters on the device, each call with draws
of its own, so that drafts are kept and rejected as they come. At batch 64 the logits of all calls
exceed the cache several times over. The share of bandwidth counts every logit in use once.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

from kernels import overlap, stats, truncate, verify
from kernels.launching import Launch, collected, compile_all
from kernels.reference import verify as reference
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
COMPILERS = 12  # threads
CONSTANTS = {"BLOCK": verify, "WARPS": verify, "TILE": verify, "TILE_WARPS": verify,
             "TILE_REGISTERS": verify, "PROGRAMS": verify, "RULE_WARPS": stats,
             "RULE_REGISTERS": stats, "GROUPS_READ": truncate, "READ": truncate,
             "CUT_WARPS": truncate, "CUT_REGISTERS": truncate}  # fmt: skip
SPLITS = [{"BLOCK": 8192, "WARPS": warps} for warps in (4, 8, 16)]
TILES = [
    {"TILE": tile, "TILE_WARPS": warps, "TILE_REGISTERS": registers, "PROGRAMS": programs}
    for tile, warps, registers in (
        (1024, 4, 128), (1024, 8, 64), (1024, 8, 80), (1024, 8, 128), (2048, 8, 80),
        (2048, 8, 128), (2048, 16, 64),
    )
    for programs in (264, 384, 528)
]  # fmt: skip
CUTS = [
    *({"RULE_WARPS": w, "RULE_REGISTERS": r} for w, r in ((8, 128), (16, 64), (16, 128), (32, 64))),
    *({"CUT_WARPS": w, "CUT_REGISTERS": r} for w, r in ((8, 128), (16, 64), (16, 128))),
    *({"GROUPS_READ": groups, "READ": read} for groups, read in ((64, 4096), (128, 2048))),
    {"TILE_WARPS": 4, "TILE_REGISTERS": 128},
]


def calls_of(batch: int, mode: str) -> list[Call]:
    """Calls in turn, each with logits and draws of its own, all on the device."""
    make = partial(make_call, VOCAB, NUM_DRAFT, batch, torch.bfloat16, mode)
    return [on_device(make(seed=seed)) for seed in range(TURNS[batch])]


def compiled(calls: Sequence[Call]) -> None:
    """Compile what these calls launch, on several cores."""
    with collected() as launches:
        for call in calls:
            run(verify.verify, call, check=False)
    compile_all(launches, torch.device("cuda"), COMPILERS)


def headline() -> dict[str, Any]:
    """Microseconds of a verification and of its kernels, with and without early starts."""
    bandwidth = copy_bandwidth()
    found = []
    for batch, mode in CASES:
        calls = calls_of(batch, mode)
        for early in ("off", "launch"):
            overlap.use(early)
            compiled(calls[:1])
            spent = [microseconds(calls, mode, None) for _ in range(3)]
            kept = [run(verify.verify, call, check=False).num_accepted for call in calls]
            found.append(
                {
                    "batch": batch,
                    "mode": mode,
                    "overlap": early,
                    "microseconds": round(median(spent), 2),
                    "readings": [round(value, 2) for value in spent],
                    "bandwidth_share": round(
                        num_bytes(calls[0]) / (median(spent) * 1e-6) / bandwidth, 3
                    ),
                    "accepted": round(mean(float(n.double().mean()) for n in kept), 2),
                    "kernels": kernel_times(calls),
                }
            )
        overlap.use("off")
    return {"copy_bandwidth": bandwidth, "cases": found}


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


@contextmanager
def constants(values: Mapping[str, int]) -> Iterator[None]:
    """Other block sizes, warps and programs, for as long as this lasts."""
    before = {name: getattr(CONSTANTS[name], name) for name in values}
    for name, value in values.items():
        setattr(CONSTANTS[name], name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(CONSTANTS[name], name, value)


def sweep() -> list[dict[str, Any]]:
    """Microseconds of every choice of sizes, one kernel's varied at a time."""
    choices_of = {"temperature": [*SPLITS, *TILES], "all rules": CUTS}
    found = {case: calls_of(*case) for case in CASES}
    # Two batches share their kernels; all are compiled side by side before anything is timed.
    warm = [
        launch
        for (batch, mode), calls in found.items()
        for choice in choices_of[mode]
        for launch in _launches(calls[:1], choice)
        if batch == 1
    ]
    with suppress(RuntimeError, TritonError):  # a choice that is refused says so below
        compile_all(warm, torch.device("cuda"), COMPILERS)
    rows: list[dict[str, Any]] = []
    for (batch, mode), calls in found.items():
        for choice in choices_of[mode]:
            with constants(choice):
                rows.append({"batch": batch, "mode": mode, **choice, **_timed(calls, mode)})
    return rows


def _launches(calls: Sequence[Call], choice: Mapping[str, int]) -> list[Launch]:
    with constants(choice), collected() as launches:
        for call in calls:
            run(verify.verify, call, check=False)
    return launches


def _timed(calls: Sequence[Call], mode: str) -> dict[str, Any]:
    try:
        compiled(calls[:1])
        return {"microseconds": round(microseconds(list(calls), mode, None), 2)}
    except (RuntimeError, TritonError) as error:  # sizes that are refused are an answer too
        return {"microseconds": None, "refused": str(error).strip().splitlines()[0][:200]}


SHAPES = ((7, torch.float32), (1000, torch.bfloat16), (VOCAB, torch.bfloat16),
          (VOCAB, torch.float32))  # fmt: skip


def agreement(shapes: Sequence[tuple[int, torch.dtype]] = SHAPES) -> dict[str, Any]:
    """Rows compared with the float64 specification, those that differ, and those not allowed to."""
    counts = {"rows": 0, "differ": 0, "wrong": 0}
    wrong: list[str] = []
    calls = {
        (vocab, dtype, name): _alike(call)
        for vocab, dtype in shapes
        for name, call in hard_calls(vocab, dtype)
    }
    compiled(list(calls.values()))
    for (vocab, dtype, name), call in calls.items():
        want, got = run(reference, call), run(verify.verify, call)
        differ = (want.token_ids != got.token_ids).any(-1).nonzero()[:, 0].tolist()
        bad = [row for row in differ if not allowed(call, want, got, row)]
        counts["rows"] += len(want.num_accepted)
        counts["differ"] += len(differ)
        counts["wrong"] += len(bad)
        wrong += [f"V={vocab} {dtype} {name}: row {row}" for row in bad]
    return {**counts, "which": wrong[:20]}


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
    """Calls of 16 rows: what is common, and what is hard to get right."""
    batch = 16
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
    for row in found["cases"]:
        kernels = ", ".join(f"{name} {spent}" for name, spent in row["kernels"].items())
        yield (
            f"B={row['batch']} {row['mode']}, overlap {row['overlap']}: {row['microseconds']} us "
            f"{row['readings']}, {100 * row['bandwidth_share']:.0f}% of copy bandwidth, "
            f"{row['accepted']} accepted; {kernels}"
        )


def best_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What sweep() found, fastest first among those that vary the same sizes."""
    measured = {"batch", "mode", "microseconds", "refused"}

    def place(row: Mapping[str, Any]) -> tuple[Any, ...]:
        varied = sorted(row.keys() - measured)
        return row["batch"], row["mode"], varied, row["microseconds"] or float("inf")

    for row in sorted(rows, key=place):
        yield " ".join(f"{name}={value}" for name, value in row.items())


def said(name: str, found: Any) -> list[str]:
    """What a part found, for people."""
    if name == "headline":
        return list(lines(found))
    return list(best_lines(found)) if name == "sweep" else [str(found)]

"""The Triton verification against its reference on a GPU: equality over a sweep, then microseconds.

Needs torch and triton only: `python -m pipeline.bench_kernels --out FOLDER`, or
`stage=benchmark stages.benchmark.suite=kernels`. With --headline, --agreement or --sweep only that
part of pipeline/bench_verification.py runs, in about a minute.
"""

import argparse
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from kernels.reference import processed_probs
from kernels.reference import verify as reference
from kernels.types import Verification
from kernels.verify import verify

log = logging.getLogger(__name__)

VOCABULARIES = (7, 1000, 32_000, 49_152, 151_936, 262_144)
DRAFTS = range(1, 9)
BATCHES = (1, 3, 64)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MODES = ("temperature", "greedy", "lookup", "all rules")
KNOWN = "greedy, known"  # temperature stays on the host, which so knows of greed
KNOWN_EAGER = "greedy, known, eager"
SLACK = 1e-6  # what the contract allows between two orders of summation
ROTATED_BYTES = 300e6  # inputs in turn, several times the cache, so that logits come from memory

PARTS = {
    "headline": "the figures that matter most, and the microseconds of each kernel",
    "agreement": "hard cases against the float64 specification",
    "sweep": "block sizes, warps and programs, one kernel's at a time",
}

Call = dict[str, Any]


def make_call(
    vocab: int, num_draft: int, batch: int, dtype: torch.dtype, mode: str, *, seed: int = 0
) -> Call:
    """Arguments of one verification: a drafter near the target, drafts drawn from its law."""
    seed += hash((vocab, num_draft, batch)) % 2**31
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(seed)

    def normal(rows: int) -> Tensor:
        return torch.randn(batch, rows, vocab, device=device, generator=generator)

    target = 2.5 * normal(num_draft + 1)
    draft = (0.8 * target[:, :num_draft] + 0.7 * normal(num_draft)).to(dtype)
    law = draft.float().softmax(-1).reshape(-1, vocab)
    ids = torch.multinomial(law, 1, generator=generator).view(batch, num_draft)
    greedy = mode.startswith("greedy")
    call: Call = {
        "target_logits": target.to(dtype),
        "draft_token_ids": draft.argmax(-1) if greedy else ids,
        "draft_logits": None if mode == "lookup" else draft,
        "temperature": torch.full((batch,), 0.0 if greedy else 0.9, dtype=torch.float64),
        "uniforms": torch.rand(
            batch, num_draft + 1, dtype=torch.float64, device=device, generator=generator
        ),
    }
    if mode == "all rules":
        seen = torch.rand(batch, vocab, device=device, generator=generator) < 0.01
        call |= {
            "top_k": torch.full((batch,), 50),
            "top_p": torch.full((batch,), 0.95),
            "min_p": torch.full((batch,), 0.01),
            "repetition_penalty": torch.full((batch,), 1.1),
            "seen_token_counts": seen.int(),
        }
    return call


def run(function: Callable[..., Verification], call: Call, **more: Any) -> Verification:
    rest = dict(call)
    first = [rest.pop(name) for name in ("target_logits", "draft_token_ids", "draft_logits")]
    return function(*first, **rest, **more)


def check(vocab: int, dtype: torch.dtype) -> dict[str, Any]:
    """Rows compared, rows that differ, and those of them that the contract does not allow."""
    counts = {"rows": 0, "differ": 0, "wrong": 0}
    largest = 0.0
    for num_draft, batch, mode in product(DRAFTS, BATCHES, MODES):
        call = make_call(vocab, num_draft, batch, dtype, mode)
        want, got = run(reference, call), run(verify, call)
        differ = (want.token_ids != got.token_ids).any(-1).nonzero()[:, 0].tolist()
        counts["rows"] += batch
        counts["differ"] += len(differ)
        counts["wrong"] += sum(not allowed(call, want, got, row) for row in differ)
        same = torch.ones(batch, dtype=torch.bool, device="cuda")
        same[differ] = False
        gap = (want.target_logprobs - got.target_logprobs)[same].abs()
        largest = max(largest, float(gap.max()) if gap.numel() else 0.0)
    return {"vocab": vocab, "dtype": str(dtype), **counts, "largest_logprob_gap": largest}


def allowed(call: Call, want: Verification, got: Verification, row: int) -> bool:
    """True where rounding alone explains another answer: u q next to p, or u next to a CDF step."""
    if float(call["temperature"][row]) == 0:
        return False
    position = int(min(want.num_accepted[row], got.num_accepted[row]))
    target = _law(call, "target_logits", row, position)
    token_ids = call["draft_token_ids"][row]
    draft = torch.zeros_like(target)
    if position < len(token_ids):
        if call["draft_logits"] is None:
            draft[token_ids[position]] = 1
        else:
            draft = _law(call, "draft_logits", row, position)
    if want.num_accepted[row] != got.num_accepted[row]:
        picked = token_ids[position]
        p, bound = float(target[picked]), float(call["uniforms"][row, position] * draft[picked])
        return abs(bound - p) <= SLACK * max(p, bound)
    residual = (target - draft).clamp(min=0)
    residual = residual if float(residual.sum()) > 1e-12 else target
    cdf = residual.cumsum(-1) / residual.sum()
    token = int(got.token_ids[row, position])
    above, uniform = float(cdf[token]), float(call["uniforms"][row, -1])
    below = float(cdf[token - 1]) if token else 0.0
    return float(residual[token]) > 0 and below - SLACK <= uniform <= above + SLACK


def _law(call: Call, name: str, row: int, position: int) -> Tensor:
    rules = {
        key: call[key][row : row + 1]
        for key in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        if key in call
    }
    seen = call["seen_token_counts"][row] > 0 if "seen_token_counts" in call else None
    if seen is not None:
        seen[call["draft_token_ids"][row, :position]] = True
        seen = seen[None]
    return processed_probs(call[name][row, position][None], **rules, seen=seen)[0]


def microseconds(calls: list[Call], mode: str, pinned: bool | None) -> float:
    """Median time of one verification over five rounds that take every call in turn.

    A CUDA graph holds the round, with parameters on the device: greedy calls then run kernels that
    could sample. Where the temperature is on the host they run shorter ones, and the round is a
    graph only where `pinned` names a memory that capture accepts.
    """
    eager = mode == KNOWN_EAGER or (mode == KNOWN and pinned is None)
    if mode == KNOWN and pinned:
        calls = [call | {"temperature": call["temperature"].pin_memory()} for call in calls]
    elif mode not in (KNOWN, KNOWN_EAGER):
        calls = [on_device(call) for call in calls]
    play = _each(calls)
    play()
    torch.cuda.synchronize()
    if not eager:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            play()
        play = graph.replay
    times = []
    for _ in range(6):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        play()
        stop.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(stop) / len(calls))
    return median(times[1:])


def _each(calls: list[Call]) -> Callable[[], None]:
    def play() -> None:
        for call in calls:
            run(verify, call, check=False)

    return play


def on_device(call: Call) -> Call:
    """Everything on the device, since a graph may copy nothing from pageable memory."""
    return {k: v.cuda() if isinstance(v, Tensor) else v for k, v in call.items()}


def capture_refusal(pinned: bool) -> str | None:
    """Why a graph refuses a temperature on the host, or None; for a process of its own."""
    call = make_call(1000, 4, 3, torch.bfloat16, KNOWN)
    try:
        microseconds([call], KNOWN, pinned)
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]
    return None


def launches(mode: str) -> dict[str, int]:
    """Kernels that the device ran for one bfloat16 call, by name."""
    call = make_call(1000, 4, 3, torch.bfloat16, mode)
    call = call if mode == KNOWN else on_device(call)
    run(verify, call, check=False)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(verify, call, check=False)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() or ()]
    return dict(Counter(name for name in names if name.endswith("_kernel")))


def copy_bandwidth() -> float:
    """Bytes per second of a large copy on this device, read and written."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return 2 * source.numel() / median(times[2:])


def time_case(
    vocab: int,
    num_draft: int,
    batch: int,
    dtype: torch.dtype,
    mode: str,
    *,
    bandwidth: float,
    pinned: bool | None,
) -> dict[str, Any]:
    """One line of the table; the share counts each logit in use once."""
    one = make_call(vocab, num_draft, batch, dtype, mode)
    logits = [one["target_logits"], one["draft_logits"]]
    num_bytes = sum(x.numel() * x.element_size() for x in logits if x is not None)
    turns = max(1, min(64, round(ROTATED_BYTES / num_bytes))) if batch == 64 else 8
    fresh = [
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in one.items()} for _ in range(turns)
    ]
    spent = microseconds(fresh, mode, pinned)
    return {
        "vocab": vocab,
        "num_draft_tokens": num_draft,
        "batch": batch,
        "dtype": str(dtype).removeprefix("torch."),
        "mode": mode,
        "microseconds": round(spent, 1),
        "bandwidth_share": round(num_bytes / (spent * 1e-6) / bandwidth, 3),
    }


def timed_cases() -> list[tuple[int, int, int, torch.dtype, str]]:
    """Every shape and dtype; what takes milliseconds, or waits for the host, at two lengths."""
    every = product(VOCABULARIES, DRAFTS, BATCHES, DTYPES, (*MODES, KNOWN, KNOWN_EAGER))
    return [case for case in every if not _is_slow(case) or case[1] in (4, 8)]


def _is_slow(case: tuple[int, int, int, torch.dtype, str]) -> bool:
    return case[4] == KNOWN_EAGER or (case[4], case[2]) == ("all rules", 64)


def kernel_suite(out: Path, workers: int | None = None) -> dict[str, Any]:
    """Checks every case, times some, and writes kernels.json. Raises ValueError without a GPU."""
    if not torch.cuda.is_available():
        raise ValueError("the kernels suite needs a CUDA device; run it on a machine that has one")
    jobs = list(product(VOCABULARIES, DTYPES))
    # Compiling takes longer than checking, and every process compiles on its own core.
    workers = workers or min(len(jobs), os.cpu_count() or 1)
    spawn = get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn, max_tasks_per_child=1) as pool:
        refusals = dict(zip((True, False), pool.map(capture_refusal, (True, False)), strict=True))
        modes = (*MODES, KNOWN)
        counts = dict(zip(modes, pool.map(launches, modes), strict=True))
    pinned = next((memory for memory, refusal in refusals.items() if refusal is None), None)
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        checks = list(pool.map(check, *zip(*jobs, strict=True)))
    bandwidth = copy_bandwidth()
    times = [time_case(*case, bandwidth=bandwidth, pinned=pinned) for case in timed_cases()]
    results = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_bandwidth": bandwidth,
        "launches": counts,
        "capture_refusals": {"pinned": refusals[True], "pageable": refusals[False]},
        "checks": checks,
        "times": times,
        "metrics": {
            "rows_compared": sum(row["rows"] for row in checks),
            "rows_wrong": sum(row["wrong"] for row in checks),
        },
    }
    (out / "kernels.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    return results


def table(results: dict[str, Any]) -> str:
    """Microseconds and share of copy bandwidth, one line a shape."""
    lines = [f"{results['metrics']}  copy {results['copy_bandwidth'] / 1e12:.2f} TB/s"]
    rows = [r for r in results["times"] if r["dtype"] == "bfloat16"]
    rows = [r for r in rows if r["num_draft_tokens"] in (4, 8)]
    shapes = {(r["vocab"], r["num_draft_tokens"], r["batch"]) for r in rows}
    for shape in sorted(shapes):
        found = [r for r in rows if (r["vocab"], r["num_draft_tokens"], r["batch"]) == shape]
        cells = [
            f"{r['mode']} {r['microseconds']:.1f} us ({100 * r['bandwidth_share']:.0f}%)"
            for r in found
        ]
        lines.append(f"V={shape[0]} K={shape[1]} B={shape[2]}: " + ", ".join(cells))
    return "\n".join(lines)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    for name, does in PARTS.items():
        parser.add_argument(f"--{name}", action="store_true", help=does)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    asked = [name for name in PARTS if getattr(given, name)]
    if asked:
        verification_parts(given.out, asked)
    else:
        log.info(table(kernel_suite(given.out)))


def verification_parts(out: Path, asked: list[str]) -> None:
    """Run the parts named, log what they found and write it to FOLDER/NAME.json."""
    # Made of this module's parts.
    from pipeline.bench_sizes import best_lines, sweep
    from pipeline.bench_verification import agreement, headline, lines

    parts: dict[str, tuple[Callable[[Path], Any], Callable[[Any], Iterable[str]]]] = {
        "headline": (headline, lines),
        "agreement": (agreement, lambda found: [str(found)]),
        "sweep": (sweep, best_lines),
    }
    for name in asked:
        start = time.perf_counter()
        measure, say = parts[name]
        found = measure(out)
        (out / f"{name}.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
        log.info("%s, %.0f s\n%s", name, time.perf_counter() - start, "\n".join(say(found)))


if __name__ == "__main__":
    main()

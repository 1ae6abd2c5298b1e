"""One model in the native backend's kernels: milliseconds of its passes, microseconds of their
launches, and whether a token's logits depend on what is read beside it.
"""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from decode.native.kernel_forward import KernelForward, Step
from decode.native.static_cache import StaticRow
from decode.native.target import NativeTarget
from decode.targets.loading import load_causal_lm, load_tokenizer
from pipeline.bench_sweep import replay_seconds


class Engine:
    """A model in the native backend and rows that have read some text."""

    def __init__(self, name: str, dtype: str, device: str, exactness: str) -> None:
        kind = getattr(torch, dtype)
        self.name, self.device = name, torch.device(device)
        self.tokenizer = load_tokenizer(name)
        model = load_causal_lm(name, kind).to(device)
        self.target = NativeTarget(model, self.tokenizer, name, exactness=exactness, kernels=True)
        forward = self.target._forward
        assert isinstance(forward, KernelForward)
        self.forward = forward

    def rows(self, count: int, context_tokens: int) -> list[StaticRow]:
        """Rows that have read different texts of so many tokens."""
        self.forward.cache.reserve(num_rows=count)
        rows = [self.forward.open() for _ in range(count)]
        for number, row in enumerate(rows):
            self.target.prefill(row, self.text(number, context_tokens))
        return rows

    def text(self, number: int, count: int) -> list[int]:
        """Token ids without sense, others for every number."""
        vocab = self.target.vocab_size
        return [1 + (7919 * i + 104_729 * number) % (vocab - 1) for i in range(count)]

    def pass_bytes(self, num_rows: int, context_tokens: int) -> int:
        """Weights and cache that one pass reads."""
        a = self.target.architecture
        held = [product.weight for product in self.forward.weights.products()]
        token = 2 * a.num_layers * a.num_kv_heads * a.head_dim * held[0].element_size()
        return sum(weight.nbytes for weight in held) + num_rows * context_tokens * token


def filled(engine: Engine, rows: Sequence[StaticRow], width: int) -> Step:
    """The pass in which every row reads `width` tokens."""
    step = engine.forward.step(len(rows), width)
    step.fill(rows, [engine.text(1000 + number, width) for number in range(len(rows))])
    return step


@torch.inference_mode()
def pass_times(
    engine: Engine, batches: Sequence[int], widths: Sequence[int], context: int, rounds: int
) -> list[dict[str, Any]]:
    """Seconds of one replay by batch and width; None where there is no graph to replay."""
    found = []
    rows = engine.rows(max(batches), context)
    for batch in batches:
        for width in widths:
            step = filled(engine, rows[:batch], width)
            seconds = _replayed(engine.forward, step, rounds)
            read = engine.pass_bytes(batch, context)
            found.append({"batch": batch, "width": width, "seconds": seconds, "bytes": read})
    return found


def _replayed(forward: KernelForward, step: Step, rounds: int) -> float | None:
    forward.run(step)
    captured = forward.graphs.captured((step.num_rows, step.width, True))
    if captured is None:
        return None
    return median(replay_seconds(captured.graph, inner=5) for _ in range(rounds))


@torch.inference_mode()
def kernel_times(engine: Engine, context: int, rounds: int) -> dict[str, Any]:
    """Launches of one pass of one token by name: how many, and microseconds of all of them."""
    if engine.device.type != "cuda":
        return {}
    step = filled(engine, engine.rows(1, context), 1)
    engine.forward.run(step)
    activity = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as profile:
        for _ in range(rounds):
            engine.forward.run(step)
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = defaultdict(list)
    for event in profile.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name].append(event.time_range.elapsed_us())
    return {
        name: {"launches": len(times) / rounds, "microseconds": sum(times) / rounds}
        for name, times in sorted(spent.items(), key=lambda pair: -sum(pair[1]))
    }


@torch.inference_mode()
def bit_equality(
    engine: Engine, batches: Sequence[int], widths: Sequence[int], context: int
) -> dict[str, Any]:
    """Tokens compared with what they have alone, those that differ, and the largest gap."""
    rows = engine.rows(max(batches), context)
    texts = [engine.text(1000 + number, max(widths)) for number in range(len(rows))]
    alone = [_alone(engine, row, text) for row, text in zip(rows[:4], texts[:4], strict=True)]
    found = {"compared": 0, "differ": 0, "largest_gap": 0.0, "where": []}
    for batch in batches:
        for width in widths:
            logits = engine.target.score(rows[:batch], [text[:width] for text in texts[:batch]])
            for row in rows[:batch]:
                engine.target.rollback(row, context)
            for wanted, ours in zip(alone, logits, strict=False):
                _compare(wanted[:width], ours, f"{batch} rows of {width}", found)
    return found


def _alone(engine: Engine, row: StaticRow, text: Sequence[int]) -> Tensor:
    start = row.length
    logits = torch.cat([engine.target.score([row], [[token]])[0] for token in text])
    engine.target.rollback(row, start)
    return logits


def _compare(wanted: Tensor, ours: Tensor, where: str, found: dict[str, Any]) -> None:
    differs = (wanted != ours).any(-1)
    found["compared"] += len(wanted)
    if bool(differs.any()):
        found["differ"] += int(differs.sum())
        gap = float((wanted.float() - ours.float()).abs().max())
        found["largest_gap"] = max(found["largest_gap"], gap)
        found["where"] = sorted({*found["where"], where})

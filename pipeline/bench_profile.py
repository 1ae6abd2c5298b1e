"""One whole step of the engine, kernel by kernel: what it takes, what it must move, what is over.

The engine decodes one row until its steps look alike. Then the step that it captured is replayed
(draft, score, verify, advance), the row rewound now and then so that it stays where it was. A
kernel's time is what it adds: kernels come up before the one in front has ended, and that counts
for the one in front. The floor is what the bytes that must move take at the measured copy
bandwidth.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table

from decode.clock import Clock, SystemClock
from decode.device.engine import DeviceEngine
from decode.device.ready import parts_on_device
from decode.device.rows import DeviceRow
from decode.noise import PhiloxNoise
from decode.policies.fixed import FixedPolicy
from decode.pool import Pool
from decode.resolve import resolve_drafter
from decode.stopping import Stopper
from decode.types import Drafter, Request, Sampling
from kernels.launching import Launch, collected
from kernels.overlap import mode_in_use
from pipeline.bench_command import conditions, new_table
from pipeline.bench_kernels import copy_bandwidth
from pipeline.bench_passes import Engine
from pipeline.bench_sweep import replay_seconds
from pipeline.step_times import Event, kernel_rows, step_lines, totals
from pipeline.wallclock import PLAIN

LOOKUP = "ngram"
WARM_STEPS = 8  # until a model has read the row and shapes come again
REPLAYS = 5  # behind one another, before the row is rewound
PACE_STEPS = 3  # of the engine, for each round
PERIOD = 23  # tokens after which the text repeats, so that a lookup has something to find
NOBODY = frozenset({-1})  # no token: texts end with their budget


class HeldStep:
    """The newest step of an engine with one row, to be made again and again."""

    def __init__(self, engine: DeviceEngine, row: DeviceRow) -> None:
        assert engine.steps.newest is not None
        assert row.target is not None
        self.shape = engine.steps.newest
        self._step = engine.steps.by_shape[self.shape]
        self._captured = engine.steps.graphs.captured(self.shape)
        self._state, self._slot = engine.state, row.target.slot
        self._kept = [tensor.clone() for tensor in engine.state.changes]

    @property
    def graph(self) -> Any:
        """None where there is no CUDA."""
        return None if self._captured is None else self._captured.graph

    @property
    def num_tokens(self) -> int:
        """Verified tokens of the row now."""
        return int(self._state.slots.lengths[self._slot])

    def rewind(self) -> None:
        """The row is again what it was."""
        for tensor, kept in zip(self._state.changes, self._kept, strict=True):
            tensor.copy_(kept)

    def launches(self) -> list[Launch]:
        """What the step launches, in order; nothing is launched."""
        with collected() as launches:
            self._step.compute()
        return launches


def profile_steps(
    name: str,
    *,
    dtype: str,
    device: str | None,
    exactness: str,
    drafters: Sequence[str],
    draft_length: int,
    context_tokens: int,
    rounds: int,
    make_clock: type[Clock] = SystemClock,
) -> dict[str, Any]:
    """A plain step, one with a lookup, and one with each named drafter, with their conditions."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    engine = Engine(name, dtype, device, exactness)
    engine.target.eos_token_ids = NOBODY
    bandwidth = copy_bandwidth() if device.startswith("cuda") else None
    ways: dict[str, Any] = {}
    for asked in (None, LOOKUP, *(one for one in drafters if one != LOOKUP)):
        drafter = None if asked is None else resolve_drafter(asked, engine.target)
        length = 0 if asked is None else draft_length
        way = PLAIN if asked is None else f"{Path(asked).name}, K={length}"
        ways[way] = profile_step(
            engine, drafter, length, context_tokens, rounds, bandwidth, make_clock()
        )
    return {
        **conditions(engine.target),
        "target": Path(name).name,
        "exactness": exactness,
        "overlap": mode_in_use(),
        "copy_bandwidth": bandwidth,
        "rounds": rounds,
        "steps": ways,
    }


@torch.inference_mode()
def profile_step(
    engine: Engine,
    drafter: Drafter | None,
    draft_length: int,
    context_tokens: int,
    rounds: int,
    bandwidth: float | None,
    clock: Clock,
) -> dict[str, Any]:
    """Kernels and totals of the step that one row settles on."""
    steps = WARM_STEPS + PACE_STEPS * rounds
    budget = (steps + 2 * REPLAYS) * (draft_length + 1)  # so that no step is cut short
    runner, row = _row(engine, drafter, draft_length, context_tokens, budget, clock)
    for _ in range(WARM_STEPS):
        runner.step([row])
    pace, tokens = _pace(runner, row, PACE_STEPS * rounds, clock)
    held = HeldStep(runner, row)
    launches = held.launches()
    events = _events(held, rounds)
    seen = _replay(held)
    replay = None if held.graph is None else median(_replayed(held) for _ in range(rounds))
    rows = kernel_rows(launches, events, seen, bandwidth)
    return {
        "shape": str(held.shape),
        "seen_tokens": seen,
        "tokens_per_step": tokens,
        "kernels": rows,
        "totals": totals(rows, events, replay, pace if held.graph else None),
    }


def _row(
    engine: Engine,
    drafter: Drafter | None,
    draft_length: int,
    context_tokens: int,
    budget: int,
    clock: Clock,
) -> tuple[DeviceEngine, DeviceRow]:
    """An engine of that drafter alone, and a row of it with room for all that will be asked."""
    target, most = engine.target, engine.target.max_context
    if context_tokens + budget > most:
        raise ValueError(
            f"context_tokens={context_tokens} and {budget} more do not fit the context of {most}; "
            "pass fewer, or fewer rounds"
        )
    name = "drafter"
    pool = Pool({} if drafter is None else {name: drafter}, target.vocab_size)
    found = parts_on_device(target, pool.drafters)
    if found is None or found[1]:
        raise ValueError("this drafter cannot draft on the device; name another")
    policy = None if drafter is None else FixedPolicy(name, draft_length, None)
    runner = DeviceEngine(target, pool, found[0], policy, clock, "rejection")
    for forward in (runner.forward, *(model.forward for model in runner.members.models)):
        context = forward.architecture.max_context
        forward.cache.reserve(num_tokens=min(context_tokens + budget, context))
    words = engine.text(0, PERIOD)
    prompt = [words[i % PERIOD] for i in range(context_tokens)]
    stopper = Stopper(
        tokenizer=None,
        stop=(),
        eos_token_ids=NOBODY,
        max_new_tokens=budget,
        num_prompt_tokens=context_tokens,
        max_context=most,
        follow_text=False,
    )
    request = Request("profile", context_tokens, budget, Sampling(), None)
    return runner, runner.open(request, prompt, stopper, PhiloxNoise(0))


def _pace(runner: DeviceEngine, row: DeviceRow, steps: int, clock: Clock) -> tuple[float, float]:
    """Seconds of a step as the engine makes them, host included, and tokens of each."""
    before = len(row.token_ids)
    _wait(runner)
    start = clock.now()
    for _ in range(steps):
        runner.step([row])
    _wait(runner)
    return (clock.now() - start) / steps, (len(row.token_ids) - before) / steps


def _wait(runner: DeviceEngine) -> None:
    if runner.state.device.type == "cuda":
        torch.cuda.synchronize(runner.state.device)


def _replay(held: HeldStep) -> float:
    """Tokens that the row has in the middle of a round of replays."""
    held.rewind()
    first = held.num_tokens
    for _ in range(REPLAYS if held.graph is not None else 0):
        held.graph.replay()
    return (first + held.num_tokens) / 2


def _replayed(held: HeldStep) -> float:
    held.rewind()
    return replay_seconds(held.graph, REPLAYS)


def _events(held: HeldStep, rounds: int) -> list[Event]:
    """Kernels of some replays, as the device made them."""
    if held.graph is None:
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(max(1, rounds // REPLAYS)):
            held.rewind()
            for _ in range(REPLAYS):
                held.graph.replay()
        torch.cuda.synchronize()
    return [
        Event(event.name, event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def profile_tables(results: Mapping[str, Any]) -> list[Table | str]:
    """One short table, and each step's kernels as lines."""
    title = ", ".join(str(results[key]) for key in ("target", "dtype", "exactness", "overlap"))
    names = "kernels", "between", "replay", "engine", "floor"
    table = new_table(f"us of a step: {title}", "way", *names, "tokens")
    for way, step in results["steps"].items():
        found = [step["totals"][f"{name}_microseconds"] for name in names]
        cells = ["-" if value is None else f"{value:.1f}" for value in found]
        table.add_row(way, *cells, f"{step['tokens_per_step']:.2f}")
    return [table, *profile_lines(results)]


def profile_lines(results: Mapping[str, Any]) -> list[str]:
    """Every step's kernels in plain text."""
    bandwidth = results["copy_bandwidth"]
    return [
        line
        for way, step in results["steps"].items()
        for line in ("", *step_lines(way, step, bandwidth))
    ]

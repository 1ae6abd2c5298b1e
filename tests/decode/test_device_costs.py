"""Bugs these tests would catch: a decoder on the device priced by the host's path, where every part
waits; seconds of drafting charged to verification, or the other way round; those of one shape taken
for another's; a lookup priced only where it matches; a model's reading of a fresh row forgotten;
steps timed on what the step before had emitted; shapes captured that no step has.

Clocks here are advanced by what is computed, so that figures are known.
"""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from device_drafters import CompositeDrafter, LookupDrafter, ModelDrafter, forward_by_reference
from native_models import VOCAB_SIZE, build

from decode import cost_measurement
from decode.clock import VirtualClock
from decode.cost_measurement import measure_costs, quick_costs
from decode.costs import Costs, costs_key
from decode.device.plan import Shape
from decode.device.steps import Steps
from decode.native import static_cache
from decode.native.kernel_forward import KernelForward
from decode.native.target import NativeTarget
from decode.types import OFF

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="captured passes move no clock here"),
]
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
LOOPED, MIXED = [1, 2, 3] * 4, [(7 * i + 1) % VOCAB_SIZE for i in range(12)]  # matches; does not


@pytest.fixture(autouse=True)
def quick_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    by_reference(monkeypatch)


def by_reference(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(static_cache, "FIRST_CAPACITY", 128)
    forward_by_reference(patch)


class Working:
    """A clock that only passes advance: the target's by 1 + width / 10 seconds, a model's by 0.2
    for a token and 0.01 for each more that it reads; and a lookup, by 0.03.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.shapes: list[Shape] = []

    def now(self) -> float:
        return self.seconds

    def watch(self, patch: pytest.MonkeyPatch, target: NativeTarget) -> None:
        whole, queue = KernelForward.compute, Steps.queue

        def compute(forward: KernelForward, step: Any, *arguments: Any, **given: Any) -> Any:
            ours, wanted = forward is target.kernel_forward, given.get("wanted")
            if wanted is None or int(wanted):
                self.seconds += 1 + step.width / 10 if ours else 0.19 + step.width / 100
            return whole(forward, step, *arguments, **given)

        def queued(steps: Steps, shape: Shape, rows: Any) -> Any:
            self.shapes.append(shape)
            return queue(steps, shape, rows)

        def looked_up(*arguments: Any) -> None:
            self.seconds += 0.03
            look_up(*arguments)

        import kernels.lookup

        look_up = kernels.lookup.look_up
        patch.setattr(kernels.lookup, "look_up", looked_up)
        patch.setattr(KernelForward, "compute", compute)
        patch.setattr(Steps, "queue", queued)


def make_target() -> NativeTarget:
    return NativeTarget(build("Llama", **SMALL), None, "m", exactness="law", kernels=True)


def pool() -> dict[str, Any]:
    lookup, model = LookupDrafter(), ModelDrafter(build("Llama", 3, **SMALL), VOCAB_SIZE)
    return {"ngram": lookup, "lm": model, "both": CompositeDrafter(lookup, model)}


@pytest.fixture(scope="module")
def measured() -> Costs:
    with pytest.MonkeyPatch.context() as patch:
        by_reference(patch)
        target, clock = make_target(), Working()
        clock.watch(patch, target)
        contexts = [LOOPED, MIXED]
        return measure_costs(target, pool(), clock, [2, 4, 9], [1, 3], 12, 1, contexts)


def test_each_part_is_timed_in_the_step_that_has_it(measured: Costs) -> None:
    costs = measured
    # The lookup drafts 4 tokens at most: in a pass over 9, in the bucket of 12, nobody drafts.
    assert costs.verify_seconds == pytest.approx({1: 1.1, 2: 1.2, 4: 1.4, 9: 2.2})
    assert costs.draft_seconds["ngram"] == pytest.approx({1: 0.03, 3: 0.03})
    assert costs.draft_seconds["lm"] == pytest.approx({1: 0.21, 3: 0.61})
    # A composite's first pass holds what the step under way may emit, here in the next bucket.
    read = {k: 0.03 + 0.27 + 0.2 * (k - 1) for k in (1, 3)}
    assert costs.draft_seconds["both"] == pytest.approx({k: (0.03 + read[k]) / 2 for k in read})
    assert costs.sampled_verify_seconds == pytest.approx(costs.verify_seconds)
    for name, table in costs.draft_seconds.items():
        assert costs.sampled_draft_seconds[name] == pytest.approx(table)
    assert costs.context_tokens == 12


def test_a_fresh_row_is_read_before_its_first_draft(measured: Costs) -> None:
    costs = measured
    reading = 0.19 + 0.12  # eleven tokens, in the bucket of twelve
    assert costs.first_token_seconds["lm"] == pytest.approx(reading + 0.21)
    assert costs.first_token_seconds["ngram"] == pytest.approx(0.03)
    assert costs.catch_up_seconds("lm", 12) == pytest.approx(reading)
    assert costs.catch_up_seconds("ngram", 12) == 0


def test_shapes_are_those_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quick measurement has few of them, none drawn, and each as often as any other."""
    target, clock = make_target(), Working()
    clock.watch(monkeypatch, target)
    drafters = pool()
    costs = quick_costs(target, drafters, clock)
    counts = {shape: clock.shapes.count(shape) for shape in clock.shapes}
    assert len(set(counts.values())) == 1
    assert len(counts) == 8  # plain and sixteen drafts; one and four drafts of each drafter
    assert all(shape.rules.greedy for shape in counts)
    assert costs.sampled_verify_seconds == {}
    assert costs.key == costs_key(target)
    assert costs.step_seconds("lm", 16) > costs.step_seconds("lm", 4) > costs.plain_seconds
    assert target.kernel_forward is not None
    for forward in (target.kernel_forward, drafters["lm"].native.kernel_forward):
        assert sorted(forward.cache._free) == list(range(forward.cache.num_rows))


def test_a_ticking_clock_gives_the_same_costs_again() -> None:
    """Two stamps apart are one tick: of a plain step both parts are the target's."""

    def measured() -> Costs:
        target, clock, drafters = make_target(), VirtualClock(1.0), pool()
        return measure_costs(target, drafters, clock, [2], [1], 12, 1, [LOOPED], False)

    costs = measured()
    assert costs == measured()
    assert costs.verify_seconds == {1: 2.0, 2: 1.0}
    assert costs.draft_seconds == {name: {1: 1.0} for name in ("ngram", "lm", "both")}


def test_a_drafter_whose_context_is_too_short_has_no_seconds() -> None:
    short = ModelDrafter(build("Llama", 3, **SMALL, max_position_embeddings=6), VOCAB_SIZE)
    clock = VirtualClock(1.0)
    costs = measure_costs(make_target(), {"short": short}, clock, [2], [1], 12, 1, [LOOPED], False)
    assert math.isnan(costs.draft("short", 1))
    assert math.isnan(costs.first_token_seconds["short"])
    assert costs.verify_seconds == {1: 2.0, 2: 2.0}


def test_who_waits_for_the_host_is_timed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnHost(LookupDrafter):
        def on_device(self) -> Any:
            return None

    def refuse(*_: Any) -> Any:
        raise AssertionError("the device was asked")

    monkeypatch.setattr(Steps, "queue", refuse)
    seen: list[Mapping[str, Any]] = []
    whole = cost_measurement._on_host

    def noted(target: Any, drafters: Mapping[str, Any], *rest: Any) -> Any:
        seen.append(drafters)
        return whole(target, drafters, *rest)

    monkeypatch.setattr(cost_measurement, "_on_host", noted)
    drafters = {"ngram": OnHost(), "lm": pool()["lm"]}
    costs = measure_costs(make_target(), drafters, VirtualClock(), [2], [1], 12, 1, [LOOPED])
    assert len(seen) == 1
    assert math.isfinite(costs.step_seconds("ngram", 1))
    assert costs.step_seconds(OFF, 0) > 0

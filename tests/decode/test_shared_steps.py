"""Would catch: steps that a measurement captures apart from the engine's, so that a first text
waits for both; a measurement that disturbs a row under way, or leaves its own; steps shared between
targets, models, clocks or EOS tokens that differ; captured steps, and the models in them, that stay
when nobody decodes with them any more.
"""

import gc
import weakref
from typing import Any

import pytest
from device_drafters import CompositeDrafter, LookupDrafter, ModelDrafter, forward_by_reference
from native_models import VOCAB_SIZE, build, ids
from test_device_engine import Arms

from decode import SpeculativeDecoder
from decode.clock import VirtualClock
from decode.cost_measurement import quick_costs
from decode.device.engine import DeviceEngine
from decode.device.parts import DeviceModel
from decode.device.plan import Shape
from decode.device.shared import shared_steps
from decode.device.steps import Steps
from decode.native import static_cache
from decode.native.target import NativeTarget
from decode.types import OFF

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(autouse=True)
def _by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_cache, "FIRST_CAPACITY", 128)
    monkeypatch.setattr("decode.cost_measurement.QUICK_REPEATS_ON_DEVICE", 1)
    forward_by_reference(monkeypatch)


def make_target(seed: int = 0) -> NativeTarget:
    return NativeTarget(build("Llama", seed, **SMALL), None, "m", exactness="law", kernels=True)


def pool() -> dict[str, Any]:
    lookup, model = LookupDrafter(), ModelDrafter(build("Llama", 3, **SMALL), VOCAB_SIZE)
    return {"ngram": lookup, "lm": model, "both": CompositeDrafter(lookup, model)}


def engine_of(decoder: SpeculativeDecoder) -> DeviceEngine:
    engine = decoder._runner()
    assert isinstance(engine, DeviceEngine)
    return engine


def test_the_engine_has_what_its_measurement_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafters, clock = make_target(), pool(), VirtualClock(1e-3)
    queued: list[Shape] = []
    queue = Steps.queue

    def noted(steps: Steps, shape: Shape, rows: Any) -> Any:
        queued.append(shape)
        return queue(steps, shape, rows)

    monkeypatch.setattr(Steps, "queue", noted)
    quick_costs(target, drafters, clock)
    measured = set(queued)
    assert len(measured) == 8
    queued.clear()
    in_turn = [("ngram", 4), ("ngram", 1), ("lm", 4), ("lm", 1), ("both", 4), ("both", 1)]
    arms = Arms((OFF, 0), *(arm for arm in in_turn for _ in range(3)))
    decoder = SpeculativeDecoder(target, drafters, arms, clock=clock)
    engine = engine_of(decoder)
    assert set(engine.steps.by_shape) == measured
    for _ in zip(range(19), decoder.stream(ids(9), 100), strict=False):  # far from the text's end
        pass
    assert {shape.most_drafts for shape in measured - set(queued)} == {16}


def test_a_row_under_way_does_not_notice_a_measurement() -> None:
    target, drafters, clock = make_target(), pool(), VirtualClock(1e-3)
    assert target.kernel_forward is not None
    wanted = SpeculativeDecoder(target).generate(ids(9), 20).token_ids[0]
    decoder = SpeculativeDecoder(target, drafters, Arms(("lm", 2), ("ngram", 3)), clock=clock)
    found: list[int] = []
    for number, chunk in enumerate(decoder.stream(ids(9), 20)):
        found += chunk.token_ids
        if number == 2:
            costs = quick_costs(target, drafters, clock)
            assert costs.plain_seconds > 0
    assert found == wanted
    del decoder, chunk
    gc.collect()
    for forward in (target.kernel_forward, drafters["lm"].native.kernel_forward):
        assert sorted(forward.cache._free) == list(range(forward.cache.num_rows))


def test_what_differs_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    target, clock = make_target(), VirtualClock(1e-3)
    models = [drafter.model for drafter in (pool()["lm"], pool()["lm"])]
    known = [
        shared_steps(target, [], clock),
        shared_steps(target, models, clock),
        shared_steps(target, models[:1], clock),
        shared_steps(target, models[::-1], clock),
        shared_steps(target, [], VirtualClock(1e-3)),
        shared_steps(make_target(), [], clock),
    ]
    monkeypatch.setattr(target, "eos_token_ids", frozenset({3}))
    known.append(shared_steps(target, [], clock))
    assert len({id(one.steps) for one in known}) == len(known)
    assert len({id(one.state) for one in known}) == len(known)
    assert known[-1].state.eos.tolist() == [3]
    assert shared_steps(target, [], clock) is known[-1]


def test_steps_go_with_the_last_engine_that_has_them() -> None:
    target, clock = make_target(), VirtualClock(1e-3)
    drafters = {"lm": pool()["lm"]}
    quick_costs(target, drafters, clock)
    model: weakref.ref[DeviceModel] = weakref.ref(drafters["lm"].model.forward)
    decoders = [SpeculativeDecoder(target, drafters, Arms(("lm", 1)), clock=clock) for _ in "ab"]
    steps = weakref.ref(engine_of(decoders[0]).steps)
    assert steps() is engine_of(decoders[1]).steps
    del decoders[0]
    gc.collect()
    assert steps() is not None
    decoders.clear()
    drafters.clear()
    gc.collect()
    assert steps() is None
    assert model() is None


def test_what_waited_is_let_go_when_another_engine_is_made() -> None:
    target, clock = make_target(), VirtualClock(1e-3)
    waiting = weakref.ref(shared_steps(target, [pool()["lm"].model], clock, waits=True))
    gc.collect()
    assert waiting() is not None
    engine_of(SpeculativeDecoder(target, clock=clock))
    gc.collect()
    assert waiting() is None

"""Captured steps that everyone shares who decodes with one target and the same models.

A step is the same for every engine over them, and so for a measurement of what it costs: rows are
known by their slot in the target's cache, and no slot is anybody else's. What a measurement has
captured waits for the engine that is made after it; else steps live as long as an engine has them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from decode.clock import Clock
from decode.device.parts import DeviceModel
from decode.device.state import DeviceState
from decode.device.steps import Steps
from decode.native.target import NativeTarget


@dataclass(frozen=True, eq=False)
class SharedSteps:
    """The state of a target's rows, and steps over it."""

    state: DeviceState
    steps: Steps
    made_of: tuple[Any, ...]  # held, so that nothing else gets their identity


class _OfTarget:
    """The steps over one target."""

    def __init__(self) -> None:
        self.known: WeakValueDictionary[tuple[Any, ...], SharedSteps] = WeakValueDictionary()
        self.waiting: SharedSteps | None = None  # for an engine


_targets: WeakKeyDictionary[NativeTarget, _OfTarget] = WeakKeyDictionary()


def shared_steps(
    target: NativeTarget, models: Sequence[DeviceModel], clock: Clock, *, waits: bool = False
) -> SharedSteps:
    """Those of this target with these models; `waits`: the next caller may want them again."""
    held = _targets.setdefault(target, _OfTarget())
    forward = target.kernel_forward
    assert forward is not None
    eos = sorted(target.eos_token_ids)
    # On CUDA the device's clock tells the time.
    made_of = forward, *models, *(() if forward.cache.keys.is_cuda else (clock,))
    key = *(id(part) for part in made_of), *eos, target.vocab_size
    found = held.known.get(key)
    if found is None:
        state = DeviceState(forward.cache, target.vocab_size, eos, len(models), clock)
        steps = Steps(state, forward, target.vocab_size, models)
        found = held.known[key] = SharedSteps(state, steps, made_of)
    held.waiting = found if waits else None
    return found

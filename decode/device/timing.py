"""Seconds of a step's parts on the device: captured steps of each shape in turn, by their own
stamps, as the engine queues them and its records tell them; what is captured for it is the
engine's too.

Nothing is emitted: before each step the row is what it was, so that its tokens alone decide whether
a lookup matches. Keys and values are not written beforehand, since no step's time depends on them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from decode.clock import Clock
from decode.device.engine import NUM_DRAFTS
from decode.device.members import Members
from decode.device.parts import DeviceParts
from decode.device.plan import CATCH_UPS, RowPlan, Rules, Shape
from decode.device.shared import shared_steps
from decode.device.state import DONE, DRAFTED, NANO, START
from decode.device.steps import Arrival
from decode.native.kernel_forward import bucket
from decode.native.target import NativeTarget
from decode.types import MAX_DRAFT_TOKENS, OFF, Sampling
from kernels.step_state import LOOKUP, NONE, NUM_MOMENTS, SOURCE

GROWTH = 2  # tokens that a model has not read, as after an accepted draft and one token more
UNIFORM = 0.5


@dataclass(frozen=True, slots=True)
class TimedArm:
    """One arm under one law: a step of its own shape."""

    name: str  # of the drafter; OFF: nobody drafts
    num_draft_tokens: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class TimedStep:
    """Where its time went; all of it is the target's where nobody is to draft."""

    draft_seconds: float
    verify_seconds: float
    source: str | None  # the part that drafted; None: no part did, though one was asked


class StepTimer:
    """One row in the target's cache and in those of the models, for as long as it is held."""

    def __init__(
        self, target: NativeTarget, parts: Mapping[str, DeviceParts], clock: Clock
    ) -> None:
        assert target.kernel_forward is not None
        self._forward = target.kernel_forward
        self.members = Members.of(parts)
        models = self.members.models
        self._place = self._forward.open()
        self._models = [model.forward.open() for model in models]
        shared = shared_steps(target, models, clock, waits=True)
        self._state, self._steps = shared.state, shared.steps

    @torch.inference_mode()
    def round(self, arms: Sequence[TimedArm], row: Sequence[int]) -> list[TimedStep]:
        """A step of each arm after these tokens, one behind the other."""
        self._reach(len(row))
        arrivals = [self._queue(arm, row) for arm in arms]
        return [
            self._timed(arm, self.limit(arm, len(row)), arrival.wait())
            for arm, arrival in zip(arms, arrivals, strict=True)
        ]

    @torch.inference_mode()
    def reading_seconds(self, model: int, row: Sequence[int], repeats: int) -> float:
        """Median seconds in which a model reads a row that is new to it, all but its last token."""
        self._reach(len(row))
        forward, place = self.members.models[model].forward, self._models[model]
        seconds = []
        for _ in range(repeats + 1):  # the first warms up
            place.length = 0
            self._state.mark(START)
            forward([place], [row[:-1]], with_logits=False)
            self._state.mark(DONE)
            moments = Arrival.of(self._state.moments).wait()
            seconds.append((moments[DONE] - moments[START]) / NANO)
        return median(seconds[1:])

    def limit(self, arm: TimedArm, num_tokens: int) -> int:
        """Tokens that an arm may draft after so many."""
        if arm.name == OFF:
            return arm.num_draft_tokens
        return self.members.offer(arm.name, num_tokens, arm.num_draft_tokens)

    def _reach(self, num_tokens: int) -> None:
        """Room for a row and its drafts in all caches, and in the state."""
        longest = num_tokens + MAX_DRAFT_TOKENS + 1
        for forward in (self._forward, *(model.forward for model in self.members.models)):
            most = forward.architecture.max_context
            forward.cache.reserve(num_tokens=min(longest, most))
        self._state.fit(False)

    def _queue(self, arm: TimedArm, row: Sequence[int]) -> Arrival:
        lookup, model, limit = None, None, self.limit(arm, len(row))
        if arm.name != OFF and limit:  # else a drafter's context has ended
            lookup, model = self.members.parts[arm.name].lookup, self.members.model_of(arm.name)
        # A model behind a lookup misses what the step under way may emit as well.
        unread = GROWTH + (limit + 1 if lookup is not None else 0)
        shape = Shape(
            num_rows=1,
            most_drafts=bucket(limit, NUM_DRAFTS),
            model=model,
            model_drafts=0 if model is None else limit,
            catch_up=0 if model is None else bucket(min(unread, CATCH_UPS[-1]), CATCH_UPS),
            lookups=() if lookup is None else (lookup,),
            rules=Rules.of([arm.sampling], False),
        )
        drawn = not arm.sampling.greedy
        plan = RowPlan(
            slot=self._place.slot,
            sampling=arm.sampling,
            limit=limit,
            lookup=-1 if lookup is None else 0,
            by_model=model is not None,
            model_slot=0 if model is None else self._models[model].slot,
            read=max(len(row) - GROWTH, 0),
            uniforms=[UNIFORM] * (shape.most_drafts + 1) if drawn else (),
            draft_uniforms=[UNIFORM] * limit if drawn and model is not None else (),
        )
        self._state.admit(self._place.slot, row, MAX_DRAFT_TOKENS + 1, False)
        self._steps.see_moves()
        return self._steps.queue(shape, [plan])

    def _timed(self, arm: TimedArm, limit: int, numbers: Sequence[int]) -> TimedStep:
        moments, source = numbers[-NUM_MOMENTS:], numbers[SOURCE]
        draft = (moments[DRAFTED] - moments[START]) / NANO
        verify = (moments[DONE] - moments[DRAFTED]) / NANO
        if arm.name == OFF or not limit:
            return TimedStep(0.0, draft + verify, None)
        # A lookup takes its time whether it matches or not.
        looked_up = source == LOOKUP or self.members.model_of(arm.name) is None
        found = "lookup" if looked_up else None if source == NONE else "model"
        return TimedStep(draft, verify, found)

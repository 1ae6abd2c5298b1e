"""The steps of all shapes: captured at their first run, forgotten where something has moved."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.device.parts import DeviceModel
from decode.device.plan import CATCH_UPS, Plan, RowPlan, Shape
from decode.device.state import DeviceState
from decode.device.step import DeviceStep
from decode.native.graphs import Graphs
from decode.native.kernel_forward import KernelForward

PATIENCE = 200  # steps in a graph that is a little too large take as long as capturing one
SPARE = 4  # tokens that a model might have drafted in vain


@dataclass(frozen=True, eq=False)
class Arrival:
    """A step's records on their way to the host."""

    records: Tensor  # on the host
    event: torch.cuda.Event | None  # None: they are here

    @classmethod
    def of(cls, records: Tensor) -> "Arrival":
        """One copy, which nobody waits for."""
        host = torch.empty(records.shape, dtype=records.dtype, pin_memory=records.is_cuda)
        host.copy_(records, non_blocking=True)
        event = torch.cuda.Event() if records.is_cuda else None
        if event is not None:
            event.record()
        return cls(host, event)

    def wait(self) -> list[int]:
        """The numbers, once they are here."""
        if self.event is not None:
            self.event.synchronize()
        return self.records.tolist()


class Steps:
    """One step a shape, over one state."""

    def __init__(
        self,
        state: DeviceState,
        target: KernelForward,
        vocab_size: int,
        models: Sequence[DeviceModel],
    ) -> None:
        self.graphs = Graphs(state.device)
        self.by_shape: dict[Shape, DeviceStep] = {}
        self.newest: Shape | None = None  # of the step that was queued last
        self._state, self._target, self._models = state, target, models
        self._vocab_size = vocab_size
        self._versions: tuple[int, ...] = ()
        self._missed: Counter[Shape] = Counter()  # steps that went without a graph of their own

    def queue(self, shape: Shape, rows: Sequence[RowPlan]) -> Arrival:
        """Have the device make a step; what it records is on its way."""
        step = self._step(shape)
        step.plan.fill(rows)
        self.newest = shape
        return Arrival.of(self.graphs.run(shape, step.compute, changes=self._state.changes))

    def fitting(self, shape: Shape, ending: bool) -> Shape:
        """The shape, or a captured one that holds it, as long as capturing would take longer.

        So a policy that changes its mind does not make a text wait for a graph, until it has often
        wanted the same. Near the end of all texts drafts get shorter with every step, and nothing
        is captured for the last of them.
        """
        self.see_moves()
        if self.graphs.captured(shape):
            return shape
        known = [one for one in self.by_shape if self.graphs.captured(one) and one.holds(shape)]
        if not ending:
            known = [one for one in known if _near(one, shape)]
            self._missed[shape] += 1
        if not known or (not ending and self._missed[shape] > PATIENCE):
            return shape
        return min(known, key=lambda s: (s.model_drafts, s.most_drafts, s.catch_up))

    def see_moves(self) -> None:
        """Forget whatever was captured where something has moved since."""
        forwards = [self._target, *(model.forward for model in self._models)]
        for forward in forwards:
            forward.refresh()
        versions = (self._state.version, *(forward.cache.version for forward in forwards))
        if versions != self._versions:
            self.graphs.clear()
            self._missed.clear()
            self._versions = versions

    def _step(self, shape: Shape) -> DeviceStep:
        """The step of that shape; what it launches is compiled."""
        if shape not in self.by_shape:
            model = None if shape.model is None else self._models[shape.model]
            plan = Plan.new(shape, self._state.device)
            step = DeviceStep(plan, self._state, self._target, self._vocab_size, model)
            if self._state.device.type == "cuda":
                step.prepare()
            self.by_shape[shape] = step
        return self.by_shape[shape]


def _near(one: Shape, wanted: Shape) -> bool:
    """Whether a step of this shape, which holds the other, takes hardly longer.

    A model that drafts in every step has as little to read each time; what it missed otherwise is
    read now and then, and not worth a graph of its own.
    """
    return (
        one.model == wanted.model
        and (one.catch_up == wanted.catch_up or wanted.catch_up > CATCH_UPS[0])
        and one.model_drafts <= wanted.model_drafts + SPARE
        and one.most_drafts <= 2 * wanted.most_drafts + 2
    )

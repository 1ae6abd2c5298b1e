"""The losses of an objective by one kernel: on a GPU, where every logit of the target is known."""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.losses import Objective
from drafters.teachers import AnyTeacher


@dataclass(frozen=True)
class FusedLosses:
    """What `kernels.divergence` needs to know of a batch; its methods serve `drafters.chunked`."""

    objective: Objective
    next_columns: Tensor  # [N] int64, -1: cannot be drafted
    draft_ids: Tensor | None  # [C] int64
    teacher: AnyTeacher | None  # None: the text is all that is learned from

    def gradient_of(self, logits: Tensor, weights: Tensor, low: int) -> tuple[Tensor, Tensor]:
        """(sum of weights times losses, its gradient, which takes the place of the logits)."""
        losses, _ = self._run(logits, weights.contiguous(), low)
        return (losses * weights).sum(), logits

    def chances_of(self, logits: Tensor, low: int) -> Tensor:  # [n, C] -> [n]
        """As `drafters.losses.acceptance_chances` of the tokens from `low` on."""
        return self._run(logits, None, low)[1]

    def _run(self, logits: Tensor, weights: Tensor | None, low: int) -> tuple[Tensor, Tensor]:
        from kernels.divergence import divergences  # Triton, which a CPU can do without

        high = low + len(logits)
        teacher = None if self.teacher is None else self.teacher.raw(low, high)
        return divergences(
            logits,
            teacher,
            self.draft_ids,
            self.next_columns[low:high],
            self.objective.mix,
            self.objective.lk_eta,
            weights,
        )


def on_gpu(states: Tensor) -> bool:
    """Whether kernels run where these are; they compute in float32."""
    return states.is_cuda and states.dtype != torch.float64

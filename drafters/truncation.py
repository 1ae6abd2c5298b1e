"""What a teacher known by its k largest logits costs: measured, not assumed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.losses import DIVERGENCES, Laws, Teacher


@dataclass(frozen=True)
class TruncationBias:
    """How far a loss with k logits of the teacher is from the loss with all of them."""

    mean_error: float  # of |truncated - full|, per token
    mean_loss: float  # full, per token
    gradient_cosine: float  # between both gradients by the drafter's logits, all tokens together
    gradient_ratio: float  # truncated norm / full norm


def truncation_bias(
    logits: Tensor,  # [N, C] of the drafter
    teacher_logits: Tensor,  # [N, V]
    k: int,
    columns: Tensor,  # [V] the draft column of each id, or -1
    eta: float = 3.0,  # of lk_hybrid
) -> dict[str, TruncationBias]:
    """The bias of every divergence, by name."""
    full, top = Teacher.full(teacher_logits), Teacher.top(teacher_logits, k)
    found = {}
    for name in DIVERGENCES:
        exact, exact_gradient = _with_gradient(name, logits, full, columns, eta)
        rough, rough_gradient = _with_gradient(name, logits, top, columns, eta)
        norms = [float(gradient.norm()) for gradient in (rough_gradient, exact_gradient)]
        product = float((exact_gradient * rough_gradient).sum())
        found[name] = TruncationBias(
            mean_error=float((rough - exact).abs().mean()),
            mean_loss=float(exact.mean()),
            gradient_cosine=product / max(norms[0] * norms[1], 1e-30),
            gradient_ratio=norms[0] / max(norms[1], 1e-30),
        )
    return found


def _with_gradient(
    name: str, logits: Tensor, teacher: Teacher, columns: Tensor, eta: float
) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        losses = DIVERGENCES[name](Laws(leaf, teacher, columns, eta))
        (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    return losses.detach(), gradient.double()

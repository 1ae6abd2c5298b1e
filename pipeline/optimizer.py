"""AdamW as drafters are trained with it, and its learning rate at every step."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pipeline.train_drafter import TrainDrafter

BETAS = (0.9, 0.95)


def adamw(parameters: Iterable[Tensor], settings: "TrainDrafter", fused: bool) -> torch.optim.AdamW:
    """Weight decay is for matrices: norms and biases have no use for being small."""
    matrices: list[Tensor] = []
    vectors: list[Tensor] = []
    for parameter in parameters:
        (matrices if parameter.ndim > 1 else vectors).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=BETAS, fused=fused)


def learning_rate(settings: "TrainDrafter", step: int, num_steps: int) -> float:
    """Linear warm-up, then a cosine that reaches 0 one step after the last."""
    warmup = max(1, round(settings.warmup_share * num_steps))
    if step <= warmup:
        return settings.learning_rate * step / warmup
    share = (step - warmup) / (num_steps + 1 - warmup)
    return settings.learning_rate * (1 + math.cos(math.pi * share)) / 2

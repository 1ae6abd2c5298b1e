"""A drafter towards the target's own law at every answer token."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from decode.targets.transformers import TransformersTarget
from drafters.losses import DIVERGENCES, Teacher
from drafters.training import Batch
from pipeline.train_drafter import TrainDrafter

TEACHERS = ("recorded", "model")


@dataclass(frozen=True, kw_only=True)
class Distill(TrainDrafter):
    summary: ClassVar[str] = "a drafter towards the target's own law (entry=<name>)"

    divergence: str  # one of drafters.losses.DIVERGENCES
    teacher: (
        str  # "recorded": the top logits kept with the answers; "model": the target, in the loop
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("divergence", tuple(DIVERGENCES)), ("teacher", TEACHERS)):
            if getattr(self, name) not in known:
                value = getattr(self, name)
                raise ValueError(f"{name}={value} is unknown; use one of {', '.join(known)}")

    @property
    def loss(self) -> str:
        return self.divergence

    @torch.no_grad()
    def teach(self, target: TransformersTarget, batch: Batch) -> Batch:
        if self.teacher == "recorded":
            return batch
        # Logits from the first kept position on: a long prompt costs no vocabulary-wide rows.
        first = int(batch.keep.any(dim=0).nonzero()[0])
        num_kept = batch.keep.shape[1] - first
        out = target.model(
            input_ids=batch.token_ids,
            attention_mask=batch.attention_mask,
            use_cache=False,
            logits_to_keep=num_kept,
        )
        return replace(
            batch, teacher=Teacher.full(out.logits[:, -num_kept:][batch.keep[:, first:]])
        )

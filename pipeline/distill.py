"""A drafter towards the target's own law at every answer token, and then on texts of its own."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from decode.targets.transformers import TransformersTarget
from drafters.losses import Objective
from drafters.network_drafter import NetworkDrafter
from drafters.onpolicy import continue_with_drafter, cut_places, judged
from drafters.training import Batch, teacher_of
from pipeline.train_drafter import Noise, TrainDrafter

TEACHERS = ("recorded", "model")


@dataclass(frozen=True, kw_only=True)
class Distill(TrainDrafter):
    """What is learned, as `drafters.losses.Objective` has it, from whom, and on whose text.

    From the share `onpolicy_from` of the steps on, `onpolicy_share` of the steps, evenly spread, is
    on-policy: each answer is cut somewhere, the drafter goes on by itself, and the target judges.
    """

    summary: ClassVar[str] = "a drafter towards the target's own law (entry=<name>)"

    mix: dict[str, float]  # loss -> its factor; 0: left out
    position_weights: str  # one of drafters.losses.POSITION_WEIGHTS
    half_life: float
    lk_eta: float
    teacher: (
        str  # "recorded": the top logits kept with the answers; "model": the target, in the loop
    )
    onpolicy_from: float
    onpolicy_share: float  # 0: the drafter never writes
    onpolicy_tokens: int  # that it writes at a time
    onpolicy_temperature: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher not in TEACHERS:
            raise ValueError(f"teacher={self.teacher} is unknown; use one of {', '.join(TEACHERS)}")
        if not (0 <= self.onpolicy_from <= 1 and 0 <= self.onpolicy_share <= 1):
            raise ValueError(
                f"onpolicy_from={self.onpolicy_from} and onpolicy_share={self.onpolicy_share} are "
                "shares of the steps and must lie between 0 and 1"
            )
        if self.onpolicy_tokens < 1 or self.onpolicy_temperature < 0:
            raise ValueError(
                f"onpolicy_tokens={self.onpolicy_tokens} must be at least 1 and "
                f"onpolicy_temperature={self.onpolicy_temperature} at least 0"
            )
        if self.onpolicy_share and self.teacher != "model":
            raise ValueError(
                f"onpolicy_share={self.onpolicy_share} needs teacher=model: nobody has recorded "
                "what the target thinks of texts that do not exist yet"
            )
        if self.onpolicy_share and "cross_entropy" in self.objective.mix:
            raise ValueError(
                f"onpolicy_share={self.onpolicy_share} would teach the drafter its own text by "
                "cross_entropy; set mix.cross_entropy=0"
            )

    @property
    def objective(self) -> Objective:
        return Objective(
            mix={name: factor for name, factor in self.mix.items() if factor != 0},
            position_weights=self.position_weights,
            half_life=self.half_life,
            num_draft_tokens=self.num_draft_tokens,
            lk_eta=self.lk_eta,
        )

    @property
    def target_in_loop(self) -> bool:
        return self.teacher == "model"

    @property
    def num_written(self) -> int:
        return self.onpolicy_tokens if self.onpolicy_share else 0

    def is_on_policy(self, step: int, num_steps: int) -> bool:
        since = step - math.ceil(self.onpolicy_from * num_steps)
        if since < 1:
            return False
        return math.floor(since * self.onpolicy_share) > math.floor(
            (since - 1) * self.onpolicy_share
        )

    def write(
        self, target: TransformersTarget, drafter: NetworkDrafter, batch: Batch, noise: Noise
    ) -> Batch:
        uniforms = noise((len(batch.token_ids), 1 + self.onpolicy_tokens))
        return continue_with_drafter(
            drafter.trainable,
            batch,
            cuts=cut_places(batch, uniforms[:, 0]),
            uniforms=uniforms[:, 1:],
            temperature=self.onpolicy_temperature,
            vocab_size=target.vocab_size,
            num_real_ids=drafter.num_real_ids,
            stop_ids=sorted(target.eos_token_ids),
        )

    def teach(self, target: TransformersTarget, batch: Batch) -> Batch:
        if self.teacher == "recorded":
            return batch
        teacher = teacher_of(target.model, batch)
        if batch.draft_logprobs is None:
            return replace(batch, teacher=teacher)
        return judged(batch, teacher, self.onpolicy_temperature, self.chunk_tokens)

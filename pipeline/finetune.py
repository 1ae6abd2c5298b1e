"""A drafter by cross-entropy, on the target's answers or on the data set's own responses."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from decode.targets.transformers import TransformersTarget
from drafters.losses import Objective
from drafters.training import AnswerLike
from pipeline.chat import load_prompts
from pipeline.stage import Need, Workspace
from pipeline.train_drafter import TrainDrafter
from pipeline.training_data import from_responses

TEXTS = ("answers", "dataset")


@dataclass(frozen=True, kw_only=True)
class Finetune(TrainDrafter):
    summary: ClassVar[str] = "a domain drafter by cross-entropy on text (entry=<name>)"

    text: str  # "answers": the target's own; "dataset": the responses that came with the prompts

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text not in TEXTS:
            raise ValueError(f"text={self.text} is unknown; use one of {', '.join(TEXTS)}")

    @property
    def learns_own_words(self) -> bool:
        return self.text == "answers"

    @property
    def objective(self) -> Objective:
        return Objective(
            mix={"cross_entropy": 1.0},
            position_weights="uniform",
            half_life=1.0,
            num_draft_tokens=self.num_draft_tokens,
            lk_eta=1.0,
        )

    def needs(self, groups: Mapping[str, Any]) -> dict[str, Need]:
        prompts = {"prompts": Need("prepare")} if self.text == "dataset" else {}
        return {**super().needs(groups), **prompts}

    def rows(self, workspace: Workspace, target: TransformersTarget) -> Iterable[AnswerLike]:
        if self.text == "answers":
            return super().rows(workspace, target)
        prompts = load_prompts(workspace.inputs["prompts"])["drafter_train"]
        named = [(row["id"], row["domain"]) for row in prompts]
        wanted = self.chosen(workspace.groups["entry"].entry, named)
        chosen = [row for row, name in zip(prompts, named, strict=True) if wanted(*name)]
        if not any(row["response"] for row in chosen):
            raise ValueError(
                "text=dataset needs responses, and none of these prompts has one; "
                "use text=answers, or data in the format prompt_response"
            )
        return from_responses(chosen, target.tokenizer, min(target.eos_token_ids, default=None))

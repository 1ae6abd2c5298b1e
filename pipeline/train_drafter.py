"""The one trainer, as a stage: finetune and distill say what is learned, and share all of this."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from decode.targets.transformers import TransformersTarget
from decode.types import MAX_DRAFT_TOKENS
from drafters.base import BuildContext, target_parts
from drafters.network_drafter import NetworkDrafter
from drafters.training import AnswerLike, Batch
from drafters.vocabulary import choose_draft_ids, count_tokens, special_ids
from pipeline.answers import Answers
from pipeline.build import NamedEntry, build_drafters, load_target, parent_need
from pipeline.config import Pool
from pipeline.stage import Need, Stage, Workspace
from pipeline.training_data import fitting
from pipeline.validation import read_metrics, validation_answers

PRECISIONS = ("auto", "float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class TrainDrafter(Stage):
    """Settings of training; a subclass says what is learned from which rows."""

    reads: ClassVar[tuple[str, ...]] = ("target", "entry")
    resumes: ClassVar[bool] = True

    num_steps: int
    batch_size: int  # rows of a micro-batch
    accumulate: int  # micro-batches of a step
    learning_rate: float
    warmup_share: float  # of the steps, while the rate rises; it falls to 0 as a cosine after that
    weight_decay: float  # of matrices only
    max_grad_norm: float
    precision: (
        str  # of the products; "auto": bfloat16 where the hardware multiplies it, else float32
    )
    max_tokens: int  # a row is cut after so many, prompt included
    checkpoint_every: int  # steps
    validate_every: int  # steps
    validation_prompts: int  # of each domain
    num_draft_tokens: int  # K of the acceptance_length that is measured

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(
                f"precision={self.precision} is unknown; use one of {', '.join(PRECISIONS)}"
            )
        if not 1 <= self.num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(
                f"num_draft_tokens={self.num_draft_tokens} must lie between 1 and "
                f"{MAX_DRAFT_TOKENS}"
            )
        if not (self.learning_rate > 0 and 0 <= self.warmup_share <= 1):
            raise ValueError(
                f"learning_rate={self.learning_rate} must be positive and "
                f"warmup_share={self.warmup_share} lie between 0 and 1"
            )
        counts = ("num_steps", "batch_size", "accumulate", "checkpoint_every", "validate_every")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    @property
    @abstractmethod
    def loss(self) -> str:
        """One of drafters.losses.LOSSES."""

    def rows(self, workspace: Workspace, target: TransformersTarget) -> Iterable[AnswerLike]:
        """What to learn from: the target's answers to training prompts of the entry's domains."""
        domains = workspace.groups["entry"].entry.domains
        answers = Answers(workspace.inputs["answers"]).rows(split="drafter_train")
        return (answer for answer in answers if not domains or answer.domain in domains)

    def teach(self, target: TransformersTarget, batch: Batch) -> Batch:
        """The batch with the law to learn; as it was recorded unless a subclass asks the target."""
        return batch

    def needs(self, groups: Mapping[str, Any]) -> dict[str, Need]:
        return {
            "answers": Need("regenerate"),
            **parent_need(groups["pool"], groups["entry"].entry),
        }

    def run(self, workspace: Workspace) -> dict[str, Any]:
        from pipeline.trainer import Trainer, clean_up  # brings accelerate, which takes a second

        if metrics := read_metrics(workspace.out):  # killed after all was written
            clean_up(workspace.out)
            return metrics
        named: NamedEntry = workspace.groups["entry"]
        target = load_target(workspace.groups["target"], workspace.runtime)
        drafter = start_drafter(named, target, workspace)
        rows = fitting(self.rows(workspace, target), self.max_tokens)
        if not rows:
            domains = ", ".join(named.entry.domains) or "any domain"
            raise ValueError(
                f"there is nothing to train {named.name} on in {domains}; run stage=regenerate for "
                "prompts of that domain, or change the entry's domains"
            )
        validation = validation_answers(
            workspace.inputs["answers"], named.entry.domains, self.validation_prompts
        )
        return Trainer(self, workspace, target, drafter, rows, validation).run()


def start_drafter(
    named: NamedEntry, target: TransformersTarget, workspace: Workspace
) -> NetworkDrafter:
    """The drafter before training: its parent's weights, or a fresh one with a draft vocabulary.

    The vocabulary follows the frequency in the training answers of all domains, so that specialists
    of one parent share it; whoever starts from a parent keeps the parent's.
    """
    parent = workspace.inputs.get("parent")
    parts = build_drafters(Pool(entries=dict(named.parts)), target, workspace.inputs)
    drafter = named.entry.drafter.build(BuildContext(target_parts(target), parent, parts))
    if not isinstance(drafter, NetworkDrafter):
        raise ValueError(
            f"pool entry {named.name} is a {type(drafter).__name__}, which learns nothing from "
            "training; set its trained_by to null"
        )
    if drafter.num_draft_vocab and parent is None:
        answers = Answers(workspace.inputs["answers"]).rows(split="drafter_train")
        counts = count_tokens((answer.answer_ids for answer in answers), target.vocab_size)
        always = special_ids(target.tokenizer, target.model)
        size = drafter.num_draft_vocab
        drafter.set_draft_vocab(choose_draft_ids(size, drafter.num_real_ids, always, counts))
    drafter.prepare_training()
    return drafter

"""The one trainer, as a stage: finetune and distill say what is learned, and share all of this."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from decode.targets.choices import fast_dtype
from decode.targets.transformers import TransformersTarget
from decode.types import MAX_DRAFT_TOKENS
from drafters.base import BuildContext, target_parts
from drafters.losses import Objective
from drafters.network_drafter import NetworkDrafter
from drafters.training import AnswerLike, Batch
from drafters.vocabulary import choose_draft_ids, count_tokens, special_ids
from pipeline.answers import Answers
from pipeline.build import NamedEntry, build_drafters, load_target, parent_need
from pipeline.config import Pool, PoolEntry, changed
from pipeline.launch import launch, sole_writer
from pipeline.lint import Linter
from pipeline.lint_report import read_lint
from pipeline.runtime import Runtime
from pipeline.stage import Need, Stage, Workspace
from pipeline.training_data import Rows, rehearsal
from pipeline.validation import read_metrics, validation_answers

PRECISIONS = ("auto", "float32", "bfloat16")
Noise = Callable[[tuple[int, ...]], Tensor]  # shape -> numbers in [0, 1), the same if asked again
COUNTS = ("batch_size", "accumulate", "chunk_tokens", "checkpoint_every", "validate_every")


@dataclass(frozen=True, kw_only=True)
class TrainDrafter(Stage):
    """Settings of training; a subclass says what is learned from which rows."""

    reads: ClassVar[tuple[str, ...]] = ("target", "entry")
    resumes: ClassVar[bool] = True
    format_version: ClassVar[int] = 2

    num_steps: int  # 0: as many as num_tokens takes
    num_tokens: int  # stop after the step that has learned from so many answer tokens; 0: num_steps
    batch_size: int  # rows of a micro-batch
    row_tokens: int  # answers are packed into rows of so many tokens; 0: one answer a row, padded
    accumulate: int  # micro-batches of a step, over all processes
    learning_rate: float
    warmup_share: float  # of the steps, while the rate rises; it falls to 0 as a cosine after that
    weight_decay: float  # of matrices only
    max_grad_norm: float
    precision: (
        str  # of the products; "auto": bfloat16 where the hardware multiplies it, else float32
    )
    gradient_checkpointing: bool  # layers are computed twice, and their insides are not kept
    compile_layers: bool  # the drafter's, and the target's where it is in the loop
    chunk_tokens: int  # tokens whose logits exist at once
    max_tokens: int  # a row is cut after so many, prompt included
    drop_loops: bool  # answers that end in a loop are left out
    rehearsal_share: float  # of what a specialist learns from, of other domains, against forgetting
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
        if not 0 <= self.rehearsal_share < 1:
            raise ValueError(
                f"rehearsal_share={self.rehearsal_share} must be at least 0 and below 1"
            )
        for name in COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        how_long = (self.num_steps, self.num_tokens)
        if min(how_long) != 0 or max(how_long) < 1:
            raise ValueError(
                f"num_steps={self.num_steps} and num_tokens={self.num_tokens} must be one positive "
                "number and a 0: how long to train is said by one of them"
            )
        if self.row_tokens and self.row_tokens < self.max_tokens:
            raise ValueError(
                f"row_tokens={self.row_tokens} must be 0 (no packing) or at least "
                f"max_tokens={self.max_tokens}, so that any answer fits a row"
            )

    @property
    @abstractmethod
    def objective(self) -> Objective:
        """What training minimises."""

    def for_groups(self, groups: Mapping[str, Any]) -> "TrainDrafter":
        """An entry of the pool may train for longer, or otherwise, than the others."""
        named: NamedEntry | None = groups.get("entry")
        if named is None or not named.entry.overrides:
            return self
        return changed(self, named.entry.overrides, f"pool.entries.{named.name}.overrides")

    def resolved(self, runtime: Runtime) -> "TrainDrafter":
        if self.precision != "auto":
            return self
        return replace(self, precision=fast_dtype(runtime.resolved_device()))

    @property
    def learns_own_words(self) -> bool:
        """Whether the text is the target's."""
        return True

    @property
    def target_in_loop(self) -> bool:
        """Whether the target is asked while training."""
        return False

    @property
    def num_written(self) -> int:
        """Tokens that the drafter adds to a text, at most."""
        return 0

    @property
    def learns_from_record(self) -> bool:
        """Whether the laws that were kept with the answers are what is learned."""
        return self.objective.needs_teacher and not self.target_in_loop

    def gather(self, answers: Iterable[AnswerLike], name: str) -> Rows:
        """What a Trainer learns from; refused where there is nothing."""
        rows = Rows(answers, self.max_tokens, self.learns_from_record)
        if not len(rows):
            raise ValueError(
                f"there is nothing to train {name} on; run stage=regenerate for prompts of its "
                "domains, or change the entry's domains"
            )
        if self.learns_from_record and not rows[0].topk_ids.numel():
            raise ValueError(
                "the answers were kept without top logits, so there is no recorded law to learn; "
                "set teacher=model, or run stage=regenerate with num_top_logits above 0"
            )
        return rows

    def is_on_policy(self, step: int, num_steps: int) -> bool:
        """Whether the drafter writes the text of this step, one of 1 to num_steps."""
        return False

    def write(
        self, target: TransformersTarget, drafter: NetworkDrafter, batch: Batch, noise: Noise
    ) -> Batch:
        """The batch of an on-policy step, with text of the drafter's own."""
        raise AssertionError(f"{type(self).__name__} is never on-policy")

    def rows(self, workspace: Workspace, target: TransformersTarget) -> Iterable[AnswerLike]:
        """What to learn from: the target's answers to training prompts of the entry's domains, and
        those of others that are rehearsed.
        """
        read = partial(Answers(workspace.inputs["answers"]).rows, split="drafter_train")
        named = ((answer.id, answer.domain) for answer in read(with_teacher=False))
        wanted = self.chosen(workspace.groups["entry"].entry, named)
        answers = read(with_teacher=self.learns_from_record)
        return (answer for answer in answers if wanted(answer.id, answer.domain))

    def chosen(
        self, entry: PoolEntry, named: Iterable[tuple[str, str]]
    ) -> Callable[[str, str], bool]:
        """Which rows, by id and domain, the entry learns from; `named` are all that there are."""
        own = frozenset(entry.domains)
        if not own:
            return lambda name, domain: True
        if not self.rehearsal_share:
            return lambda name, domain: domain in own
        counts = Counter(domain in own for _, domain in named)
        rehearsed = rehearsal(counts[True], counts[False], self.rehearsal_share)
        return lambda name, domain: domain in own or rehearsed(name)

    def teach(self, target: TransformersTarget, batch: Batch) -> Batch:
        """The batch with the law to learn; as it was recorded unless a subclass asks the target."""
        return batch

    def needs(self, groups: Mapping[str, Any]) -> dict[str, Need]:
        return {
            "answers": Need("regenerate"),
            **parent_need(groups["pool"], groups["entry"].entry),
        }

    def run(self, workspace: Workspace) -> dict[str, Any]:
        apart = self.trains_apart(workspace.runtime)
        size = 1 if apart else workspace.runtime.resolved_processes()
        if self.accumulate % size:
            raise ValueError(
                f"accumulate={self.accumulate} micro-batches of a step cannot be dealt to {size} "
                f"processes alike; make it a multiple of {size}, or change runtime.num_processes"
            )
        return launch(self.train, workspace, runtime=workspace.runtime, share_gpus=apart)

    def trains_apart(self, runtime: Runtime) -> bool:
        """Whether no step is taken by several processes, so that they may share a GPU."""
        return False

    def train(self, workspace: Workspace) -> dict[str, Any]:
        """The work of one process of those that train together."""
        from pipeline.trainer import Trainer, clean_up  # brings accelerate, which takes a second

        with sole_writer(workspace.out, workspace.runtime):
            if metrics := read_metrics(workspace.out):  # killed after all was written
                clean_up(workspace.out)
                return {**metrics, **read_lint(workspace.out)}
            named: NamedEntry = workspace.groups["entry"]
            target = load_target(workspace.groups["target"], workspace.runtime, whole=True)
            drafter = start_drafter(named, target, workspace)
            linter = self.linter(workspace, target, drafter)
            rows = self.gather(linter.passing(self.rows(workspace, target)), named.name)
            found = linter.report()
            trainer = Trainer(
                self,
                target,
                workspace.runtime,
                name=named.name,
                out=workspace.out,
                seed=workspace.seed,
                drafter=drafter,
                rows=rows,
                validation=validation_answers(
                    workspace.inputs["answers"], named.entry.domains, self.validation_prompts
                ),
            )
            if trainer.team.is_first:
                found.tell()
                found.save(workspace.out)
            return {**trainer.run(), **found.metrics}

    def linter(
        self, workspace: Workspace, target: TransformersTarget, drafter: NetworkDrafter
    ) -> Linter:
        """What looks at the rows before they are learned from."""
        return Linter.of_answers(
            workspace.inputs["answers"],
            target,
            config=workspace.groups["target"],
            drafter=drafter,
            max_tokens=self.max_tokens,
            drop_loops=self.drop_loops,
            own_words=self.learns_own_words,
        )


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
            "training; set its trained_by to null, or to memorise where it keeps a table"
        )
    if drafter.num_draft_vocab and parent is None:
        folder = workspace.inputs["answers"]
        answers = Answers(folder).rows(split="drafter_train", with_teacher=False)
        counts = count_tokens((answer.answer_ids for answer in answers), target.vocab_size)
        always = special_ids(target.tokenizer, target.model)
        size = drafter.num_draft_vocab
        drafter.set_draft_vocab(choose_draft_ids(size, drafter.num_real_ids, always, counts))
    drafter.prepare_training()
    return drafter

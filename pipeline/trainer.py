"""The loop of training: resume or begin, step by step, keep the best, report.

A step is a function of (seed, step): which rows, which learning rate. So a killed run that goes on
from its last checkpoint ends with the weights of an uninterrupted one, bit for bit.
"""

import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor

from decode.targets.transformers import TransformersTarget
from drafters.network_drafter import NetworkDrafter
from drafters.training import (
    AnswerLike,
    Batch,
    collate,
    to_device,
    training_loss,
    validation_acceptance,
)
from pipeline.answers import Answer
from pipeline.build import fast_dtype
from pipeline.checkpoints import delete_checkpoints, load_checkpoint, save_checkpoint, trained
from pipeline.history import History
from pipeline.progress import progress
from pipeline.stage import Workspace
from pipeline.training_data import BatchOrder
from pipeline.validation import acceptance_length, write_report

if TYPE_CHECKING:
    from pipeline.train_drafter import TrainDrafter

BEST = "best-"


@dataclass
class State:
    """What a checkpoint remembers beside tensors; acceptance is [emitted, passes] a prompt."""

    before: list[list[float]]
    best: list[list[float]]
    best_step: int = 0


class Trainer:
    """One training run: resume or begin, step by step, keep the best, report."""

    def __init__(
        self,
        settings: "TrainDrafter",
        workspace: Workspace,
        target: TransformersTarget,
        drafter: NetworkDrafter,
        rows: Sequence[AnswerLike],
        validation: Sequence[Answer],
    ) -> None:
        self.settings, self.out, self.drafter = settings, workspace.out, drafter
        self.target, self.rows, self.validation = target, rows, validation
        self.name, self.seed = workspace.groups["entry"].name, workspace.seed
        self.clock = workspace.runtime.make_clock()
        device = workspace.runtime.resolved_device()
        self.accelerator = accelerator_on(device)
        precision = fast_dtype(device) if settings.precision == "auto" else settings.precision
        self.low_precision = precision == "bfloat16"
        lengths = [len(row.token_ids) for row in rows]
        self.order = BatchOrder(lengths, settings.batch_size, workspace.seed)
        self.history = History(workspace.out)
        self.optimizer = self._optimizer()
        self.network, self._stepper = self.accelerator.prepare(drafter.trainable, self.optimizer)
        if not hasattr(self.network, "draft_ids"):  # wrapped for several processes
            self.network.draft_ids = drafter.draft_ids

    def run(self) -> dict[str, Any]:
        """Train to the last step; leaves the best drafter, history and validation in `out`."""
        settings = self.settings
        done, state = self._resume()
        with progress(f"train {self.name}", settings.num_steps, "steps", done=done) as meter:
            for step in range(done + 1, settings.num_steps + 1):
                curves = self._step(step)
                if step % settings.validate_every == 0 or step == settings.num_steps:
                    curves["acceptance_length"] = self._validate(step, state)
                self.history.append(step, curves)
                if step % settings.checkpoint_every == 0:
                    self._save(step, state)
                meter.describe(f"train {self.name} (loss {curves['loss']:.3f})")
                meter.advance()
        return self._finish(state)

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine that reaches 0 one step after the last."""
        warmup = max(1, round(self.settings.warmup_share * self.settings.num_steps))
        if step <= warmup:
            return self.settings.learning_rate * step / warmup
        share = (step - warmup) / (self.settings.num_steps + 1 - warmup)
        return self.settings.learning_rate * (1 + math.cos(math.pi * share)) / 2

    def _step(self, step: int) -> dict[str, float]:
        """One update, normalised by its answer tokens however they spread over micro-batches."""
        started = self.clock.now()
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        batches = [self._batch(number) for number in self._micro_batches(step)]
        num_tokens = self._summed(float(sum(batch.num_tokens for batch in batches)))
        total = 0.0
        for batch in batches:
            loss = self._loss(batch)
            total += loss.item()
            # Gradients are averaged over processes, so each one's share counts that many times.
            self.accelerator.backward(loss * (self.accelerator.num_processes / num_tokens))
        norm = self.accelerator.clip_grad_norm_(
            self.network.parameters(), self.settings.max_grad_norm
        )
        loss_mean, grad_norm = self._summed(total) / num_tokens, float(norm)
        if not (math.isfinite(loss_mean) and math.isfinite(grad_norm)):
            raise ValueError(
                f"training {self.name} diverged at step {step} (loss {loss_mean}, gradient norm "
                f"{grad_norm}); lower learning_rate={self.settings.learning_rate}"
            )
        self._stepper.step()
        self._stepper.zero_grad()
        return {
            "loss": loss_mean,
            "learning_rate": self.learning_rate(step),
            "grad_norm": grad_norm,
            "tokens_per_second": num_tokens / (self.clock.now() - started),
        }

    def _micro_batches(self, step: int) -> list[int]:
        """Numbers of this process's micro-batches: of every step, each process takes its own."""
        processes, mine = self.accelerator.num_processes, self.accelerator.process_index
        first = (step - 1) * self.settings.accumulate * processes
        return [first + turn * processes + mine for turn in range(self.settings.accumulate)]

    def _batch(self, micro_batch: int) -> Batch:
        rows = [self.rows[row] for row in self.order[micro_batch]]
        recorded = self.settings.loss != "cross_entropy"
        batch = collate(rows, self.target.vocab_size, self.settings.max_tokens, recorded)
        return to_device(batch, self.drafter.device)

    def _loss(self, batch: Batch) -> Tensor:
        batch = self.settings.teach(self.target, batch)
        with torch.autocast(self.drafter.device.type, torch.bfloat16, enabled=self.low_precision):
            summed = training_loss(self.network, batch, self.settings.loss, self.target.vocab_size)
        return summed.total

    def _summed(self, value: float) -> float:
        """The sum over all processes."""
        if self.accelerator.num_processes == 1:
            return value
        mine = torch.tensor(value, dtype=torch.float64, device=self.accelerator.device)
        return float(self.accelerator.reduce(mine, "sum"))

    def _optimizer(self) -> torch.optim.AdamW:
        parameters = trained(self.drafter.trainable).values()
        matrices = [parameter for parameter in parameters if parameter.ndim > 1]
        vectors = [parameter for parameter in parameters if parameter.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": self.settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.settings.learning_rate, betas=(0.9, 0.95))

    # ------------------------------------------------------------------------------ state on disk

    def _resume(self) -> tuple[int, State]:
        """(steps done, state): those of the last checkpoint, else of a run that begins now."""
        found = load_checkpoint(self.out, self.drafter.trainable, self.optimizer)
        if found is not None:
            self.history.rewind(found["step"])
            return found["step"], State(**found["state"])
        self.history.rewind(-1)
        before = self._measure()
        self.history.append(0, {"acceptance_length": acceptance_length(before)})
        self.drafter.save(self._best_folder(0))
        return 0, State(before, before)

    def _validate(self, step: int, state: State) -> float:
        """Measure; keep the drafter where it is the best so far."""
        passes = self._measure()
        length = acceptance_length(passes)
        if length > acceptance_length(state.best):
            self.drafter.save(self._best_folder(step))
            state.best, state.best_step = passes, step
        return length

    def _measure(self) -> list[list[float]]:
        num_draft_tokens = self.settings.num_draft_tokens
        with progress("acceptance", len(self.validation), "answers") as meter:
            passes = []
            for answer in self.validation:
                passes += validation_acceptance(self.drafter, [answer], num_draft_tokens).tolist()
                meter.advance()
        return passes

    def _save(self, step: int, state: State) -> None:
        if self.accelerator.is_main_process:
            facts = {"state": asdict(state)}
            save_checkpoint(self.out, step, self.drafter.trainable, self.optimizer, facts)
            self._forget(besides=self._best_folder(state.best_step))

    def _finish(self, state: State) -> dict[str, Any]:
        """The best drafter becomes the artifact; the report, written last, says all is done."""
        self.drafter.load(self._best_folder(state.best_step))
        self.drafter.save(self.out)
        facts = {"best_step": state.best_step, "num_rows": len(self.rows)}
        settings = self.settings
        metrics = write_report(
            self.out,
            self.validation,
            state.before,
            state.best,
            self.seed,
            settings.num_draft_tokens,
            {**facts, "num_parameters": self.drafter.num_parameters},
        )
        clean_up(self.out)
        return metrics

    def _best_folder(self, step: int) -> Path:
        return self.out / f"{BEST}{step:08d}"

    def _forget(self, besides: Path) -> None:
        for folder in self.out.glob(f"{BEST}*"):
            if folder != besides:
                shutil.rmtree(folder)


def accelerator_on(device: str) -> Accelerator:
    """An accelerator on this kind of device, whichever one an earlier run of this process used."""
    if AcceleratorState._shared_state and AcceleratorState().device.type != device:
        AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=device == "cpu", mixed_precision="no")


def clean_up(out: Path) -> None:
    """Remove what only a resumed run needs."""
    delete_checkpoints(out)
    for folder in out.glob(f"{BEST}*"):
        shutil.rmtree(folder)

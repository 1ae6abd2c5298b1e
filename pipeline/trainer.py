"""The loop of training: resume or begin, step by step, keep the best, report.

A step is a function of (seed, step): which rows, which learning rate, what the drafter writes. So a
killed run that goes on from its last checkpoint ends with the weights of an uninterrupted one, bit
for bit; and one of several processes ends with those of a single one, but for rounding.
"""

import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from decode.targets.transformers import TransformersTarget
from drafters.batch_scoring import batch_acceptance
from drafters.network_drafter import NetworkDrafter
from drafters.training import Batch, LossModule
from pipeline.answers import Answer
from pipeline.checkpoints import delete_checkpoints, load_checkpoint, save_checkpoint, trained
from pipeline.feed import Fed, Feed, on_device
from pipeline.history import History
from pipeline.progress import progress
from pipeline.runtime import Runtime
from pipeline.team import Team, full, second
from pipeline.throughput import StepTimer, Weights, Work, speeds, summary
from pipeline.training_data import BatchOrder, Rows
from pipeline.validation import acceptance_length, write_report

if TYPE_CHECKING:
    from pipeline.train_drafter import TrainDrafter

BEST = "best-"

Passes = list[list[float]]  # [answers, 2]: tokens emitted, target passes


@dataclass
class State:
    """What a checkpoint remembers beside tensors."""

    before: Passes
    best: Passes
    best_step: int = 0
    num_tokens: int = 0  # answer tokens learned from so far
    best_num_tokens: int = 0  # when the best was measured


class Trainer:
    """One training run in the folder `out`, as `settings` say; needs nothing of a stage around it.

    `drafter` is where training starts and holds the best in the end. In a team of processes each
    makes a Trainer of its own with equal arguments; the first one writes.
    """

    def __init__(
        self,
        settings: "TrainDrafter",
        target: TransformersTarget,
        runtime: Runtime,
        *,
        name: str,
        out: Path,
        seed: int,
        drafter: NetworkDrafter,
        rows: Rows,  # what settings.gather makes of answers
        validation: Sequence[Answer],
    ) -> None:
        self.settings = settings = settings.resolved(runtime)
        self.target, self.runtime, self.drafter = target, runtime, drafter
        self.name, self.out, self.seed, self.validation = name, out, seed, validation
        self.team = Team(runtime.resolved_device(), runtime.sharding)
        self.feed = self._feed(rows)
        self.num_steps = settings.num_steps or self.feed.num_steps(settings.num_tokens)
        self.history = History(out)
        self.timer = StepTimer(runtime.make_clock(), self.team.device.type == "cuda")
        self.weights = Weights.of_drafter(drafter.trainable), Weights.of_model(target.model)
        # Shares cannot be measured or saved: with fsdp2 the drafter itself stays whole beside them.
        self.network = second(drafter.trainable) if self.team.shards else drafter.trainable
        if settings.gradient_checkpointing:
            self.network.checkpoint_layers(True)
        self.module = self.team.wrap(
            LossModule(self.network, settings.objective, target.vocab_size, settings.chunk_tokens)
        )
        self.optimizer = self._optimizer()

    def run(self) -> dict[str, Any]:
        """Train to the last step; leaves the best drafter, history and validation in `out`."""
        settings = self.settings
        done, state = self._resume()
        with (
            closing(self.feed.from_step(done + 1)) as feed,
            progress(f"train {self.name}", self.num_steps, "steps", done=done) as meter,
        ):
            for step in range(done + 1, self.num_steps + 1):
                curves = self._step(step, feed)
                state.num_tokens += round(curves["num_tokens"])
                curves["num_tokens"] = state.num_tokens
                if step % settings.validate_every == 0 or step == self.num_steps:
                    curves |= self._validate(step, state)
                if self.team.is_first:
                    self.history.append(step, curves)
                if step % settings.checkpoint_every == 0:
                    self._save(step, state)
                meter.describe(f"train {self.name} (loss {curves['loss']:.3f})")
                meter.advance()
        return self._finish(state)

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine that reaches 0 one step after the last."""
        warmup = max(1, round(self.settings.warmup_share * self.num_steps))
        if step <= warmup:
            return self.settings.learning_rate * step / warmup
        share = (step - warmup) / (self.num_steps + 1 - warmup)
        return self.settings.learning_rate * (1 + math.cos(math.pi * share)) / 2

    # ------------------------------------------------------------------------------------ a step

    def _step(self, step: int, feed: Iterator[list[Fed]]) -> dict[str, float]:
        """One update, normalised by its answer tokens however they spread over micro-batches.

        The device is waited for once, at the end.
        """
        self.timer.start()
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        with self.timer.phase("data"):
            batches, works = self._batches(step, next(feed))
        work = sum(works[1:], works[0])
        num_tokens = self.team.sum(torch.tensor(work.num_predicted, dtype=torch.float64))
        total = torch.zeros((), device=self.team.device)
        for turn, batch in enumerate(batches, start=1):
            # Gradients are averaged over processes, so each one's share counts that many times.
            scale = self.team.size / num_tokens.float()
            total += self._learn(batch, scale, last=turn == len(batches))
        with self.timer.phase("optimizer"):
            norm = torch.nn.utils.clip_grad_norm_(
                self.network.parameters(), self.settings.max_grad_norm
            )
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self._curves(step, total, full(norm), work)

    def _batches(self, step: int, fed: list[Fed]) -> tuple[list[Batch], list[Work]]:
        """On the device; where the step is on-policy with the drafter's own text."""
        device = self.team.device
        batches = [on_device(each.batch, device) for each in fed]
        if not self.settings.is_on_policy(step, self.num_steps):
            return batches, [each.work for each in fed]
        self._refresh()
        written = [
            self.settings.write(
                self.target, self.drafter, batch, partial(self.feed.uniforms, one.number)
            )
            for batch, one in zip(batches, fed, strict=True)
        ]
        return written, [Work.of(batch) for batch in written]

    def _learn(self, batch: Batch, scale: Tensor, last: bool) -> Tensor:
        """Add a micro-batch's gradients, times `scale`; its loss summed over tokens."""
        with self.timer.phase("teacher"):
            batch = self.settings.teach(self.target, batch)
        low = self.settings.precision == "bfloat16"
        with self.team.gathering(self.module, now=last):
            autocast = torch.autocast(self.team.device.type, torch.bfloat16, enabled=low)
            with self.timer.phase("forward"), autocast:
                loss = self.module(batch)
            with self.timer.phase("backward"):
                self.team.backward(loss * scale)
        return loss.detach()

    def _curves(self, step: int, total: Tensor, norm: Tensor, work: Work) -> dict[str, float]:
        """What the history says of a step; refuses one after which nothing is finite any more."""
        counts = torch.tensor([*vars(work).values()], dtype=torch.float64, device=total.device)
        sums = self.team.sum(torch.cat([total.double()[None], counts]))
        loss_sum, *counted, grad_norm = torch.cat([sums, norm.double()[None]]).tolist()
        work = Work(*counted)
        loss = loss_sum / work.num_predicted
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise ValueError(
                f"training {self.name} diverged at step {step} (loss {loss}, gradient norm "
                f"{grad_norm}); lower learning_rate={self.settings.learning_rate}"
            )
        drafter, target = self.weights
        flops = drafter.training_flops(work)
        if self.settings.target_in_loop:
            flops += target.forward_flops(work)
        return {
            "loss": loss,
            "learning_rate": self.learning_rate(step),
            "grad_norm": grad_norm,
            "num_tokens": work.num_predicted,
            **speeds(work, flops, self.timer.read()),
        }

    # ---------------------------------------------------------------------------- setting up

    def _feed(self, rows: Rows) -> Feed:
        settings, team = self.settings, self.team
        return Feed(
            rows=rows,
            order=BatchOrder(rows.lengths, settings.batch_size, self.seed, settings.row_tokens),
            accumulate=settings.accumulate,
            vocab_size=self.target.vocab_size,
            max_tokens=settings.max_tokens,
            with_teacher=settings.learns_from_record,
            alone=lambda step: settings.is_on_policy(step, self.num_steps),
            index=team.index,
            size=team.size,
            pinned=team.device.type == "cuda",
        )

    def _optimizer(self) -> torch.optim.AdamW:
        parameters = trained(self.network).values()
        matrices = [parameter for parameter in parameters if parameter.ndim > 1]
        vectors = [parameter for parameter in parameters if parameter.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": self.settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        fused = self.team.device.type == "cuda"
        rate = self.settings.learning_rate
        return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=fused)

    # ------------------------------------------------------------------------------ state on disk

    def _resume(self) -> tuple[int, State]:
        """(steps done, state): those of the last checkpoint, else of a run that begins now."""
        found = load_checkpoint(self.out, self.network, self.optimizer)
        if found is not None:
            if self.team.is_first:
                self.history.rewind(found["step"])
            return found["step"], State(**found["state"])
        before = self._measure()
        if self.team.is_first:
            self.history.rewind(-1)
            self.history.append(0, self._lengths(before))
            self.drafter.save(self._best_folder(0))
        return 0, State(before, before)

    def _validate(self, step: int, state: State) -> dict[str, float]:
        """Measure; keep the drafter where it is the best so far."""
        self._refresh()
        passes = self._measure()
        if acceptance_length(passes) > acceptance_length(state.best):
            if self.team.is_first:
                self.drafter.save(self._best_folder(step))
            state.best, state.best_step = passes, step
            state.best_num_tokens = state.num_tokens
        return self._lengths(passes)

    def _measure(self) -> Passes:
        """Every process measures its share of the validation answers."""
        table = torch.zeros(len(self.validation), 2, dtype=torch.float64)
        mine = torch.arange(len(self.validation))[self.team.index :: self.team.size]
        answers = self.team.share(self.validation)
        table[mine] = batch_acceptance(self.drafter, answers, self.settings.num_draft_tokens)
        return self.team.sum(table).tolist()

    def _lengths(self, passes: Passes) -> dict[str, float]:
        """acceptance_length over all, by domain (/name), by law (@name) and by both."""
        groups: dict[str, Passes] = {}
        for answer, counted in zip(self.validation, passes, strict=True):
            domain, law = f"/{answer.domain}", f"@{answer.law}"
            for group in ("", domain, law, domain + law):
                groups.setdefault(f"acceptance_length{group}", []).append(counted)
        return {name: acceptance_length(groups[name]) for name in sorted(groups)}

    def _refresh(self) -> None:
        """Give the drafter the weights that the team has now."""
        if self.team.shards:
            own = trained(self.drafter.trainable)
            for name, share in trained(self.network).items():
                own[name].data.copy_(full(share.detach()))

    def _save(self, step: int, state: State) -> None:
        facts = {"state": asdict(state)}
        first = self.team.is_first
        save_checkpoint(self.out, step, self.network, self.optimizer, facts, writes=first)
        if first:
            self._forget(besides=self._best_folder(state.best_step))

    def _finish(self, state: State) -> dict[str, Any]:
        """The best drafter becomes the artifact; the report, written last, says all is done."""
        if not self.team.is_first:
            return {}
        self.drafter.load(self._best_folder(state.best_step))
        self.drafter.save(self.out)
        peak = self.runtime.device_peak_flops()
        facts = {
            "best_step": state.best_step,
            "num_steps": self.num_steps,
            "num_tokens": state.num_tokens,
            "best_num_tokens": state.best_num_tokens,
            "num_rows": len(self.feed.rows),
            "num_parameters": self.drafter.num_parameters,
            "num_processes": self.team.size,
            **summary(self.history.lines(), self.team.size, peak),
        }
        num_draft_tokens = self.settings.num_draft_tokens
        passes = (state.before, state.best)
        metrics = write_report(
            self.out, self.validation, *passes, self.seed, num_draft_tokens, facts
        )
        clean_up(self.out)
        return metrics

    def _best_folder(self, step: int) -> Path:
        return self.out / f"{BEST}{step:08d}"

    def _forget(self, besides: Path) -> None:
        for folder in self.out.glob(f"{BEST}*"):
            if folder != besides:
                shutil.rmtree(folder)


def clean_up(out: Path) -> None:
    """Remove what only a resumed run needs."""
    delete_checkpoints(out)
    for folder in out.glob(f"{BEST}*"):
        shutil.rmtree(folder)

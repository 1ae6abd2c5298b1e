"""The loop of training: resume or begin, step by step, keep the best, report.

A step is a function of (seed, step): which rows, which learning rate, what the drafter writes. So a
killed run that goes on from its last checkpoint ends with the weights of an uninterrupted one, bit
for bit; and one of several processes ends with those of a single one, but for rounding.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from decode.targets.transformers import TransformersTarget
from drafters.network_drafter import NetworkDrafter
from drafters.training import Batch, LossModule
from pipeline.answers import Answer
from pipeline.checkpoints import delete_checkpoints, load_checkpoint, save_checkpoint, trained
from pipeline.feed import Fed, Feed, on_device
from pipeline.history import History
from pipeline.judge import Judge, State, delete_bests
from pipeline.optimizer import adamw, learning_rate
from pipeline.progress import progress
from pipeline.runtime import Runtime
from pipeline.team import Team, compile_layers, full, second
from pipeline.throughput import StepTimer, Weights, Work, speeds, summary
from pipeline.training_data import BatchOrder, Rows
from pipeline.validation import write_report

if TYPE_CHECKING:
    from pipeline.train_drafter import TrainDrafter


class Trainer:
    """One training run in the folder `out`, as `settings` say; needs nothing of a stage around it.

    `drafter` is where training starts and holds the best in the end. In a team of processes each
    makes a Trainer of its own with equal arguments; the first one writes. `team` is who trains
    together, by default all processes there are. `part` (i, n): this is the i-th of n runs that
    follow one learning rate curve; such a run ends with its last drafter.
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
        part: tuple[int, int] = (1, 1),
        team: Team | None = None,
    ) -> None:
        self.settings = settings = settings.resolved(runtime)
        self.target, self.runtime, self.drafter = target, runtime, drafter
        self.name, self.out, self.seed, self.part = name, out, seed, part
        self.team = team or Team(runtime.resolved_device(), runtime.sharding)
        self.judge = Judge(drafter, validation, settings.num_draft_tokens, out, self.team)
        on_gpu = self.team.device.type == "cuda"
        self.feed = self._feed(rows, pinned=on_gpu)
        self.num_steps = settings.num_steps or self.feed.num_steps(settings.num_tokens)
        self.history = History(out)
        self.timer = StepTimer(runtime.make_clock(), on_gpu)
        self.weights = Weights.of_drafter(drafter.trainable), Weights.of_model(target.model)
        # Shares cannot be measured or saved: with fsdp2 the drafter itself stays whole beside them.
        self.network = second(drafter.trainable) if self.team.shards else drafter.trainable
        if settings.gradient_checkpointing:
            self.network.checkpoint_layers(True)
        if settings.compile_layers:
            compile_layers(self.network)
            if settings.target_in_loop:
                compile_layers(target.model)
        self.module = self.team.wrap(
            LossModule(self.network, settings.objective, target.vocab_size, settings.chunk_tokens)
        )
        self.optimizer = adamw(trained(self.network).values(), settings, fused=on_gpu)

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

    # ------------------------------------------------------------------------------------ a step

    def _step(self, step: int, feed: Iterator[list[Fed]]) -> dict[str, float]:
        """One update, normalised by its answer tokens however they spread over micro-batches.

        The device is waited for once, at the end.
        """
        self.timer.start()
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(step)
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

    def _learning_rate(self, step: int) -> float:
        part, num_parts = self.part
        before = (part - 1) * self.num_steps
        return learning_rate(self.settings, before + step, num_parts * self.num_steps)

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
            "learning_rate": self._learning_rate(step),
            "grad_norm": grad_norm,
            "num_tokens": work.num_predicted,
            **speeds(work, flops, self.timer.read()),
        }

    # ---------------------------------------------------------------------------- setting up

    def _feed(self, rows: Rows, pinned: bool) -> Feed:
        settings, team = self.settings, self.team
        longest = int(rows.lengths.max()) + settings.num_written
        room = min(self.drafter.max_context, self.target.max_context)
        if longest > room:
            raise ValueError(
                f"texts of {longest} tokens do not fit a context of {room}; lower max_tokens to "
                f"{room - settings.num_written} at most"
            )
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
            pinned=pinned,
        )

    # ------------------------------------------------------------------------------ state on disk

    def _resume(self) -> tuple[int, State]:
        """(steps done, state): those of the last checkpoint, else of a run that begins now."""
        found = load_checkpoint(self.out, self.network, self.optimizer)
        if found is not None:
            if self.team.is_first:
                self.history.rewind(found["step"])
            return found["step"], State(**found["state"])
        state = self.judge.begin()
        if self.team.is_first:
            self.history.rewind(-1)
            self.history.append(0, self.judge.curves(state.before))
        return 0, state

    def _validate(self, step: int, state: State) -> dict[str, float]:
        self._refresh()
        last_counts = self.part[1] > 1 and step == self.num_steps
        return self.judge.curves(self.judge.review(step, state, last_counts))

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
            self.judge.forget_others(state)

    def _finish(self, state: State) -> dict[str, Any]:
        """The best drafter becomes the artifact; the report, written last, says all is done."""
        self.judge.crown(state)
        if not self.team.is_first:
            return {}
        facts = {
            "best_step": state.best_step,
            "num_steps": self.num_steps,
            "num_tokens": state.num_tokens,
            "best_num_tokens": state.best_num_tokens,
            "num_rows": len(self.feed.rows),
            "num_parameters": self.drafter.num_parameters,
            "num_processes": self.team.size,
            **summary(self.history.lines(), self.team.size, self.runtime.device_peak_flops()),
        }
        metrics = write_report(
            self.out,
            self.judge.answers,
            state.before,
            state.best,
            self.seed,
            self.settings.num_draft_tokens,
            facts,
        )
        clean_up(self.out)
        return metrics


def clean_up(out: Path) -> None:
    """Remove what only a resumed run needs."""
    delete_checkpoints(out)
    delete_bests(out)

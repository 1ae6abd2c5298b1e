"""What a drafter in training is worth, and the best one so far."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from drafters.batch_scoring import batch_acceptance
from drafters.network_drafter import NetworkDrafter
from pipeline.answers import Answer
from pipeline.team import Team
from pipeline.validation import acceptance_length

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


@dataclass(frozen=True)
class Judge:
    """Measures a drafter on validation answers, and keeps the best one in a folder of `out`."""

    drafter: NetworkDrafter
    answers: Sequence[Answer]
    num_draft_tokens: int
    out: Path
    team: Team

    def measure(self) -> Passes:
        """Tokens and passes of every answer, each process measuring its share."""
        table = torch.zeros(len(self.answers), 2, dtype=torch.float64)
        mine = torch.arange(len(self.answers))[self.team.index :: self.team.size]
        answers = self.team.share(self.answers)
        table[mine] = batch_acceptance(self.drafter, answers, self.num_draft_tokens)
        return self.team.sum(table).tolist()

    def begin(self) -> State:
        """The drafter before training is the best there is."""
        before = self.measure()
        self._keep(0)
        return State(before, before)

    def review(self, step: int, state: State, keep: bool = False) -> Passes:
        """Measure, and keep the drafter where it is the best so far, or anyway."""
        passes = self.measure()
        if keep or acceptance_length(passes) > acceptance_length(state.best):
            self._keep(step)
            state.best, state.best_step = passes, step
            state.best_num_tokens = state.num_tokens
        return passes

    def curves(self, passes: Passes) -> dict[str, float]:
        """acceptance_length over all, by domain (/name), by law (@name) and by both."""
        groups: dict[str, Passes] = {}
        for answer, counted in zip(self.answers, passes, strict=True):
            domain, law = f"/{answer.domain}", f"@{answer.law}"
            for group in ("", domain, law, domain + law):
                groups.setdefault(f"acceptance_length{group}", []).append(counted)
        return {name: acceptance_length(groups[name]) for name in sorted(groups)}

    def forget_others(self, state: State) -> None:
        """Delete what was the best once."""
        for folder in self.out.glob(f"{BEST}*"):
            if folder != self._folder(state.best_step):
                shutil.rmtree(folder)

    def crown(self, state: State) -> None:
        """The best drafter becomes the artifact; every process has it from now on."""
        self.team.wait()
        self.drafter.load(self._folder(state.best_step))
        self.team.wait()
        if self.team.is_first:
            self.drafter.save(self.out)

    def _keep(self, step: int) -> None:
        if self.team.is_first:
            self.drafter.save(self._folder(step))

    def _folder(self, step: int) -> Path:
        return self.out / f"{BEST}{step:08d}"


def delete_bests(out: Path) -> None:
    """Forget every best; what was crowned stays."""
    for folder in out.glob(f"{BEST}*"):
        shutil.rmtree(folder)

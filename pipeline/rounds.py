"""The rounds of a portfolio: prompts are shared out anew, and each member learns from its share."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from drafters.network_drafter import NetworkDrafter
from pipeline.answers import Answer, Answers
from pipeline.build import NamedEntry, load_target
from pipeline.files import write_json
from pipeline.round_folders import clean_up, join_rounds, round_folder
from pipeline.sharing import (
    by_label,
    by_passes,
    by_topic,
    comparative,
    expected_passes,
    key,
    takers,
    text_features,
    unseen,
)
from pipeline.stage import Workspace
from pipeline.train_drafter import start_drafter
from pipeline.training_data import rehearsal
from pipeline.validation import read_metrics, validation_answers

if TYPE_CHECKING:
    from pipeline.portfolio import Portfolio
    from pipeline.team import Team

ROUNDS = "rounds.json"  # written last: all is done
SHARES = "shares.json"


class Rounds:
    """One run: answers in memory, members as they are now."""

    def __init__(self, settings: "Portfolio", workspace: Workspace) -> None:
        from pipeline.team import Team  # brings accelerate, which takes a second

        self.settings, self.workspace, self.out = settings, workspace, workspace.out
        self.entries: Mapping[str, NamedEntry] = workspace.groups["members"]
        self.target = load_target(workspace.groups["target"], workspace.runtime, whole=True)
        self.team = Team(workspace.runtime.resolved_device(), workspace.runtime.sharding)
        self.members = {name: self._start(name) for name in self.entries}
        first = next(iter(self.members.values()))
        linter = settings.linter(workspace, self.target, first)
        rows = Answers(workspace.inputs["answers"]).rows(
            split="drafter_train", with_teacher=settings.learns_from_record
        )
        self.answers = list(linter.passing(rows))
        self.validation = validation_answers(
            workspace.inputs["answers"], [], settings.validation_prompts
        )
        self.found = linter.report()
        self.rounds: list[dict[str, Any]] = []

    def run(self) -> dict[str, Any]:
        if self.team.is_first:
            self.found.tell()
            self.found.save(self.out)
        shares: dict[str, int] = {}
        for number in range(1, self.settings.num_rounds + 1):
            folder = round_folder(self.out, number)
            shares = self._shares(folder, number, shares)
            self._round(number, folder, shares)
        best = self._passes(self.validation)
        metrics = {**self._metrics(best), "num_rounds": self.settings.num_rounds}
        if self.team.is_first:
            for name in self.members:
                join_rounds(self.out, name, self.settings.num_rounds)
            write_json(self.out / ROUNDS, {"rounds": self.rounds, "metrics": metrics})
            clean_up(self.out)
        self.team.wait()
        return {**metrics, **self.found.metrics}

    def _start(self, name: str) -> NetworkDrafter:
        given = self.workspace.inputs.items()
        inputs = {key.removeprefix(f"{name}/"): path for key, path in given}
        space = replace(self.workspace, inputs=inputs)
        return start_drafter(self.entries[name], self.target, space)

    # ------------------------------------------------------------------------------- sharing out

    def _shares(self, folder: Path, number: int, before: Mapping[str, int]) -> dict[str, int]:
        """`key` of an answer -> member, in training and validation; kept, so that a resumed run
        has what it had.
        """
        path = folder / SHARES
        missing = not path.exists()
        self.team.wait()  # all look before one writes
        if missing:
            shares = self._shared(number, before)
            if self.team.is_first:
                folder.mkdir(parents=True, exist_ok=True)
                write_json(path, shares)
            self.team.wait()
        shares = json.loads(path.read_text(encoding="utf-8"))
        counts: dict[str, Counter[str]] = {name: Counter() for name in self.members}
        for answer in self.answers:
            counts[[*counts][shares[key(answer)]]][answer.domain] += 1
        moved = sum(before[name] != member for name, member in shares.items() if name in before)
        self.rounds.append(
            {
                "round": number,
                "answers": {name: dict(sorted(count.items())) for name, count in counts.items()},
                "moved": moved,
            }
        )
        return shares

    def _shared(self, number: int, before: Mapping[str, int]) -> dict[str, int]:
        answers = [*self.answers, *self.validation]
        smallest_share = self.settings.smallest_share
        if number == 1:
            wanted = [named.entry.domains for named in self.entries.values()]
            choices = takers([answer.domain for answer in answers], wanted)
            if self.settings.begin_with == "labels":
                chosen = by_label([answer.id for answer in answers], choices)
            else:
                chosen = by_topic(self._features(answers), choices, smallest_share)
        else:
            smallest = smallest_share * len(answers) / len(self.members)
            now = np.array([before[key(answer)] for answer in answers])
            chosen = by_passes(comparative(self._expected(answers), now), int(smallest))
        return dict(zip(map(key, answers), chosen.tolist(), strict=True))

    def _features(self, answers: Sequence[Answer]) -> np.ndarray:  # [answers, D]
        embedding = self.target.model.get_input_embeddings().weight.detach()
        return text_features(answers, embedding)

    def _expected(self, answers: Sequence[Answer]) -> np.ndarray:  # [members, answers]
        """Relative passes, learned from the answers that no member has learned from."""
        share = self.settings.unseen_share
        rows = [place for place, a in enumerate(self.answers) if unseen(a.id, share)]
        if not rows:
            raise ValueError(
                f"stages.portfolio.unseen_share={share} of {len(self.answers)} answers is none; "
                "raise it or give more prompts"
            )
        passes = self._passes([self.answers[row] for row in rows])[:, :, 1]
        return expected_passes(self._features(answers), np.array(rows), passes)

    def _learned(self, number: int) -> list[Answer]:
        """The answers of a round: those that members are measured on come in the last."""
        if number == self.settings.num_rounds:
            return self.answers
        share = self.settings.unseen_share
        return [answer for answer in self.answers if not unseen(answer.id, share)]

    def _passes(self, answers: Sequence[Answer]) -> np.ndarray:  # [members, answers, 2]
        """Tokens and target passes of every member."""
        from pipeline.judge import Judge

        length = self.settings.num_draft_tokens
        judges = [
            Judge(member, answers, length, self.out, self.team) for member in self.members.values()
        ]
        return np.stack([np.asarray(judge.measure()) for judge in judges])

    # ----------------------------------------------------------------------------------- training

    def _round(self, number: int, folder: Path, shares: Mapping[str, int]) -> None:
        """Every member after a round; processes that share no parameters train one member each."""
        from pipeline.team import Alone

        team = self.team if self.team.shards or self.team.size == 1 else Alone(self.team)
        for place, name in enumerate(self.members):
            if team is self.team or place % self.team.size == self.team.index:
                self._train(number, folder / name, name, shares, place, team)
        self.team.wait()
        for name, drafter in self.members.items():
            drafter.load(folder / name)
            drafter.prepare_training()

    def _train(
        self,
        number: int,
        out: Path,
        name: str,
        shares: Mapping[str, int],
        place: int,
        team: "Team",
    ) -> None:
        """Write what this round makes of a member, unless it is there."""
        from pipeline.trainer import Trainer

        if read_metrics(out) is not None:
            return
        settings = self.settings.of_round()
        mine = self._mine(self._learned(number), shares, place)
        judged = [answer for answer in self.validation if shares[key(answer)] == place]
        out.mkdir(parents=True, exist_ok=True)
        Trainer(
            settings,
            self.target,
            self.workspace.runtime,
            name=f"{name}, round {number}",
            out=out,
            seed=(self.workspace.seed + number) % 2**63,
            drafter=self.members[name],
            rows=settings.gather(mine, name),
            validation=judged or self.validation,
            part=(number, settings.num_rounds),
            team=team,
        ).run()

    def _mine(
        self, answers: Sequence[Answer], shares: Mapping[str, int], place: int
    ) -> list[Answer]:
        """A member's share, and what it rehearses of the others'."""
        own = [shares[key(answer)] == place for answer in answers]
        rehearsed = rehearsal(sum(own), len(own) - sum(own), self.settings.rehearsal_share)
        return [a for a, mine in zip(answers, own, strict=True) if mine or rehearsed(a.id)]

    def _metrics(self, passes: np.ndarray) -> dict[str, Any]:
        """acceptance_length of validation: each member's, and that of the best for each answer."""
        tokens, counts = passes[0, :, 0].sum(), passes[:, :, 1]
        return {
            **{
                f"acceptance_length_{name}": float(tokens / one.sum())
                for name, one in zip(self.members, counts, strict=True)
            },
            "acceptance_length_best_of": float(tokens / counts.min(axis=0).sum()),
        }

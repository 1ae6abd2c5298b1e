"""Drafters that divide the prompts among themselves: each learns from those that it drafts best.

A round shares the prompts out, and then trains every member on its share. The first round goes by
the members' `domains`, those of several members by topics; the later ones by what the members have
become (hard assignment, as k-means does it, with expected target passes for distance: see
`pipeline.sharing`), so that specialists come from what pays. All rounds follow one learning rate
curve, and a round ends with its last drafter: a member begins a round with prompts chosen for it,
so that hardly any training would seem to be worth it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pipeline.build import parent_need
from pipeline.distill import Distill
from pipeline.launch import sole_writer
from pipeline.lint_report import read_lint
from pipeline.round_folders import clean_up
from pipeline.rounds import ROUNDS, Rounds
from pipeline.runtime import Runtime
from pipeline.stage import Need, Workspace

BEGINNINGS = ("topics", "labels")


@dataclass(frozen=True, kw_only=True)
class Portfolio(Distill):
    """Settings of distill, for each member, and how often the prompts are shared out anew.

    num_steps or num_tokens are a member's, over all rounds. A member has at least `smallest_share`
    of an even share. The artifact holds a folder a member, as stage distill would leave it.
    """

    reads: ClassVar[tuple[str, ...]] = ("target", "members")
    format_version: ClassVar[int] = 4  # members of the same domains begin with topics of them
    summary: ClassVar[str] = "drafters that share the prompts out by acceptance, round by round"

    num_rounds: int
    begin_with: str  # topics or labels: how members of the same domains part them at first
    smallest_share: float
    unseen_share: float  # of the prompts: members are measured on them, and learn from them last

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_rounds < 1:
            raise ValueError(f"num_rounds={self.num_rounds} must be at least 1")
        if self.begin_with not in BEGINNINGS:
            raise ValueError(
                f"begin_with={self.begin_with} is not known; use {' or '.join(BEGINNINGS)}"
            )
        for name, low, high in (("smallest_share", 0, 1), ("unseen_share", 0.01, 0.9)):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name}={getattr(self, name)} must lie between {low} and {high}")
        if self.num_steps and self.num_steps < self.num_rounds:
            raise ValueError(
                f"num_steps={self.num_steps} are fewer than num_rounds={self.num_rounds}"
            )

    def for_groups(self, groups: Mapping[str, Any]) -> "Portfolio":
        """Members are trained alike; one that would be otherwise is refused."""
        for name, member in groups["members"].items():
            if member.entry.overrides:
                raise ValueError(
                    f"pool.entries.{name}.overrides: members of a portfolio are trained alike; "
                    "set stages.portfolio instead"
                )
        return self

    def needs(self, groups: Mapping[str, Any]) -> dict[str, Need]:
        parents = {
            f"{name}/{key}": need
            for name, member in groups["members"].items()
            for key, need in parent_need(groups["pool"], member.entry).items()
        }
        return {"answers": Need("regenerate"), **parents}

    def trains_apart(self, runtime: Runtime) -> bool:
        """Members train side by side, one a process, unless each is sharded over all."""
        return runtime.sharding != "fsdp2"

    def train(self, workspace: Workspace) -> dict[str, Any]:
        """The work of one process of those that train together."""
        out = workspace.out
        with sole_writer(out, workspace.runtime):
            if (out / ROUNDS).exists():  # killed after all was written
                clean_up(out)
                return {**json.loads((out / ROUNDS).read_text())["metrics"], **read_lint(out)}
            return Rounds(self, workspace).run()

    def of_round(self) -> "Portfolio":
        """These settings for one round of one member."""
        return replace(
            self,
            num_steps=self.num_steps // self.num_rounds,
            num_tokens=self.num_tokens // self.num_rounds,
        )

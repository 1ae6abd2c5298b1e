"""One drafter of a portfolio, as an artifact of its own: what other stages know how to read."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pipeline.build import portfolio_members
from pipeline.round_folders import METRICS
from pipeline.stage import Need, Stage, Workspace


@dataclass(frozen=True, kw_only=True)
class Member(Stage):
    """Takes the entry's drafter out of the portfolio that it was trained in."""

    reads: ClassVar[tuple[str, ...]] = ("entry",)
    summary: ClassVar[str] = "one drafter out of the portfolio (entry=<name>)"

    def needs(self, groups: Mapping[str, Any]) -> dict[str, Need]:
        members = portfolio_members(groups["pool"])
        return {"portfolio": Need("portfolio", {"members": members})}

    def run(self, workspace: Workspace) -> dict[str, Any]:
        folder = workspace.inputs["portfolio"] / workspace.groups["entry"].name
        shutil.copytree(folder, workspace.out, dirs_exist_ok=True)
        metrics = workspace.out / METRICS
        content = json.loads(metrics.read_text(encoding="utf-8"))
        metrics.unlink()
        return content

"""Stage profile: what every part of a step costs on this machine."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from rich.table import Table

from decode import SpeculativeDecoder
from decode.cost_measurement import measure_costs
from decode.costs import Costs
from decode.policies.fixed import FixedConfig
from decode.targets.transformers import TransformersTarget
from decode.types import MAX_DRAFT_TOKENS, OFF, Drafter
from pipeline.answers import Answer, Answers
from pipeline.build import build_drafters, drafter_needs, load_target
from pipeline.config import Pool
from pipeline.progress import console
from pipeline.stage import Need, Stage, Workspace

FILE = "costs.json"


@dataclass(frozen=True, kw_only=True)
class Profile(Stage):
    """Times the target at every width, every drafter at every length, and the rest of a step."""

    reads: ClassVar[tuple[str, ...]] = ("target", "pool")
    times: ClassVar[bool] = True
    format_version: ClassVar[int] = 3
    summary: ClassVar[str] = "time drafting, verifying and the rest of a step on this machine"

    widths: list[int]
    draft_lengths: list[int]
    context_tokens: int
    num_repeats: int
    num_contexts: int
    host_tokens: int

    def needs(self, groups: Mapping[str, Any]) -> dict[str, Need]:
        answers = {"answers": Need("regenerate")} if self.num_contexts else {}
        return {**answers, **drafter_needs(groups["pool"])}

    def run(self, workspace: Workspace) -> dict[str, Any]:
        self._check()
        pool: Pool = workspace.groups["pool"]
        target = load_target(workspace.groups["target"], workspace.runtime)
        if self.context_tokens + max(self.widths) > target.max_context:
            raise ValueError(
                f"stages.profile.context_tokens={self.context_tokens} and the widest pass of "
                f"{max(self.widths)} do not fit the target's context of {target.max_context}; "
                "lower it"
            )
        drafters = build_drafters(pool, target, workspace.inputs)
        clock = workspace.runtime.make_clock()
        contexts = self._contexts(workspace)
        with console.status("profile: timing the target and the drafters"):
            costs = measure_costs(
                target,
                drafters,
                clock,
                self.widths,
                self.draft_lengths,
                self.context_tokens,
                self.num_repeats,
                contexts,
            )
            costs = replace(costs, host_seconds=self._host_seconds(target, drafters, workspace))
        (workspace.out / FILE).write_text(costs.to_json() + "\n", encoding="utf-8")
        console.print(costs_table(costs))
        return headline(costs)

    def _check(self) -> None:
        lengths_fit = all(1 <= length <= MAX_DRAFT_TOKENS for length in self.draft_lengths)
        if not (self.draft_lengths and lengths_fit):
            raise ValueError(
                f"profile.draft_lengths={self.draft_lengths} must name lengths between 1 and "
                f"{MAX_DRAFT_TOKENS}"
            )
        if self.num_contexts < 0:
            raise ValueError(f"profile.num_contexts={self.num_contexts} must be 0 or more")
        if not self.widths or not all(1 <= width <= MAX_DRAFT_TOKENS + 1 for width in self.widths):
            raise ValueError(
                f"profile.widths={self.widths} must lie between 1 and {MAX_DRAFT_TOKENS + 1}, "
                "one more than the most drafted tokens"
            )
        if self.num_repeats < 1 or self.context_tokens < 4:
            raise ValueError(
                f"profile.num_repeats={self.num_repeats} must be at least 1 and "
                f"context_tokens={self.context_tokens} at least 4"
            )

    def _contexts(self, workspace: Workspace) -> list[list[int]] | None:
        """Token ids of answers from every domain in turn; None: synthetic text."""
        if not self.num_contexts:
            return None
        by_domain: dict[str, list[Answer]] = {}
        for answer in Answers(workspace.inputs["answers"]).rows(split="validation"):
            by_domain.setdefault(answer.domain, []).append(answer)
        turns = cycle(iter(rows) for rows in by_domain.values())
        picked = [next(rows, None) for rows in islice(turns, self.num_contexts)]
        return [answer.token_ids.tolist() for answer in picked if answer is not None] or None

    def _host_seconds(
        self, target: TransformersTarget, drafters: Mapping[str, Drafter], workspace: Workspace
    ) -> float:
        """Median over the steps of one plain text, from the decoder's own records."""
        policy = FixedConfig(drafter=OFF, num_draft_tokens=0).build(None, list(drafters), 0)
        decoder = SpeculativeDecoder(
            target, dict(drafters), policy=policy, clock=workspace.runtime.make_clock()
        )
        prompt = [(7 * i + 1) % target.vocab_size for i in range(self.context_tokens // 2)]
        done = decoder.generate([prompt], max_new_tokens=self.host_tokens)
        return median(record.host_seconds for record in done.records[0])


def read_costs(folder: Path, key: str | None = None) -> Costs:
    """The costs of a finished profile; refused where `key` names another machine or target."""
    return Costs.from_json((folder / FILE).read_text(encoding="utf-8"), key=key)


def headline(costs: Costs) -> dict[str, Any]:
    """The figures that the menu and the tracker show, in milliseconds."""
    figures: dict[str, Any] = {
        "plain_ms": round(1e3 * costs.plain_seconds, 3),
        "verify_8_over_1": round(costs.verify(8) / costs.verify(1), 3),
        "host_ms": round(1e3 * costs.host_seconds, 3),
    }
    for name in costs.draft_seconds:
        seconds = costs.draft(name, 4)
        figures[f"draft_4_ms/{name}"] = round(1e3 * seconds, 3) if math.isfinite(seconds) else None
    return figures


def costs_table(costs: Costs) -> Table:
    """What a person reads: milliseconds by K, and the acceptance_length from which an arm pays."""
    lengths = [1, 2, 4, 8, 16]
    table = Table(
        title=f"one step by drafted tokens K, ms (break-even length); plain decoding "
        f"{1e3 * costs.plain_seconds:.1f} ms"
    )
    table.add_column("")
    for k in lengths:
        table.add_column(f"K={k}", justify="right")
    verify = [f"{1e3 * costs.verify(k + 1):.1f}" for k in lengths]
    table.add_row("verify", *verify)
    for name in costs.draft_seconds:
        cells = [
            f"{1e3 * costs.draft(name, k):.1f} ({costs.break_even_length(name, k):.2f})"
            for k in lengths
        ]
        table.add_row(f"draft: {name}", *cells)
    return table

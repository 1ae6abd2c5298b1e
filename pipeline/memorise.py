"""A lookup drafter's memory: what the target's own answers say most often after the same tokens."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from decode.types import MAX_DRAFT_TOKENS
from drafters.retrieval import RetrievalConfig, RetrievalDrafter
from drafters.retrieval_table import Table, build_table
from drafters.training import validation_acceptance
from kernels.ngram_table import MOST_BITS
from pipeline.answers import Answer, Answers
from pipeline.build import NamedEntry, load_target
from pipeline.config import changed
from pipeline.lint import Linter
from pipeline.stage import Need, Stage, Workspace
from pipeline.training_data import lot
from pipeline.validation import validation_answers, write_report

MOST_BITS_UNASKED = 24  # 268 MB for four lengths


@dataclass(frozen=True, kw_only=True)
class Memorise(Stage):
    """Fills the table of one retrieval entry; nothing is trained, and no GPU is needed."""

    reads: ClassVar[tuple[str, ...]] = ("target", "entry")
    summary: ClassVar[str] = "a lookup drafter's table of the target's answers (entry=<name>)"

    bits: int | None  # 2^bits slots for the n-grams of each length; None: as the corpus is long
    max_tokens: int  # answer tokens at most, of answers drawn by a hash; 0: all
    drop_loops: bool  # answers that end in a loop are left out
    validation_prompts: int  # of each domain
    num_draft_tokens: int  # K of the acceptance_length that is measured

    def __post_init__(self) -> None:
        for name, most in (("bits", MOST_BITS), ("num_draft_tokens", MAX_DRAFT_TOKENS)):
            given = getattr(self, name)
            if given is not None and not 1 <= given <= most:
                raise ValueError(f"stages.memorise.{name}={given} must lie between 1 and {most}")
        if self.max_tokens < 0 or self.validation_prompts < 1:
            raise ValueError(
                f"stages.memorise.max_tokens={self.max_tokens} must be 0 (all) or more, and "
                f"validation_prompts={self.validation_prompts} at least 1"
            )

    def for_groups(self, groups: Mapping[str, Any]) -> "Memorise":
        """An entry of the pool may remember more, or otherwise, than the others."""
        named: NamedEntry | None = groups.get("entry")
        if named is None or not named.entry.overrides:
            return self
        return changed(self, named.entry.overrides, f"pool.entries.{named.name}.overrides")

    def needs(self, groups: Mapping[str, Any]) -> dict[str, Need]:
        self.config_of(groups["entry"])  # before the target spends hours on answers
        return {"answers": Need("regenerate")}

    def run(self, workspace: Workspace) -> dict[str, Any]:
        named: NamedEntry = workspace.groups["entry"]
        config, folder = self.config_of(named), workspace.inputs["answers"]
        answers = validation_answers(folder, named.entry.domains, self.validation_prompts)
        linter = self.linter(workspace)
        rows = Answers(folder).rows(split="drafter_train", with_teacher=False)
        own = (row for row in rows if not named.entry.domains or row.domain in named.entry.domains)
        texts = self.texts(linter.passing(own), named.name)
        clock = workspace.runtime.make_clock()
        started = clock.now()
        num_tokens = sum(map(len, texts))
        bits = bits_for(num_tokens) if self.bits is None else self.bits
        table = build_table(texts, config.longest, bits)
        seconds = clock.now() - started
        before, after = (
            validation_acceptance(drafter, answers, self.num_draft_tokens).tolist()
            for drafter in (RetrievalDrafter(config, None), RetrievalDrafter(config, table))
        )
        RetrievalDrafter(config, table).save(workspace.out)
        found = linter.report()
        found.tell()
        found.save(workspace.out)
        facts = {
            "num_texts": len(texts),
            "num_tokens": num_tokens,
            "table_bytes": table.num_bytes,
            **{f"kept_share_{n}": share for n, share in enumerate(kept_shares(table), start=1)},
            "build_seconds": seconds,
        }
        metrics = write_report(
            workspace.out, answers, before, after, workspace.seed, self.num_draft_tokens, facts
        )
        return {**metrics, **found.metrics}

    def config_of(self, named: NamedEntry) -> RetrievalConfig:
        """The entry's drafter; ValueError where it is none that remembers."""
        where, config = f"pool.entries.{named.name}", named.entry.drafter
        if not isinstance(config, RetrievalConfig):
            raise ValueError(
                f"{where}.drafter is a {type(config).__name__}, which has no table to fill; give "
                "it drafter: retrieval, or another trained_by"
            )
        if named.entry.init_from is not None:
            raise ValueError(
                f"{where}.init_from={named.entry.init_from}: a table starts from nothing; set it "
                "to null"
            )
        return config

    def linter(self, workspace: Workspace) -> Linter:
        """What looks at the answers before they are remembered."""
        config = workspace.groups["target"]
        target = load_target(config, workspace.runtime, whole=True)
        return Linter.of_answers(
            workspace.inputs["answers"], target, config=config, drop_loops=self.drop_loops
        )

    def texts(self, answers: Iterable[Answer], name: str) -> list[Any]:  # numpy, each [A] int32
        """What is remembered: whole answers, all or those whose lots come first."""
        lots, texts = [], []
        for answer in answers:
            lots.append(lot(f"memorise:{answer.id}:{answer.law}"))
            texts.append(answer.answer_ids.numpy().astype(np.int32))
        if self.max_tokens:
            order = np.argsort(lots, kind="stable")
            ends = np.cumsum([len(texts[place]) for place in order])
            texts = [texts[place] for place in sorted(order[ends <= self.max_tokens])]
        if not texts:
            limit = f", or raise max_tokens={self.max_tokens}" if self.max_tokens else ""
            raise ValueError(
                f"there is nothing for {name} to memorise; run stage=regenerate for prompts of its "
                f"domains, or change the entry's domains{limit}"
            )
        return texts


def bits_for(num_tokens: int) -> int:
    """As many slots as tokens, and so as many as n-grams at most; 2^24 of them are enough."""
    return min(max(1, (num_tokens - 1).bit_length()), MOST_BITS_UNASKED)


def kept_shares(table: Table) -> list[float]:
    """Share of the distinct n-grams with a next token that have their slot, for n = 1, 2, ...

    The others share a slot with one that is more frequent, and are as good as never seen.
    """
    tokens = table.texts.numpy().astype(np.int64)
    base = int(tokens.max()) + 1
    starts = np.flatnonzero((tokens[:-1] >= 0) & (tokens[1:] >= 0))
    names = tokens[starts]  # equal where the n tokens from `starts` on are
    shares = []
    for n, places in enumerate(table.places.numpy(), start=1):
        distinct, names = np.unique(names, return_inverse=True)
        shares.append(int(np.count_nonzero(places)) / max(1, len(distinct)))
        longer = tokens[starts + n + 1] >= 0  # a text ends with -1, so this is within the array
        starts, names = starts[longer], names[longer]
        names = names * base + tokens[starts + n]
    return shares

"""Methods against each other in wall clock: one cell a (prompt, law, repeat, method), journalled as
it finishes.

Methods take turns within every prompt and repeat, and the order rotates, so that a slow minute of
the machine falls on all of them alike. A cell has a clock and policy of its own and noise keyed by
its prompt, so that a run that was killed goes on as if it had not been.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from decode import GenerationResult, SpeculativeDecoder
from decode.clock import Clock
from decode.types import OFF, Drafter, Policy, Router, Sampling, Target
from pipeline.progress import progress

T = TypeVar("T")
PLAIN = "plain"
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Method:
    """A way to decode; without a policy it is plain decoding."""

    name: str
    make_policy: Callable[[], Policy] | None
    router: Router | None = None
    arm: str = ""  # in words, where it is always the same


@dataclass(frozen=True, slots=True)
class EvalPrompt:
    """A prompt as the decoder and the router read it."""

    id: str
    split: str
    domain: str
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """What one method did with one prompt under one law in one repeat. Plain values only."""

    id: str
    split: str
    domain: str
    law: str
    repeat: int
    method: str
    token_ids: list[int]
    passes: int
    drafted: int
    accepted: int
    steps_off: int
    seconds: float  # of all steps; the prompt's prefill apart
    prefill_seconds: float
    draft_seconds: float
    verify_seconds: float
    host_seconds: float
    steps: list[list[float]]  # seconds and tokens of every step
    drafters: dict[str, int]  # steps by what drafted
    dropped: dict[str, str] = field(default_factory=dict)  # drafters that failed, and why

    @property
    def key(self) -> tuple[str, str, int, str]:
        return (self.id, self.law, self.repeat, self.method)

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


class Journal:
    """Finished cells as JSON lines; a line cut short by a kill is dropped and its cell run
    again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cells: dict[tuple[str, str, int, str], Cell] = {}
        if path.exists():
            self._read()

    def _read(self) -> None:
        whole = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                cell = Cell(**json.loads(line))
            except (json.JSONDecodeError, TypeError):
                break  # what follows a torn line was never written
            self.cells[cell.key] = cell
            whole.append(line + "\n")
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text("".join(whole), encoding="utf-8")
        partial.replace(self.path)

    def add(self, cell: Cell) -> None:
        """The cell is on disk when this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(cell)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.cells[cell.key] = cell


@dataclass(frozen=True)
class Race:
    """Everything the cells of one evaluation share."""

    target: Target
    drafters: Mapping[str, Drafter]
    methods: Mapping[str, Sequence[Method]]  # by law
    prompts: Sequence[EvalPrompt]
    laws: Mapping[str, Sampling]
    repeats: int
    max_new_tokens: int
    make_clock: Callable[[], Clock]

    def run(self, journal: Journal) -> list[Cell]:
        """All cells, those of the journal first run by an earlier process."""
        plan = list(self.plan())
        left = [entry for entry in plan if _key(*entry) not in journal.cells]
        if left:
            self._warm_up()
        with progress(
            "evaluate: wall clock", len(plan), "texts", done=len(plan) - len(left)
        ) as meter:
            for prompt, law, repeat, method in left:
                journal.add(self._cell(prompt, law, repeat, method))
                meter.advance()
        return [journal.cells[_key(*entry)] for entry in plan]

    def plan(self) -> Iterator[tuple[EvalPrompt, str, int, Method]]:
        """Every cell, the methods' order rotating from one (prompt, repeat) to the next."""
        turn = 0
        for repeat in range(self.repeats):
            for prompt in self.prompts:
                for law in self.laws:
                    for method in rotated(self.methods[law], turn):
                        yield prompt, law, repeat, method
                    turn += 1

    def decode(
        self, prompt: EvalPrompt, law: str, repeat: int, method: Method, max_new_tokens: int
    ) -> tuple[GenerationResult, SpeculativeDecoder]:
        """One text; the same noise for every method."""
        sampling = self.laws[law]
        decoder = SpeculativeDecoder(
            self.target,
            None if method.make_policy is None else dict(self.drafters),
            policy=None if method.make_policy is None else method.make_policy(),
            router=method.router,
            clock=self.make_clock(),
        )
        done = decoder.generate(
            prompts=[list(prompt.token_ids)],
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            request_ids=[f"{prompt.id}/{law}/{repeat}"],
            router_texts=[prompt.text],
        )
        return done, decoder

    def _warm_up(self) -> None:
        """First passes allocate and load; they are paid for before anything is timed."""
        for law, methods in self.methods.items():
            for method in methods:
                self.decode(self.prompts[0], law, 0, method, WARM_UP_TOKENS)

    def _cell(self, prompt: EvalPrompt, law: str, repeat: int, method: Method) -> Cell:
        done, decoder = self.decode(prompt, law, repeat, method, self.max_new_tokens)
        records, metrics = done.records[0], done.metrics[0]
        return Cell(
            id=prompt.id,
            split=prompt.split,
            domain=prompt.domain,
            law=law,
            repeat=repeat,
            method=method.name,
            token_ids=list(done.token_ids[0]),
            passes=metrics.num_target_passes,
            drafted=metrics.num_drafted,
            accepted=metrics.num_accepted,
            steps_off=sum(record.num_drafted == 0 for record in records),
            seconds=_rounded(metrics.decode_seconds),
            prefill_seconds=_rounded(metrics.prefill_seconds),
            draft_seconds=_rounded(metrics.draft_seconds),
            verify_seconds=_rounded(metrics.verify_seconds),
            host_seconds=_rounded(metrics.host_seconds),
            steps=[[_rounded(record.seconds), record.num_emitted] for record in records],
            drafters=dict(sorted(Counter(r.source or OFF for r in records).items())),
            dropped=dict(decoder.pool.dropped),
        )


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """All of them, another one first in every turn."""
    first = turn % len(items)
    return [*items[first:], *items[:first]]


def _key(prompt: EvalPrompt, law: str, repeat: int, method: Method) -> tuple[str, str, int, str]:
    return (prompt.id, law, repeat, method.name)


def _rounded(seconds: float) -> float:
    """To a nanosecond: finer digits are those of the clock's arithmetic."""
    return round(seconds, 9)


def make_prompt(row: Mapping[str, Any], split: str, token_ids: Sequence[int]) -> EvalPrompt:
    """A prompt row of stage prepare, tokenized."""
    return EvalPrompt(row["id"], split, row["domain"], row["text"], tuple(token_ids))

"""Two model folders on this machine: a drafter at several K against plain decoding, side by side.

    python -m pipeline.bench_pair TARGET DRAFTER --prompts humaneval.jsonl.gz --dtype bfloat16

needs no training here and no GPU. A prompt's methods follow one another, their order rotating, so
that what else the machine does falls on all of them; ratios are of the same prompts, with 95%
bootstrap intervals. Greedy texts that part from plain decoding's are counted.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.table import Table

from decode import Sampling
from decode.clock import Clock, SystemClock
from decode.policies.fixed import FixedPolicy
from decode.resolve import resolve_drafters, resolve_target
from decode.targets.choices import AUTO, BACKENDS, EXACTNESS
from drafters.network_drafter import NetworkDrafter
from drafters.readers import BACKENDS as DRAFT_BACKENDS
from pipeline.bench_command import command, conditions, new_table, show, told
from pipeline.benches import BENCH, BenchData
from pipeline.chat import prompt_ids
from pipeline.scores import ALL, HEADLINE_SPLIT, Resampling, audit, scoreboard
from pipeline.wallclock import PLAIN, EvalPrompt, Journal, Method, Race, make_prompt

NUM_RESAMPLES = 2000


def side_by_side(
    target: Any,  # what SpeculativeDecoder takes: a model, a folder or a name
    drafter: Any,
    prompts: Path,
    *,
    num_prompts: int,
    max_new_tokens: int,
    draft_lengths: Sequence[int],
    temperature: float,
    dtype: str | None = None,
    device: str | None = None,
    backend: str | None = None,
    exactness: str = AUTO,
    drafting: Sequence[str] = ("auto",),
    make_clock: type[Clock] = SystemClock,
) -> dict[str, Any]:
    """One row a method (plain, each K) over all prompts, and under which conditions.

    With several ways of `drafting` the same drafter races against itself.
    """
    target = resolve_target(
        target, tokenizer=None, device=device, dtype=dtype, backend=backend, exactness=exactness
    )
    drafters = {way: drafting_by(way, drafter, target) for way in drafting}
    law = Sampling(temperature=temperature, seed=0)
    fixed = [
        Method(title, partial(FixedPolicy, way, k, None), None, title)
        for k in draft_lengths
        for way in drafting
        for title in [f"K={k}" if len(drafting) == 1 else f"K={k}, {way}"]
    ]
    asked = read_bench(prompts, num_prompts, max_new_tokens, target.tokenizer)
    race = Race(
        target=target,
        drafters=drafters,
        methods={"law": [Method(PLAIN, None), *fixed]},
        prompts=asked,
        laws={"law": law},
        repeats=1,
        max_new_tokens=max_new_tokens,
        make_clock=make_clock,
    )
    with TemporaryDirectory() as folder:
        cells = race.run(Journal(Path(folder) / "cells.jsonl"))
    greedy = ["law"] if law.greedy else []
    rows = scoreboard(cells, race.methods, Resampling(NUM_RESAMPLES, 0))
    return {
        **conditions(target),
        "backend": target.backend,
        "exactness": getattr(target, "exactness", "law"),
        "temperature": temperature,
        "prompts": {prompts.name: len(asked)},
        "max_new_tokens": max_new_tokens,
        "rows": [row for row in rows if row["domain"] == ALL],
        "audit": audit(cells, greedy, asked, target),
    }


def drafting_by(way: str, drafter: Any, target: Any) -> Any:
    """The drafter, whose network reads tokens in this way."""
    (found,) = resolve_drafters(drafter, target).values()
    if isinstance(found, NetworkDrafter):
        found.backend = way
    elif way != "auto":
        raise ValueError(f"drafting={way} needs a drafter with a network; leave it at auto")
    return found


def read_bench(path: Path, number: int, max_new_tokens: int, tokenizer: Any) -> list[EvalPrompt]:
    """The first turns of a benchmark's questions, those whose hash comes first."""
    data = BenchData(
        folder=str(path.parent),
        files=path.name,
        turns="first",
        prompts_per_bench=number,
        laws="greedy",
        max_new_tokens=max_new_tokens,
        max_prompt_tokens=0,
    )
    rows = [asdict(row) for row in data.load(seed=0)[BENCH]]
    return [make_prompt(row, HEADLINE_SPLIT, prompt_ids(tokenizer, row)) for row in rows]


def table(results: dict[str, Any]) -> Table:
    """Tokens a second, the ratio to plain, and what a pass emits and would have to."""
    names = ("method", "tok/s", "speed over plain", "acceptance length", "break-even length")
    made = new_table(f"{results['dtype']} on {results['hardware']['cpu']}", *names)
    for row in results["rows"]:
        ratio = row["speed_ratio"]
        made.add_row(
            row["method"],
            f"{row['tokens_per_second']:.1f}",
            f"{ratio['value']:.2f}x [{ratio['low']:.2f}, {ratio['high']:.2f}]",
            f"{row['acceptance_length']:.2f}",
            f"{row['break_even_length']:.2f}",
        )
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    of_drafter = "a trained drafter's folder, or a causal LM, or ngram"
    parser = command(__doc__, "folder or name of a causal LM", of_drafter)
    parser.add_argument("--prompts", type=Path, required=True, help="a benchmark's JSON lines")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--draft-lengths", type=int, nargs="+", default=[2, 3, 4, 5, 6, 8])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--backend", choices=BACKENDS, help="the target's; auto where none is named"
    )
    parser.add_argument("--exactness", choices=(AUTO, *EXACTNESS), default=AUTO)
    of_drafting = "auto: our own forward where it can; several are raced"
    parser.add_argument(
        "--drafting", choices=DRAFT_BACKENDS, nargs="+", default=["auto"], help=of_drafting
    )
    given = vars(parser.parse_args(arguments))
    out = given.pop("out")
    results = told(side_by_side(given.pop("target"), given.pop("drafter"), **given), out)
    show(table(results))
    if different := results["audit"]["different"]:
        show(f"greedy texts that differ from plain decoding's: {json.dumps(different)}")


if __name__ == "__main__":
    main()

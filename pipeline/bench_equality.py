r"""Is the text the same, token for token, whatever drafts, however much, in whatever company?

    python -m pipeline.bench_equality TARGET ngram DRAFTER --prompts humaneval.jsonl.gz \
        --dtype bfloat16 --backend native --out equality.json

Every prompt is decoded plainly and alone; then by each drafter at each K, by a policy over all of
them, and plainly again, at each batch size. At temperature 0 texts are greedy; above it they are
drawn under Gumbel coupling, where one seed means one text. A text counts from its first token to
the first one that parts; how many tokens were compared is told beside it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from decode import Sampling, SpeculativeDecoder
from decode.clock import SystemClock
from decode.cost_measurement import quick_costs
from decode.costs import Costs
from decode.policies.fixed import FixedPolicy
from decode.policies.named import policy_config
from decode.resolve import resolve_drafters, resolve_target
from decode.targets.choices import AUTO, BACKENDS, EXACTNESS
from decode.types import Drafter, Policy
from pipeline.bench_command import command, conditions, new_table, show, told
from pipeline.bench_pair import read_bench
from pipeline.progress import progress
from pipeline.wallclock import PLAIN

COUNTS = ("tokens", "texts", "parted")
POLICY = "ucb1"  # it tries everything
Texts = list[list[int]]


@dataclass(frozen=True)
class Arm:
    """One way of decoding all prompts."""

    name: str
    drafters: Mapping[str, Drafter]
    policy: Policy | None
    max_rows: int


def arms(
    drafters: Mapping[str, Drafter],
    draft_lengths: Sequence[int],
    batches: Sequence[int],
    costs: Costs | None,  # None where there are no drafters
) -> Iterator[Arm]:
    """Every drafter at every K, a policy over all, and plain decoding in company."""
    for batch in batches:
        if batch > 1:
            yield Arm(PLAIN, {}, None, batch)
        for name, drafter in drafters.items():
            for length in draft_lengths:
                fixed = FixedPolicy(name, length, None)
                yield Arm(f"{name}, K={length}", {name: drafter}, fixed, batch)
        if drafters:
            policy = policy_config(POLICY).build(costs, list(drafters), 0)
            yield Arm(POLICY, drafters, policy, batch)


def parted(wanted: Sequence[int], text: Sequence[int]) -> int | None:
    """Place of the first token in which two texts differ; None where they are one."""
    for place, (one, other) in enumerate(zip(wanted, text, strict=False)):
        if one != other:
            return place
    return None if len(wanted) == len(text) else min(len(wanted), len(text))


def compare(wanted: Texts, texts: Texts) -> dict[str, Any]:
    """Tokens compared, texts that part, and where each of them does."""
    places = [parted(one, other) for one, other in zip(wanted, texts, strict=True)]
    found = {number: place for number, place in enumerate(places) if place is not None}
    tokens = sum(
        len(text) if place is None else place + 1
        for text, place in zip(wanted, places, strict=True)
    )
    return {"tokens": tokens, "texts": len(texts), "parted": len(found), "where": found}


def measure(
    target: Any,
    drafters: Sequence[str],
    prompts: Sequence[Path],
    *,
    num_prompts: int,
    max_new_tokens: int,
    draft_lengths: Sequence[int],
    batches: Sequence[int],
    temperatures: Sequence[float],
    dtype: str | None,
    device: str | None,
    backend: str | None,
    exactness: str,
) -> dict[str, Any]:
    """A row an arm and temperature."""
    target = resolve_target(
        target, tokenizer=None, device=device, dtype=dtype, backend=backend, exactness=exactness
    )
    pool = {Path(n).name: next(iter(resolve_drafters(n, target).values())) for n in drafters}
    asked = [
        list(prompt.token_ids)
        for path in prompts
        for prompt in read_bench(path, num_prompts, max_new_tokens, target.tokenizer)
    ]
    rows = []
    costs = quick_costs(target, pool, SystemClock()) if pool else None
    each = list(arms(pool, draft_lengths, batches, costs))
    with progress("equality", len(temperatures) * (1 + len(each)), "arms") as meter:
        for temperature in temperatures:
            wanted = _texts(target, Arm(PLAIN, {}, None, 1), asked, max_new_tokens, temperature)
            meter.advance()
            for arm in each:
                texts = _texts(target, arm, asked, max_new_tokens, temperature)
                found = compare(wanted, texts)
                rows.append(
                    {"temperature": temperature, "arm": arm.name, "batch": arm.max_rows, **found}
                )
                meter.advance()
    return {
        **conditions(target),
        "backend": target.backend,
        "exactness": getattr(target, "exactness", "law"),
        "width_dependence": getattr(target, "width_dependence", None),
        "prompts": {path.name: num_prompts for path in prompts},
        "max_new_tokens": max_new_tokens,
        "rows": rows,
    }


def _texts(target: Any, arm: Arm, prompts: Texts, max_new_tokens: int, temperature: float) -> Texts:
    coupling = "gumbel" if temperature else "rejection"
    decoder = SpeculativeDecoder(
        target, dict(arm.drafters), arm.policy, coupling=coupling, max_rows=arm.max_rows
    )
    law = Sampling(temperature=temperature, seed=11)
    ids = [f"prompt {number}" for number in range(len(prompts))]
    return decoder.generate(prompts, max_new_tokens, law, request_ids=ids).token_ids


def totals(rows: Sequence[Mapping[str, Any]]) -> dict[float, dict[str, int]]:
    """By temperature: tokens compared and texts that part, over all arms."""
    found: dict[float, dict[str, int]] = {}
    for row in rows:
        sums = found.setdefault(row["temperature"], {"tokens": 0, "texts": 0, "parted": 0})
        for name in sums:
            sums[name] += row[name]
    return found


def table(results: Mapping[str, Any]) -> Table:
    """A line an arm, and one for all of a temperature."""
    title = f"texts equal to plain decoding's alone: {results['dtype']}, {results['exactness']}"
    made = new_table(title, "T", "arm", "rows at once", "tokens", "texts", "parted")
    for row in results["rows"]:
        made.add_row(*(str(row[n]) for n in ("temperature", "arm", "batch", *COUNTS)))
    for temperature, sums in totals(results["rows"]).items():
        made.add_row(str(temperature), "all", "", *(str(sums[name]) for name in COUNTS))
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command(__doc__, "folder or name of a causal LM")
    parser.add_argument("drafters", nargs="*", help="trained folders, causal LMs, or ngram")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--num-prompts", type=int, default=8, help="of each file")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--draft-lengths", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--backend", choices=BACKENDS)
    parser.add_argument("--exactness", choices=(AUTO, *EXACTNESS), default=AUTO)
    given = vars(parser.parse_args(arguments))
    out, names = given.pop("out"), (given.pop("target"), given.pop("drafters"))
    results = told(measure(*names, given.pop("prompts"), **given), out)
    show(table(results))


if __name__ == "__main__":
    main()

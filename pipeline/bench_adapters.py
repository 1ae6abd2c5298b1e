"""What low-rank specialists cost on one base drafter, decoding on its tensors or merged.

    python -m pipeline.bench_adapters TARGET DRAFTER --ranks 4 16 64

Seconds do not depend on what an adapter has learned, so these are random. A draft token's time is
the slope between a short and a long draft; memory is what comes on top of what is there already.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from rich.table import Table

from decode.clock import SystemClock
from decode.cost_measurement import measure_costs
from decode.resolve import resolve_drafter, resolve_target
from decode.types import Drafter
from drafters.base import BuildContext, target_parts
from drafters.lm import LmDrafter
from drafters.lora import ALL_LINEAR, LoraConfig, LoraDrafter
from pipeline.bench_command import command, conditions, new_table, show, told
from pipeline.progress import progress
from pipeline.wallclock import rotated

BASE = "base"
DRAFT_LENGTHS = (1, 9)
CONTEXT_TOKENS = 128
REPEATS = 3  # within a round


def adapter_costs(
    target: Any,  # what SpeculativeDecoder takes: a folder or a name
    drafter: Any,
    *,
    ranks: Sequence[int],
    modules: Sequence[str],
    rounds: int,
    dtype: str | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """One row the base, and two a rank: milliseconds a draft token and megabytes of its own."""
    target = resolve_target(
        target, tokenizer=None, device=device, dtype=dtype, backend="transformers"
    )
    base = resolve_drafter(drafter, target)
    if not isinstance(base, LmDrafter):
        raise ValueError(f"{type(base).__name__} has no layers to adapt; give an lm drafter")
    drafters: dict[str, LmDrafter | LoraDrafter] = {BASE: base}
    for rank in ranks:
        for merged in (False, True):
            name = f"rank {rank}, {'merged' if merged else 'on the base'}"
            drafters[name] = adapted(base, target, rank, modules, merged)
    seconds = in_turn(target, drafters, rounds)
    return {
        **conditions(target),
        "modules": list(modules),
        "rows": [
            {
                "drafter": name,
                "ms_per_draft_token": 1e3 * seconds[name],
                "ratio": seconds[name] / seconds[BASE],
                "megabytes": drafters[name].memory_bytes / 1e6,
            }
            for name in drafters
        ],
    }


def in_turn(target: Any, drafters: Mapping[str, Drafter], rounds: int) -> dict[str, float]:
    """Seconds of a draft token: the median over rounds, in which the drafters take turns."""
    low, high = DRAFT_LENGTHS
    found: dict[str, list[float]] = {name: [] for name in drafters}
    with progress("adapters", rounds, "rounds") as meter:
        for number in range(rounds):
            for name in rotated(list(drafters), number):
                costs = measure_costs(
                    target,
                    {name: drafters[name]},
                    SystemClock(),
                    widths=[1],
                    draft_lengths=DRAFT_LENGTHS,
                    context_tokens=CONTEXT_TOKENS,
                    repeats=REPEATS,
                )
                times = costs.draft_seconds[name]
                found[name].append((times[high] - times[low]) / (high - low))
            meter.advance()
    return {name: median(values) for name, values in found.items()}


def adapted(
    base: LmDrafter, target: Any, rank: int, modules: Sequence[str], merged: bool
) -> LoraDrafter:
    """The base with adapters that are random in A and in B."""
    config = LoraConfig(
        base=BASE,
        rank=rank,
        alpha=2.0 * rank,
        target_modules=list(modules),
        train_head=False,
        merged=merged,
        init_seed=0,
    )
    made = config.build(BuildContext(target_parts(target), weights=None, parts={BASE: base}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in made.adapted.own_tensors().values():
            tensor.copy_(0.01 * torch.randn(tensor.shape, generator=generator))
    if merged:
        made.merge()
    return made


def table(results: dict[str, Any]) -> Table:
    names = ("drafter", "ms a draft token", "against the base", "MB of its own")
    made = new_table(f"adapters on one drafter, {results['dtype']}", *names)
    for row in results["rows"]:
        made.add_row(
            row["drafter"],
            f"{row['ms_per_draft_token']:.2f}",
            f"{row['ratio']:.2f}x",
            f"{row['megabytes']:.2f}",
        )
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command(__doc__, "folder or name of a causal LM", "an lm drafter's folder")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--modules", nargs="+", default=[ALL_LINEAR], help="as q_proj v_proj")
    parser.add_argument("--rounds", type=int, default=9)
    given = vars(parser.parse_args(arguments))
    out = given.pop("out")
    show(table(told(adapter_costs(given.pop("target"), given.pop("drafter"), **given), out)))


if __name__ == "__main__":
    main()

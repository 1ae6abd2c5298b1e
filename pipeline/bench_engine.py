"""What a step of the native CUDA backend costs, and what plain greedy decoding with it makes.

On the GPU, first the choice of tiles, then everything else, in bfloat16 unless told otherwise:

    python -m pipeline.bench_engine TARGET --sweep --out sweep.json
    python -m pipeline.bench_engine TARGET --out engine.json
    python -m pipeline.bench_engine TARGET --overlap off --skip texts --out off.json
    python -m pipeline.bench_engine TARGET --exactness law --skip texts bits --out law.json
    python -m pipeline.bench_engine TARGET --profile --drafter FOLDER --out step.json

Parts: `passes` (milliseconds in a graph by width and batch, and the share of the measured copy
bandwidth at which weights and cache are read), `kernels` (microseconds of each launch of one pass),
`bits` (is a token's row of logits, in every width and batch, the one it has alone?), `texts` (plain
greedy decoding beside transformers compiled over a static cache, prompts and ways in turn).
`--profile` takes whole steps of the engine apart instead: plain, with a lookup and with each
drafter that is named. Its tables are written beside the JSON as text too. Without a GPU all of it
runs in Triton's interpreter (TRITON_INTERPRET=1), on a tiny model, to show that it runs; times are
then none.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from decode.clock import Clock, SystemClock
from kernels.overlap import MODES, mode_in_use, use
from pipeline.bench_command import command, conditions, new_table, show, told
from pipeline.bench_kernels import copy_bandwidth
from pipeline.bench_passes import Engine, bit_equality, kernel_times, pass_times
from pipeline.bench_plain import texts_in_turn
from pipeline.bench_profile import profile_lines, profile_steps, profile_tables
from pipeline.bench_sweep import (
    attention_table,
    pinned_lines,
    sweep,
    sweep_attention,
    sweep_table,
)
from pipeline.progress import progress

WIDTHS = (1, 2, 4, 5, 8, 16)
BATCHES = (1, 4, 16, 64)
PARTS = ("passes", "kernels", "bits", "texts")


def measure(
    name: str,
    *,
    dtype: str,
    device: str | None,
    exactness: str,
    widths: Sequence[int],
    batches: Sequence[int],
    context_tokens: int,
    rounds: int,
    num_prompts: int,
    max_new_tokens: int,
    skip: Sequence[str],
    make_clock: type[Clock] = SystemClock,
) -> dict[str, Any]:
    """Every part that is not skipped, with its conditions."""
    clock = make_clock()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    start = clock.now()
    engine = Engine(name, dtype, device, exactness)
    load_seconds = clock.now() - start
    results: dict[str, Any] = {
        **conditions(engine.target),
        "target": Path(name).name,
        "exactness": exactness,
        "overlap": mode_in_use(),
        "width_dependence": engine.target.width_dependence,
        "context_tokens": context_tokens,
        "load_seconds": load_seconds,
        "copy_bandwidth": copy_bandwidth() if device.startswith("cuda") else None,
    }
    if "passes" not in skip:
        results["passes"] = pass_times(engine, batches, widths, context_tokens, rounds)
    if "kernels" not in skip:
        results["kernels"] = kernel_times(engine, context_tokens, rounds)
    if "bits" not in skip:
        results["bits"] = bit_equality(engine, batches, widths, context_tokens)
    if "texts" not in skip:
        results["texts"] = texts_in_turn(engine, dtype, max_new_tokens, num_prompts, clock)
    results["graphs"] = engine.forward.graphs.report()
    return results


def tables(results: Mapping[str, Any]) -> list[Table | str]:
    """What was measured, as short as it can be said."""
    title = ", ".join(str(results[key]) for key in ("target", "dtype", "exactness", "overlap"))
    parts: list[Table | str] = []
    bandwidth = results["copy_bandwidth"]
    if bandwidth:
        parts.append(f"{title}: copy {bandwidth / 1e12:.2f} TB/s")
    if passes := results.get("passes"):
        parts.append(_pass_table(passes, bandwidth, title))
    if kernels := results.get("kernels"):
        table = new_table("one pass of one token", "kernel", "launches", "us")
        for name, row in kernels.items():
            table.add_row(name, f"{row['launches']:.0f}", f"{row['microseconds']:.1f}")
        total = sum(row["microseconds"] for row in kernels.values())
        table.add_row("all", "", f"{total:.1f}")
        parts.append(table)
    if bits := results.get("bits"):
        parts.append(f"bits: {bits['differ']} of {bits['compared']} tokens differ {bits['where']}")
    if texts := results.get("texts"):
        table = new_table("plain", "way", "tok/s", "over compiled", "equal texts", "first call s")
        for name, row in texts.items():
            ratio = f"{row['over_compiled']['value']:.2f}"
            equal = f"{row['equal_texts']} of {row['num_texts']}"
            first = f"{row['first_call_seconds']:.1f}"
            table.add_row(name, f"{row['tokens_per_second']:.1f}", ratio, equal, first)
        parts.append(table)
    graphs = results["graphs"]
    parts.append(f"{graphs['count']} graphs, {graphs['seconds']:.1f} s, {graphs['bytes']} bytes")
    return parts


def _pass_table(passes: Sequence[Mapping[str, Any]], bandwidth: float | None, title: str) -> Table:
    widths = sorted({row["width"] for row in passes})
    table = new_table(f"ms a pass (share of copy): {title}", "rows", *(f"{w} wide" for w in widths))
    for batch in sorted({row["batch"] for row in passes}):
        cells = []
        for row in passes:
            if row["batch"] == batch and row["seconds"]:
                share = row["bytes"] / row["seconds"] / bandwidth if bandwidth else 0
                cells.append(f"{1e3 * row['seconds']:.3f} ({share:.0%})")
        table.add_row(str(batch), *cells)
    return table


def swept(name: str, dtype: str, device: str | None, num_rows: Sequence[int]) -> dict[str, Any]:
    """The sweep of tiles, with its conditions."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    engine = Engine(name, dtype, device, "law")
    most = None if device.startswith("cuda") else 2
    with progress("engine: tiles", 5, "products") as meter:
        found = sweep(engine.forward, num_rows, meter.advance, most)
    attention = sweep_attention(engine.forward, most)
    bandwidth = copy_bandwidth() if device.startswith("cuda") else None
    return {
        **conditions(engine.target),
        "target": Path(name).name,
        "num_rows": num_rows,
        "copy_bandwidth": bandwidth,
        "sweep": found,
        "attention": attention,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    of_target = "folder or name of a causal LM of the Llama family"
    parser = command(__doc__, of_target, dtype="bfloat16")
    parser.add_argument("--exactness", default="bitwise", help="bitwise or law")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--context-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--skip", nargs="+", default=(), choices=PARTS)
    parser.add_argument(
        "--overlap",
        default=None,
        choices=MODES,
        help="how kernels follow one another; launch unless given",
    )
    parser.add_argument("--profile", action="store_true", help="whole steps, kernel by kernel")
    parser.add_argument(
        "--drafter", nargs="+", default=(), help="folders or names, beside a lookup"
    )
    parser.add_argument("--draft-length", type=int, default=3, help="of profiled steps")
    parser.add_argument("--sweep", action="store_true", help="time candidates for tiles instead")
    parser.add_argument("--sweep-rows", type=int, nargs="+", default=(1, 64))
    given = vars(parser.parse_args(arguments))
    out, name, rows = given.pop("out"), given.pop("target"), given.pop("sweep_rows")
    if (mode := given.pop("overlap")) is not None:
        use(mode)
    profile = given.pop("profile")
    drafters, length = given.pop("drafter"), given.pop("draft_length")
    if profile:
        kept = ("dtype", "device", "exactness", "context_tokens", "rounds")
        settings = {key: given[key] for key in kept}
        found = profile_steps(name, drafters=drafters, draft_length=length, **settings)
        _show_profile(told(found, out), out)
        return
    if given.pop("sweep"):
        results = told(swept(name, given["dtype"], given["device"], rows), out)
        found = results["sweep"]
        show(sweep_table(found, rows), *pinned_lines(found))
        show(attention_table(results["attention"]))
        return
    show(*tables(told(measure(name, **given), out)))


def _show_profile(results: Mapping[str, Any], out: Path | None) -> None:
    show(*profile_tables(results))
    if out is not None:
        text = "\n".join(profile_lines(results)).strip() + "\n"
        out.with_suffix(".txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

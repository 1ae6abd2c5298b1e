"""Tables for README.md out of what stage=benchmark has published, and nothing else.

    python -m pipeline.bench_table outputs/published/decode_h200.json
    python -m pipeline.bench_table JSON... --into README.md
    python -m pipeline.bench_table JSON --plot outputs/published/decode_h200.png

A table's place in a Markdown file is between the lines <!-- table: NAME --> and <!-- end -->, NAME
the JSON file's without its ending. Of a drafter's lengths K the table shows the fastest over all
prompts, which is hindsight, and says so; --every shows them all.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.plots import draw_decode
from pipeline.scores import ALL
from pipeline.wallclock import PLAIN

OURS = "ours"
LENGTH = ", K="  # between a drafter's name and its K


def rendered(content: Mapping[str, Any], every: bool = False) -> str:
    """Markdown: the suite's table, under which conditions, and what was left out.

    Raises ValueError for a suite that has no table.
    """
    suite = content["conditions"]["suite"]
    if suite not in RENDERED:
        raise ValueError(f"suite {suite} has no table; give a file of {', '.join(RENDERED)}")
    lines = RENDERED[suite](content, every)
    failed = [f"Left out: {name} ({why})." for name, why in content.get("failures", {}).items()]
    said = conditions(content["conditions"], content.get("num_prompts"))
    return "\n".join([*lines, "", said, *failed]) + "\n"


def decode_table(content: Mapping[str, Any], every: bool) -> list[str]:
    """One line a way: tokens a second and speed over plain by domain, then over all prompts."""
    rows = {(row["arm"], row["group"]): row for row in content["rows"]}
    domains = [name for name in dict.fromkeys(group for _, group in rows) if name != ALL]
    head = ["way", *(f"{name} tok/s" for name in domains), "over plain, all", "over compiled"]
    lines = []
    for arm in shown(content["rows"], every):
        whole = rows[arm, ALL]
        cells = [_rate(rows.get((arm, name))) for name in domains]
        equal = f"{whole['equal_texts']} of {whole['num_texts']}"
        passes, first = whole["tokens_per_pass"], whole["first_call_seconds"]
        ratios = [_interval(whole[key]) for key in ("over_plain", "over_compiled")]
        lines.append([arm, *cells, *ratios, _number(passes, 2), equal, _number(first, 1)])
    head += ["tokens per pass", "texts equal to plain's", "first call, s"]
    audit = content["audit"]
    number = next(row["num_texts"] for row in content["rows"] if row["group"] == ALL)
    told = (
        f"Medians over {number} prompts, ratios of the same prompts with 95% intervals, prefill "
        "apart; K is the best in hindsight. "
        f"Greedy texts of ours that part from plain decoding's: {audit['own_texts_different']}, "
        f"{audit['own_tokens_compared']:,} tokens compared."
    )
    return [*table(head, lines), "", told]


def shown(rows: Sequence[Mapping[str, Any]], every: bool) -> list[str]:
    """The ways in their order; of a drafter's several K the fastest over all prompts."""
    whole = [row for row in rows if row["group"] == ALL]
    if every:
        return [row["arm"] for row in whole]
    best: dict[str, Mapping[str, Any]] = {}
    for row in whole:
        name = row["arm"].rpartition(LENGTH)[0] or row["arm"]
        if name not in best or _speed(row) > _speed(best[name]):
            best[name] = row
    return [row["arm"] for row in best.values()]


def batch_table(content: Mapping[str, Any], every: bool) -> list[str]:
    """One line a way: tokens a second by batch size, over plain decoding there (that one over
    its smallest batch), and equal texts.
    """
    rows = content["rows"]
    sizes = sorted({row["batch"] for row in rows})

    def cell(row: Mapping[str, Any]) -> str:
        over, of = (
            ("over_alone", f" of batch {sizes[0]}") if row["arm"] == PLAIN else ("over_plain", "")
        )
        return f"{_number(row['tokens_per_second'], 0)} ({_number(row[over], 2)}x{of})"

    lines = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = {row["batch"]: row for row in rows if row["arm"] == arm}
        cells = [cell(own[size]) if size in own else "-" for size in sizes]
        known = [row for row in own.values() if row["equal_to_alone"] is not None]
        equal = sum(row["equal_to_alone"] for row in known)
        lines.append([arm, *cells, f"{equal} of {sum(row['num_texts'] for row in known)}"])
    lengths = content["prompt_lengths"]
    told = f"{len(lengths)} requests, prompts of {min(lengths)} to {max(lengths)} tokens."
    heads = [f"batch {size}, tok/s (over plain)" for size in sizes]
    return [*table(["way", *heads, "texts equal to those alone"], lines), "", told]


def greedy_table(content: Mapping[str, Any], every: bool) -> list[str]:
    """One line a way of drafting: equal texts, and whether anything was accepted."""
    lines = [
        [
            row["name"],
            f"{row['num_equal']} of {row['num_prompts']}",
            f"{row['num_tokens']:,}",
            _number(row["tokens_per_pass"], 2),
        ]
        for row in content["rows"]
    ]
    return table(["way", "equal texts", "tokens", "tokens per pass"], lines)


RENDERED: dict[str, Callable[[Mapping[str, Any], bool], list[str]]] = {
    "decode": decode_table,
    "batch": batch_table,
    "greedy": greedy_table,
}


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    rows = [head, ["---"] * len(head), *lines]
    return [f"| {' | '.join(row)} |" for row in rows]


def conditions(said: Mapping[str, Any], counts: Mapping[str, int] | None) -> str:
    """Model, type, backend, prompts, machine, versions and commit in one sentence."""
    machine, packages = said["hardware"], said["packages"]
    split = ", ".join(f"{name} ({count})" for name, count in (counts or {}).items())
    asked = split or said["prompts"]  # as older files have it
    where = machine["gpu"] if said["device"] == "cuda" else machine["cpu"]
    commit = said["commit"] or "unknown"
    commit = commit[:7] if re.fullmatch(r"[0-9a-f]{40}", commit) else commit
    changed = " with changes" if said.get("diff_sha256") else ""
    parts = [
        f"{said['target']} in {said['dtype']}",
        f"{said.get('backend', 'transformers')} backend ({said.get('exactness', 'law')})",
        f"prompts of {asked}",
        f"greedy, at most {said['max_new_tokens']} new tokens",
        where,
        f"torch {packages['torch']}",
        f"transformers {packages['transformers']}",
        f"commit {commit}{changed}",
    ]
    return f"{', '.join(parts)}."


def placed(text: str, name: str, made: str) -> str:
    """The text with the table in its place. Raises ValueError where there is no such place."""
    place = re.compile(rf"(<!-- table: {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not place.search(text):
        raise ValueError(f"there is no line <!-- table: {name} --> with an <!-- end --> below it")
    return place.sub(lambda found: found[1] + made + found[2], text)


def _rate(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    over = row["over_plain"] and row["over_plain"]["value"]
    return f"{_number(row['tokens_per_second'], 0)} ({_number(over, 2)}x)"


def _interval(value: Mapping[str, Any] | None) -> str:
    if value is None or value["value"] is None:
        return "-"
    low, high = (_number(value[key], 2) for key in ("low", "high"))
    return f"{value['value']:.2f}x [{low}, {high}]"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _speed(row: Mapping[str, Any]) -> float:
    return row["tokens_per_second"] or 0.0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="JSON")
    parser.add_argument("--every", action="store_true", help="every K of a drafter")
    parser.add_argument("--into", type=Path, help="a Markdown file with a place for each table")
    parser.add_argument("--plot", type=Path, help="a PNG of the first file's ratios")
    given = parser.parse_args(arguments)
    contents = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in given.files}
    for name, content in contents.items():
        made = rendered(content, given.every)
        if given.into is None:
            sys.stdout.write(made)
        else:
            text = given.into.read_text(encoding="utf-8")
            given.into.write_text(placed(text, name, made), encoding="utf-8")
    if given.plot is not None:
        content = next(iter(contents.values()))
        draw_decode(content, shown(content["rows"], given.every), given.plot)


if __name__ == "__main__":
    main()

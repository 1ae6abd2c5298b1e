"""What prepare made of the data, on one screen; what is remarkable about it is a warning."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from pipeline.leaks import Boilerplate, Leak, Splits
from pipeline.rows import Row
from pipeline.turns import num_awaited

MUCH_DROPPED = 0.1  # of the rows that were read
LARGE_GROUP = 0.2  # of a domain's rows
MOST_LISTED = 12  # sources or licences
MOST_NAMED = 2  # leaks in a warning
WIDTH = 100


def describe_splits(
    splits: Splits,
    num_texts: int,  # prompts made of responses
    dropped: Mapping[str, int],
    leaks: Sequence[Leak],
    boilerplate: Boilerplate,
    warnings: Sequence[str],
) -> str:
    """Prompts, families and words of each domain in each split, and what became of the rest."""
    rows = [row for members in splits.values() for row in members]
    lines = [
        *_table("prompts (families)", splits, _families),
        *_table("words: median (95%)", splits, _words),
        *_counted("sources", (row.source for row in rows)),
        *_counted("licences", (row.license for row in rows)),
        f"with a response of the data's own: {sum(map(_answered, rows)):,} of {len(rows):,}",
    ]
    if num_texts:
        lines.append(f"texts to be worked on, made of responses: {num_texts:,}")
    if num_later := sum(map(_waits, rows)):
        lines.append(f"later turns, asked after the target's own answer: {num_later:,}")
    if boilerplate.num_runs:
        lines.append(
            f"runs of words taken for boilerplate: {boilerplate.num_runs:,}, the commonest in "
            f"{boilerplate.num_rows:,} prompts ({boilerplate.example})"
        )
    lines += [f"{name.replace('_', ' ')}: {count:,}" for name, count in dropped.items()]
    with_whom = Counter(leak.other_name for leak in leaks)
    lines += [f"  shared text with {name}: {count:,}" for name, count in with_whom.items()]
    return "\n".join([*lines, *(f"warning: {warning}" for warning in warnings)]) + "\n"


def warnings_about(
    splits: Splits,
    dropped: Mapping[str, int],
    leaks: Sequence[Leak],
    groups: Mapping[str, Sequence[Sequence[Row]]],  # domain -> what was split as one
) -> list[str]:
    """One sentence for each thing to look at before going on."""
    found = []
    num_dropped = sum(dropped.values())
    num_read = sum(map(len, splits.values())) + num_dropped
    if num_dropped > MUCH_DROPPED * num_read:
        reasons = ", ".join(f"{name.replace('_', ' ')}: {n:,}" for name, n in dropped.items())
        found.append(f"of {num_read:,} prompts {num_dropped:,} are left out ({reasons})")
    if leaks:
        named = "; ".join(map(str, leaks[:MOST_NAMED]))
        found.append(
            f"{len(leaks):,} prompts leak and are left out, listed in leaks.jsonl: {named}"
        )
    for domain, members in groups.items():
        largest = max(members, key=len)
        share = len(largest) / sum(map(len, members))
        if len(largest) > 1 and share > LARGE_GROUP:
            found.append(
                f"{share:.0%} of the prompts of domain {domain} share a family or a passage with "
                "one another and so stand in one split; give them families, or lower "
                "stages.prepare.boilerplate_rows"
            )
    return found


def _table(title: str, splits: Splits, cell: Callable[[Sequence[Row]], str]) -> list[str]:
    """A row a domain, a column a split, then an empty line."""
    domains = list(dict.fromkeys(row.domain for rows in splits.values() for row in rows))
    table = Table(title, *splits, box=None, pad_edge=False)
    for domain in domains:
        members = ([row for row in rows if row.domain == domain] for rows in splits.values())
        table.add_row(domain, *(cell(rows) if rows else "-" for rows in members))
    console = Console(width=WIDTH, no_color=True)
    with console.capture() as capture:
        console.print(table)
    return [*(line.rstrip() for line in capture.get().splitlines()), ""]


def _families(rows: Sequence[Row]) -> str:
    return f"{len(rows):,} ({len({row.family for row in rows}):,})"


def _words(rows: Sequence[Row]) -> str:
    median, high = np.percentile([len(row.text.split()) for row in rows], [50, 95])
    return f"{median:.0f} ({high:.0f})"


def _answered(row: Row) -> bool:
    return row.response is not None


def _waits(row: Row) -> bool:
    return num_awaited({"messages_json": row.messages_json}) > 0


def _counted(title: str, values: Iterable[str]) -> list[str]:
    """The commonest values with their counts; no line where rows have none."""
    counts = Counter(values)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    named = [(name, count) for name, count in ranked if name]
    if not named:
        return []
    parts = [f"{name} {count:,}" for name, count in named[:MOST_LISTED]]
    if rest := sum(count for _, count in named[MOST_LISTED:]):
        parts.append(f"{len(named) - MOST_LISTED} more {rest:,}")
    if counts[""]:
        parts.append(f"not said {counts['']:,}")
    return [f"{title}: {', '.join(parts)}"]

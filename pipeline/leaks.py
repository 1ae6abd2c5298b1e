"""What prompts share: groups that stay on one side of a split, and leaks that are named.

A leak is a whole text, or a run of words, that stands on two sides of a split or in a benchmark. A
run that stands in very many prompts is boilerplate (an instruction that a whole source begins with)
and tells nothing about any of them.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pipeline.progress import progress
from pipeline.rows import Row, folded, words

PARAPHRASE = "paraphrase"
SHOWN_CHARS = 60

Splits = dict[str, list[Row]]


@dataclass(frozen=True, slots=True)
class Rule:
    """What counts as shared."""

    num_words: int  # in a row; 0: only whole texts count
    most_rows: int  # a run in more prompts than so many is boilerplate


@dataclass(frozen=True, slots=True)
class Leak:
    """A row that shares text with what it must not have seen."""

    row: Row
    other_name: str  # what it shares with: a split, or a benchmark
    other_where: str  # a file and line
    passage: str  # the words that they share

    def __str__(self) -> str:
        mine, other = (
            f" ({where})" if where else "" for where in (self.row.where, self.other_where)
        )
        return (
            f"the prompt {shown(self.row.text)}{mine} shares the words {self.passage!r} with "
            f"{self.other_name}{other}"
        )


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A text that training must not have seen."""

    text: str
    name: str  # of its split or benchmark
    where: str = ""


@dataclass(frozen=True, slots=True)
class Boilerplate:
    """Runs of words that stand in more prompts than the rule lets count."""

    num_runs: int
    num_rows: int  # prompts with the most common of them
    example: str  # that one


def related(rows: Sequence[Row], rule: Rule) -> list[list[Row]]:
    """Groups of rows that must stay together: of one family, or joined by a shared run of words."""
    parent = list(range(len(rows)))

    def find(place: int) -> int:
        while parent[place] != place:
            parent[place] = parent[parent[place]]
            place = parent[place]
        return place

    def join(places: Sequence[int]) -> None:
        for place in places[1:]:
            low, high = sorted((find(places[0]), find(place)))
            parent[high] = low

    families: dict[tuple[str, str], list[int]] = {}
    for place, row in enumerate(rows):
        families.setdefault((row.domain, row.family), []).append(place)
    for members in families.values():
        join(members)
    for sharing in shared_runs([row.text for row in rows], rule.num_words).values():
        if len(sharing) <= rule.most_rows:
            join(sharing)
    groups: dict[int, list[Row]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(find(place), []).append(row)
    return list(groups.values())


def shared_runs(texts: Sequence[str], length: int) -> dict[int, list[int]]:
    """Hash of each run of words that stands in several texts -> their places, ascending."""
    owners: dict[int, int | list[int]] = {}
    if not length:
        return {}
    with progress("prepare: looking for shared passages", len(texts), "prompts") as meter:
        for place, text in enumerate(texts):
            for run in set(map(hash, runs(text, length))):
                there = owners.setdefault(run, place)
                if isinstance(there, list):
                    there.append(place)
                elif there != place:
                    owners[run] = [there, place]
            meter.advance()
    return {run: places for run, places in owners.items() if isinstance(places, list)}


def runs(text: str, length: int) -> Iterator[tuple[str, ...]]:
    """Every run of `length` words."""
    found = words(text)
    return zip(*(found[start:] for start in range(length)), strict=False)


def leaks_against(rows: Sequence[Row], others: Iterable[HeldOut], rule: Rule) -> list[Leak]:
    """The rows that share a whole text or a run of words with one of the others.

    A row is named once, with the first of the others that it shares something with.
    """
    others = list(others)
    if not others or not rows:
        return []
    whole = {_bare(other.text): other for other in reversed(others)}
    texts = [*(other.text for other in others), *(row.text for row in rows)]
    shared = shared_runs(texts, rule.num_words)
    first: dict[int, int] = {}  # place of a row -> of the first of the others
    for places in shared.values():
        if places[0] < len(others) and len(places) <= rule.most_rows:
            for place in places:
                first[place] = min(places[0], first.get(place, places[0]))
    leaks = []
    for place, row in enumerate(rows, start=len(others)):
        if (text := _bare(row.text)) in whole:
            other, passage = whole[text], shortened(text)
        elif place in first:
            other = others[first[place]]
            passage = _common_run(row.text, other.text, rule.num_words)
        else:
            continue
        leaks.append(Leak(row, other.name, other.where, passage))
    return leaks


def refuse_leaks(splits: Splits, rule: Rule) -> Boilerplate:
    """What was too common to count; raises ValueError where two splits share a text or a run.

    Other wordings of test prompts share passages with them, and with nothing else.
    """
    places: dict[str, str] = {}
    for name, rows in splits.items():
        for row in rows:
            if (other := places.setdefault(folded(row.text), name)) != name:
                raise ValueError(
                    f"the prompt {shown(row.text)} stands in the splits {other} and {name}; "
                    "take it out of one of them"
                )
    flat = [(name, row) for name, rows in splits.items() for row in rows]
    common: dict[int, list[int]] = {}
    for run, members in shared_runs([row.text for _, row in flat], rule.num_words).items():
        sides = {"test" if flat[p][0] == PARAPHRASE else flat[p][0]: flat[p] for p in members}
        if len(members) > rule.most_rows:
            common[run] = members
        elif len(sides) > 1:
            _refuse_pair(sides, rule)
    if not common:
        return Boilerplate(0, 0, "")
    most = max(common, key=lambda run: len(common[run]))
    text = flat[common[most][0]][1].text
    example = next(words for words in runs(text, rule.num_words) if hash(words) == most)
    return Boilerplate(len(common), len(common[most]), " ".join(example))


def _refuse_pair(sides: Mapping[str, tuple[str, Row]], rule: Rule) -> NoReturn:
    (one, first), (other, second) = list(sides.values())[:2]
    raise ValueError(
        f"the prompts {shown(first.text)} ({one}) and {shown(second.text)} ({other}) share "
        f"{rule.num_words} words in a row "
        f"({_common_run(first.text, second.text, rule.num_words)}); take one out, or raise "
        "stages.prepare.leak_words"
    )


def _common_run(one: str, other: str, length: int) -> str:
    """The first run of words of `one` that also stands in `other`."""
    there = set(runs(other, length))
    return " ".join(next(run for run in runs(one, length) if run in there))


def _bare(text: str) -> str:
    """What two texts have in common when they differ in case, spacing and punctuation only."""
    return " ".join(words(text)) or folded(text)


def shown(text: str) -> str:
    """A text short enough for a message."""
    return repr(shortened(text))


def shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARS else line[: SHOWN_CHARS - 3] + "..."


def save_leaks(leaks: Sequence[Leak], path: Path) -> None:
    """One JSON object a line: every row that was dropped, and why."""
    with path.open("w", encoding="utf-8") as file:
        for leak in leaks:
            facts = {"where": leak.row.where, "id": leak.row.id, "text": leak.row.text}
            shared = {
                "shares": leak.passage,
                "with": leak.other_name,
                "with_where": leak.other_where,
            }
            file.write(json.dumps({**facts, **shared}, ensure_ascii=False) + "\n")

"""What prompts share: groups that stay on one side of a split, and leaks that are refused."""

from collections.abc import Iterator, Sequence

from pipeline.progress import progress
from pipeline.rows import Row, folded, words

PARAPHRASE = "paraphrase"
COMMON_SHARE, COMMON_ROWS = 0.05, 20  # a run in more rows than both is boilerplate, not a leak
SHOWN_CHARS = 60

Splits = dict[str, list[Row]]


def related(rows: Sequence[Row], leak_words: int) -> list[list[Row]]:
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

    families: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        families.setdefault(row.family, []).append(place)
    for members in families.values():
        join(members)
    for sharing in shared_runs(rows, leak_words).values():
        join(sharing)
    groups: dict[int, list[Row]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(find(place), []).append(row)
    return list(groups.values())


def shared_runs(rows: Sequence[Row], length: int) -> dict[int, list[int]]:
    """Hash of each run of words in several rows -> those rows' places; boilerplate left out."""
    owners: dict[int, int | list[int]] = {}
    if not length:
        return {}
    with progress("prepare: looking for shared passages", len(rows), "prompts") as meter:
        for place, row in enumerate(rows):
            for run in set(map(hash, runs(row.text, length))):
                there = owners.setdefault(run, place)
                if isinstance(there, list):
                    there.append(place)
                elif there != place:
                    owners[run] = [there, place]
            meter.advance()
    common = max(COMMON_ROWS, COMMON_SHARE * len(rows))
    return {
        run: places
        for run, places in owners.items()
        if isinstance(places, list) and len(places) <= common
    }


def runs(text: str, length: int) -> Iterator[tuple[str, ...]]:
    """Every run of `length` words."""
    found = words(text)
    for start in range(len(found) - length + 1):
        yield tuple(found[start : start + length])


def refuse_leaks(splits: Splits, leak_words: int) -> None:
    """Raise ValueError where two splits share a text or a run of words.

    Other wordings of test prompts share passages with them, and with nothing else.
    """
    places: dict[str, tuple[str, Row]] = {}
    for name, rows in splits.items():
        for row in rows:
            other, _ = places.setdefault(folded(row.text), (name, row))
            if other != name:
                raise ValueError(
                    f"the prompt {shown(row.text)} stands in the splits {other} and {name}; "
                    "take it out of one of them"
                )
    flat = [(name, row) for name, rows in splits.items() for row in rows]
    shared = shared_runs([row for _, row in flat], leak_words)
    for members in shared.values():
        sides = {"test" if flat[p][0] == PARAPHRASE else flat[p][0]: flat[p] for p in members}
        if len(sides) > 1:
            (one, first), (other, second) = list(sides.values())[:2]
            common = set(runs(first.text, leak_words)) & set(runs(second.text, leak_words))
            passage = " ".join(min(common, default=()))
            raise ValueError(
                f"the prompts {shown(first.text)} ({one}) and {shown(second.text)} ({other}) share "
                f"{leak_words} words in a row ({passage}); take one out, or raise "
                "stages.prepare.leak_words"
            )


def shown(text: str) -> str:
    """A text short enough for a message."""
    line = " ".join(text.split())
    return repr(line if len(line) <= SHOWN_CHARS else line[: SHOWN_CHARS - 3] + "...")

"""Prompts about a text: what a person might ask of the responses that a data set brings along.

Data sets of questions rarely hold texts to be summarised, translated or searched, and a drafter
that has seen none loses there. Where a response is prose, it can be such a text; what the target
makes of it is its own.
"""

import re
from collections.abc import Mapping, Sequence

from pipeline.rows import Row, fraction, make_row

FEWEST_WORDS, MOST_WORDS = 40, 300
LETTERS = 0.93  # of a prose's characters, spaces among them; of code and formulas fewer
AMONG = 2  # other texts of the domain, at most, that a text is searched for among
PLACES = re.compile(r"\{(text|texts|question)\}")


def tasks_about(rows: Sequence[Row], percent: int, tasks: Sequence[str], seed: int) -> list[Row]:
    """A prompt about the response of `percent` of every hundred rows that have one in prose.

    It is of the row's domain and family. Which rows, and which task, follows from seed and id.

    A task may say where things go: {text}, the response (else it comes last); {question}, what it
    answers; {texts}, the response among the next ones of its domain, as far as MOST_WORDS go.
    """
    domains: dict[str, list[Row]] = {}
    for row in rows:
        if is_prose(row.response or ""):
            domains.setdefault(row.domain, []).append(row)
    found = []
    for written in domains.values():
        for place, row in enumerate(written):
            if fraction(seed, f"{row.id}/text") * 100 >= percent:
                continue
            task = tasks[int(fraction(seed, f"{row.id}/task") * len(tasks))]
            texts = [other.response or "" for other in written[place : place + 1 + AMONG]]
            text = filled(
                task,
                {
                    "text": texts[0],
                    "texts": "\n\n".join(among(texts, fraction(seed, f"{row.id}/place"))),
                    "question": row.text,
                },
            )
            found.append(
                make_row(
                    text=text,
                    messages=[{"role": "user", "content": text}],
                    response=None,
                    domain=row.domain,
                    family=row.family,
                    source=row.source,
                    license=row.license,
                    where=row.where,
                )
            )
    return found


def filled(task: str, parts: Mapping[str, str]) -> str:
    """The task with what it names put in its place, at once: a text may itself hold braces."""
    if not re.search(r"\{texts?\}", task):
        task = f"{task}\n\n{{text}}"
    return PLACES.sub(lambda found: parts[found[1]], task)


def among(texts: Sequence[str], share: float) -> list[str]:
    """The first text and those after it that fit, the first moved back by a share of them."""
    kept = [texts[0]]
    for text in texts[1:]:
        if sum(len(other.split()) for other in [*kept, text]) <= MOST_WORDS:
            kept.append(text)
    place = int(share * len(kept))
    return [*kept[1 : place + 1], kept[0], *kept[place + 1 :]]


def is_prose(text: str) -> bool:
    """Whether it is a text of usual length that is neither code nor formulas."""
    if not FEWEST_WORDS <= len(text.split()) <= MOST_WORDS:
        return False
    return sum(sign.isalpha() or sign.isspace() for sign in text) >= LETTERS * len(text)

"""Prompts about a text: what a person might ask of the responses that a data set brings along.

Data sets of questions rarely hold texts to be summarised or translated, and a drafter that has seen
none loses there. Where a response is prose, it can be such a text; what the target makes of it is
its own.
"""

from collections.abc import Sequence

from pipeline.rows import Row, fraction, make_row

FEWEST_WORDS, MOST_WORDS = 40, 300
LETTERS = 0.93  # of a prose's characters, spaces among them; of code and formulas fewer


def tasks_about(rows: Sequence[Row], percent: int, tasks: Sequence[str], seed: int) -> list[Row]:
    """A prompt about the response of `percent` of every hundred rows that have one in prose.

    It is of the row's domain and family. Which rows, and which task, follows from seed and id.
    """
    found = []
    for row in rows:
        if not is_prose(row.response or "") or fraction(seed, f"{row.id}/text") * 100 >= percent:
            continue
        task = tasks[int(fraction(seed, f"{row.id}/task") * len(tasks))]
        text = f"{task}\n\n{row.response}"
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


def is_prose(text: str) -> bool:
    """Whether it is a text of usual length that is neither code nor formulas."""
    if not FEWEST_WORDS <= len(text.split()) <= MOST_WORDS:
        return False
    return sum(sign.isalpha() or sign.isspace() for sign in text) >= LETTERS * len(text)

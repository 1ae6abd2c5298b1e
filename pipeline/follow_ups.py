"""Prompts that go on: what a person might say after the target's first answer to a prompt.

Data sets of prompts mostly hold first turns, and a drafter that has seen nothing else loses where a
conversation goes on. Such a prompt holds null in place of the answer, which the target fills in
(`pipeline.turns`), and is answered in its turn.
"""

import json
from collections.abc import Sequence
from dataclasses import replace

from pipeline.rows import Row, fraction


def with_follow_ups(
    rows: Sequence[Row], percent: int, requests: Sequence[str], seed: int
) -> list[Row]:
    """The rows, and behind `percent` of every hundred conversations among them one turn more.

    Which ones go on, and with which request, follows from seed and id alone. A first turn keeps its
    id, by which other choices are made; the second's is that and its number.
    """
    found = []
    for row in rows:
        messages = json.loads(row.messages_json or "[]")
        if not messages or fraction(seed, f"{row.id}/goes on") * 100 >= percent:
            found.append(row)
            continue
        request = requests[int(fraction(seed, f"{row.id}/request") * len(requests))]
        messages += [
            {"role": "assistant", "content": None},
            {"role": "user", "content": request},
        ]
        second = replace(
            row,
            id=f"{row.id}/2",
            text=request,
            messages_json=json.dumps(messages, ensure_ascii=False),
            response=None,
        )
        found += [row, second]
    return found

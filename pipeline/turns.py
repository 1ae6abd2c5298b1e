"""Prompts that go on after the target's own answers: the later turns of a conversation.

Such a prompt comes with null in place of each answer. It is asked once those turns were answered,
under the same law; the answers then stand in its messages as the target gave them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.answers import Answers


def num_awaited(prompt: Mapping[str, Any]) -> int:
    """Answers that a prompt waits for."""
    return sum(message["content"] is None for message in _messages(prompt))


def completed(
    prompts: Sequence[Mapping[str, Any]], folder: Path, split: str, tokenizer: Any
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(law, prompt with the answers in place) for each law that all its earlier turns were answered
    under; where one was left out, those after it are left out too.
    """
    wanted = {_turn(prompt, n) for prompt in prompts for n in range(1, num_awaited(prompt) + 1)}
    begun = {name.removesuffix("/1") for name in wanted if name.endswith("/1")}
    said: dict[tuple[str, str], str] = {}
    laws: dict[str, None] = {}
    for answer in Answers(folder).rows(split, with_teacher=False):
        name = f"{answer.id}/1" if answer.id in begun else answer.id
        if name in wanted:
            laws[answer.law] = None
            text = tokenizer.decode(answer.answer_ids, skip_special_tokens=True)
            said[name, answer.law] = text.strip()
    for prompt in prompts:
        for law in laws:
            keys = [(_turn(prompt, n), law) for n in range(1, num_awaited(prompt) + 1)]
            if all(key in said for key in keys):
                yield law, _filled(prompt, [said[key] for key in keys])


def _filled(prompt: Mapping[str, Any], answers: Sequence[str]) -> Mapping[str, Any]:
    texts = iter(answers)
    messages = [
        {**message, "content": next(texts) if message["content"] is None else message["content"]}
        for message in _messages(prompt)
    ]
    return {**prompt, "messages_json": json.dumps(messages, ensure_ascii=False)}


def _messages(prompt: Mapping[str, Any]) -> list[dict[str, Any]]:
    return json.loads(prompt["messages_json"] or "[]")


def _turn(prompt: Mapping[str, Any], number: int) -> str:
    """The id of an earlier turn: ids of turns end with their number, which the first may lack."""
    return f"{prompt['id'].rpartition('/')[0]}/{number}"

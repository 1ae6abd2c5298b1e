"""Prompt rows: how a raw row of any format becomes one, and which split it goes to."""

import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FORMATS = ("messages", "prompt_response", "text")
SPLITS = ("drafter_train", "router_train", "validation", "test")
ROLES = ("system", "user", "assistant")
COLUMNS = ("id", "domain", "family", "text", "messages_json", "response")
MIN_TEXT_WORDS = 4  # of a text: two for the prefix, two for its continuation


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt, as every later stage reads it."""

    id: str  # a digest of split-independent content
    domain: str
    family: str  # the unit of every split
    text: str  # what the person wrote
    messages_json: str  # JSON list of {role, content}; "[]": a text to be continued
    response: str | None
    # For the summary and for messages; later stages read the COLUMNS only.
    source: str = ""
    license: str = ""
    where: str = field(default="", compare=False)  # file and line, or data set and row


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """How raw rows are read: which columns hold what."""

    format: str  # messages, prompt_response or text
    prompt_column: str
    response_column: str
    messages_column: str
    text_column: str
    domain_column: str
    family_column: str
    source_column: str
    license_column: str
    prefix_words: int  # of a text: at most these, and at most half of it
    max_rows_per_domain: int  # 0: all; else those whose hash comes first

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"data.format={self.format} is not known; use {', '.join(FORMATS)}")
        if self.prefix_words < 1:
            raise ValueError(f"data.prefix_words={self.prefix_words} must be at least 1")
        if self.max_rows_per_domain < 0:
            raise ValueError(
                f"data.max_rows_per_domain={self.max_rows_per_domain} must be 0 or more"
            )

    def read(
        self, raw: Mapping[str, Any], where: str, domain: str, fixed_domain: str | None = None
    ) -> Row:
        """The row; raises ValueError that names `where` it stands where it has no prompt.

        It is of the fixed domain, else of the one that it names, else of `domain`.
        """
        messages, text, response = getattr(self, f"_{self.format}")(raw, where)
        text = normalise(text)
        if not text:
            raise ValueError(f"{where} has an empty prompt; fill it or delete the row")
        return make_row(
            text=text,
            messages=messages,
            response=normalise(response) or None if response else None,
            domain=fixed_domain or str(raw.get(self.domain_column) or domain),
            family=str(raw.get(self.family_column) or ""),
            source=str(raw.get(self.source_column) or ""),
            license=str(raw.get(self.license_column) or ""),
            where=where,
        )

    def _prompt_response(
        self, raw: Mapping[str, Any], where: str
    ) -> tuple[list[dict[str, str]], str, str | None]:
        text = _string(raw, self.prompt_column, where, "data.prompt_column")
        messages = [{"role": "user", "content": normalise(text)}]
        response = raw.get(self.response_column)
        return messages, text, response if isinstance(response, str) else None

    def _messages(
        self, raw: Mapping[str, Any], where: str
    ) -> tuple[list[dict[str, str]], str, str | None]:
        """The conversation up to its last user turn, and what the assistant says next."""
        turns = raw.get(self.messages_column)
        if isinstance(turns, str):
            turns = _parsed(turns, self.messages_column, where)
        if not isinstance(turns, list) or not turns:
            raise ValueError(_no_column(raw, self.messages_column, where, "data.messages_column"))
        messages = [_turn(turn, where) for turn in turns]
        users = [place for place, turn in enumerate(messages) if turn["role"] == "user"]
        if not users:
            raise ValueError(f"{where} has no message of role user; add one or delete the row")
        last = users[-1]
        after = messages[last + 1 : last + 2]
        return (
            messages[: last + 1],
            messages[last]["content"],
            after[0]["content"] if after else None,
        )

    def _text(
        self, raw: Mapping[str, Any], where: str
    ) -> tuple[list[dict[str, str]], str, str | None]:
        """The first words are the prompt, the rest is the response."""
        text = normalise(_string(raw, self.text_column, where, "data.text_column"))
        words = [match.end() for match in re.finditer(r"\S+", text)]
        if not words:
            return [], "", None
        if len(words) < MIN_TEXT_WORDS:
            raise ValueError(
                f"{where} has a text of {len(words)} words; {MIN_TEXT_WORDS} are needed"
            )
        cut = words[min(self.prefix_words, len(words) // 2) - 1]
        return [], text[:cut], text[cut:]


def make_row(
    *,
    text: str,
    messages: list[dict[str, str]],
    response: str | None,
    domain: str,
    family: str,
    source: str = "",
    license: str = "",
    where: str = "",
) -> Row:
    """A row whose id follows from its content; without a family it is one of its own."""
    messages_json = json.dumps(messages, ensure_ascii=False)
    key = hashlib.sha256(f"{domain}\n{text}\n{messages_json}".encode()).hexdigest()
    return Row(
        id=f"{domain}-{key[:16]}",
        domain=domain,
        family=family or key[:16],
        text=text,
        messages_json=messages_json,
        response=response,
        source=source,
        license=license,
        where=where,
    )


def normalise(text: str) -> str:
    """Unicode NFC, plain line ends, no control characters, no space at either end."""
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n"))
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc").strip()


def folded(text: str) -> str:
    """What two texts have in common when they differ in case and spacing only."""
    return " ".join(text.casefold().split())


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def fraction(seed: int, key: str) -> float:
    """A number in [0, 1) that depends on the seed and the key alone."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{key}".encode()).digest()[:8], "big") / 2**64


def _string(raw: Mapping[str, Any], column: str, where: str, key: str) -> str:
    if not isinstance(raw.get(column), str):
        raise ValueError(_no_column(raw, column, where, key))
    return raw[column]


def _no_column(raw: Mapping[str, Any], column: str, where: str, key: str) -> str:
    there = ", ".join(map(str, raw)) or "nothing"
    return f"{where} has no {column} (it has {there}); add it, or name the column with {key}=NAME"


def _parsed(turns: str, column: str, where: str) -> Any:
    try:
        return json.loads(turns)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where} has {column} that are no JSON ({error.msg}); give a list of objects with a "
            "role and a content"
        ) from error


def _turn(turn: Any, where: str) -> dict[str, str]:
    if not isinstance(turn, Mapping) or not isinstance(turn.get("content"), str):
        raise ValueError(f"{where} has a message without text; each needs a role and a content")
    if turn.get("role") not in ROLES:
        raise ValueError(
            f"{where} has a message of role {turn.get('role')}; use {', '.join(ROLES)}"
        )
    return {"role": turn["role"], "content": normalise(turn["content"])}

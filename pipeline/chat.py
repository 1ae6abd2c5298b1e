"""Prompts as the target reads them: its own chat template, else the bare text."""

import json
import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from decode.prompts import read_prompts

log = logging.getLogger(__name__)


def load_prompts(folder: Path) -> Mapping[str, Any]:
    """The splits that stage=prepare wrote, each a sequence of prompt rows."""
    from datasets import load_from_disk

    return load_from_disk(str(folder / "datasets"))


def prompt_ids(tokenizer: Any, prompt: Mapping[str, Any]) -> list[int]:
    """Token ids up to where the answer begins.

    A prompt without messages is a text to be continued, and so is every prompt of a target that
    has no template.
    """
    messages = json.loads(prompt["messages_json"] or "[]")
    if messages and tokenizer.chat_template:
        return read_prompts(messages, tokenizer)[0].token_ids  # as the decoder reads them
    if messages:
        _say_no_template(tokenizer.name_or_path)
    return tokenizer(prompt["text"]).input_ids


@cache
def _say_no_template(name: str) -> None:
    log.warning("%s has no chat template, so prompts are read as plain text", name)

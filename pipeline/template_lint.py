"""Prompts as the target reads them: nothing lost on the way, and today as when it answered."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.chat import prompt_ids

MARK = "the answer stands here"
KEPT_ROLES = ("system", "user")  # templates may shorten what the assistant said before


class TemplateLint:
    """Checks of rendered prompts against the messages that they were made of."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.num_checked = 0
        self.warnings: list[str] = []
        self._dated = "strftime_now" in str(tokenizer.chat_template or "")

    def check(self, prompt: Mapping[str, Any], token_ids: Sequence[int]) -> None:
        """Raise ValueError where the row of prepare and the token ids of its prompt disagree."""
        messages = json.loads(prompt["messages_json"] or "[]")
        if any(message["content"] is None for message in messages):
            return  # waits for answers of the target's own, whatever they are
        if messages and self.tokenizer.chat_template:
            if not self.num_checked:
                self._check_generation_prompt(messages)
            self._check_contents(prompt["id"], messages)
        self._check_same(prompt["id"], list(token_ids), prompt_ids(self.tokenizer, prompt))
        self.num_checked += 1

    def _check_contents(self, name: str, messages: Sequence[Mapping[str, str]]) -> None:
        rendered = self._render(messages)
        for message in messages:
            if message["role"] in KEPT_ROLES and message["content"].strip() not in rendered:
                raise ValueError(
                    f"the target's chat template drops the {message['role']} text of prompt "
                    f"{name}, so the target never reads it; mend chat_template.jinja beside the "
                    f"weights, or take the {message['role']} messages out of the data"
                )

    def _check_generation_prompt(self, messages: Sequence[Mapping[str, str]]) -> None:
        """Refuse a template that leaves it to the model to write the header of its own turn.

        One that has no header, as where a closing tag ends the user's turn, has nothing to add.
        """
        with_it, without = self._render(messages), self._render(messages, generation_prompt=False)
        if with_it != without:
            return
        answered = self._render([*messages, {"role": "assistant", "content": MARK}])
        header, found, _ = answered.removeprefix(with_it).partition(MARK)
        if answered.startswith(with_it) and found and header.strip():
            raise ValueError(
                "the target's chat template ignores add_generation_prompt, so the target would "
                f"write the header {header.strip()!r} itself in every answer; let "
                "chat_template.jinja beside the weights end with it when add_generation_prompt is "
                "set"
            )

    def _check_same(self, name: str, then: list[int], now: list[int]) -> None:
        if then == now:
            return
        pairs = zip(then, now, strict=False)
        place = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(then), len(now)))
        was, gives = self._shown(then, place), self._shown(now, place)
        if self._dated:
            self._warn(
                "the target's chat template writes today's date, so prompts read otherwise than "
                f"when they were answered (token {place} of prompt {name} was {was} and is "
                f"{gives}); give the template a fixed date"
            )
            return
        raise ValueError(
            f"prompt {name} was answered under another chat template or tokenizer: its token "
            f"{place} was {was}, and today's template gives {gives}; run stage=regenerate "
            "force=true, or put the former chat_template.jinja back beside the weights"
        )

    def _warn(self, text: str) -> None:
        if not self.warnings:
            self.warnings.append(text)

    def _shown(self, token_ids: list[int], place: int) -> str:
        if place == len(token_ids):
            return "its end"
        return repr(self.tokenizer.decode(token_ids[place : place + 1]))

    def _render(self, messages: Sequence[Mapping[str, str]], generation_prompt: bool = True) -> str:
        text = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=generation_prompt, tokenize=False
        )
        assert isinstance(text, str)
        return text

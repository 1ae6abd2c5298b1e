"""What a caller may pass as prompts, brought to one form: token ids, and what a person wrote."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from torch import Tensor

Message = Mapping[str, str]  # {"role": ..., "content": ...}
Prompts = (
    str
    | Tensor
    | Sequence[str]
    | Sequence[int]
    | Sequence[Sequence[int]]
    | Sequence[Message]
    | Sequence[Sequence[Message]]
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request's beginning."""

    token_ids: list[int]
    text: str | None  # what the person wrote, without a chat template; None: token ids were given


def read_prompts(prompts: Prompts, tokenizer: Any | None) -> list[Prompt]:
    """One Prompt a request. Text is tokenized as transformers would; messages pass the chat
    template first.
    """
    if isinstance(prompts, str):
        return [_from_text(prompts, tokenizer)]
    if isinstance(prompts, Tensor):
        prompts = prompts.tolist()
    if not prompts:
        raise ValueError("there is no prompt: the list is empty; pass at least one")
    first = prompts[0]
    if isinstance(first, int):
        return [_from_ids(prompts)]
    if isinstance(first, Mapping):
        return [_from_messages(prompts, tokenizer)]
    return [_read_one(prompt, tokenizer) for prompt in prompts]


def check_prompts(prompts: Sequence[Prompt], vocab_size: int, max_context: int) -> None:
    """Raise ValueError where a prompt is empty, leaves no room for one new token, or is of another
    vocabulary."""
    for number, prompt in enumerate(prompts):
        length = len(prompt.token_ids)
        if length == 0:
            raise ValueError(f"prompt {number} is empty; pass at least one token")
        if length >= max_context:
            raise ValueError(
                f"prompt {number} has {length} tokens, but the context holds {max_context}; "
                f"cut it to {max_context - 1} tokens at most"
            )
        for token_id in (min(prompt.token_ids), max(prompt.token_ids)):
            if not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"prompt {number} holds token id {token_id}, which is outside "
                    f"0..{vocab_size - 1}; tokenize it with the target's own tokenizer"
                )


def content_ids(prompts: Sequence[Prompt]) -> list[str]:
    """A request id per prompt, made of its tokens: the same alone and in any batch; repeats are
    numbered.
    """
    seen: Counter[str] = Counter()
    ids = []
    for prompt in prompts:
        name = hashlib.blake2b(repr(prompt.token_ids).encode(), digest_size=8).hexdigest()
        ids.append(f"{name}-{seen[name]}")
        seen[name] += 1
    return ids


def _read_one(prompt: Any, tokenizer: Any | None) -> Prompt:
    if isinstance(prompt, str):
        return _from_text(prompt, tokenizer)
    if isinstance(prompt, Tensor):
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence):
        raise ValueError(
            f"a prompt is text, token ids or messages, not {type(prompt).__name__}; pass one"
        )
    if prompt and isinstance(prompt[0], Mapping):
        return _from_messages(prompt, tokenizer)
    return _from_ids(prompt)


def _from_text(text: str, tokenizer: Any | None) -> Prompt:
    return Prompt(list(_needed(tokenizer)(text).input_ids), text)


def _from_messages(messages: Any, tokenizer: Any | None) -> Prompt:
    tokenizer = _needed(tokenizer)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the target's tokenizer has no chat template; pass text instead of messages"
        )
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise ValueError(
            f"the target's chat template does not take these messages ({error}); look at the "
            "roles, or at chat_template.jinja beside the weights"
        ) from error
    written = [message["content"] for message in messages if message["role"] == "user"]
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return Prompt(list(ids), written[-1] if written else "")


def _from_ids(token_ids: Any) -> Prompt:
    return Prompt([int(token_id) for token_id in token_ids], None)


def _needed(tokenizer: Any | None) -> Any:
    if tokenizer is None:
        raise ValueError(
            "this decoder has no tokenizer; pass token ids, or tokenizer= when you make it"
        )
    return tokenizer

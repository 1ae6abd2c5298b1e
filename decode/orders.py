"""What a call of the decoder asks for, one order a request; what could be wrong is found here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from decode.prompts import Prompts, check_prompts, content_ids, read_prompts
from decode.types import Sampling, Target

T = TypeVar("T", bound=str | None)


@dataclass(frozen=True, slots=True)
class Order:
    """What one request asks for."""

    token_ids: list[int]
    request_id: str
    router_text: str | None
    sampling: Sampling
    stop: tuple[str, ...]
    max_new_tokens: int
    follow_text: bool


def read_orders(
    target: Target,
    tokenizer: Any | None,
    prompts: Prompts,
    max_new_tokens: int,
    sampling: Sampling | None,
    stop: str | Sequence[str],
    request_ids: Sequence[str] | None,
    router_texts: Sequence[str] | None,
    *,
    follow_text: bool = False,
) -> list[Order]:
    """One order a prompt; arguments as SpeculativeDecoder.generate has them.

    Raises ValueError, in one sentence, before anything is decoded.
    """
    read = read_prompts(prompts, tokenizer)
    check_prompts(read, target.vocab_size, target.max_context)
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if stops and tokenizer is None:
        raise ValueError(f"stop={stops} needs a tokenizer; pass tokenizer= to the decoder")
    if not all(stops):
        raise ValueError("stop holds an empty string, which every text contains; leave it out")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
    ids = _one_each(request_ids, content_ids(read), "request_ids")
    if len(set(ids)) < len(ids):
        raise ValueError("request_ids hold one id twice; they key the noise: give each its own")
    texts = _one_each(router_texts, [prompt.text for prompt in read], "router_texts")
    law = sampling or Sampling()
    return [
        Order(prompt.token_ids, request_id, text, law, stops, max_new_tokens, follow_text)
        for prompt, request_id, text in zip(read, ids, texts, strict=True)
    ]


def _one_each(given: Sequence[str] | None, made: Sequence[T], name: str) -> Sequence[str | T]:
    if given is None:
        return made
    if len(given) != len(made):
        raise ValueError(f"{name} has {len(given)} entries for {len(made)} prompts; give one each")
    return given

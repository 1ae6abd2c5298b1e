"""Checks of one prompt with its answer: what is wrong raises ValueError, what is odd is told."""

from collections.abc import Set
from typing import Any

import numpy as np

from pipeline.answers import REMEDY

# An answer loops where, of the 8-grams of its last 64 tokens, fewer than half are distinct.
LOOP_TOKENS, LOOP_GRAM, LOOP_DISTINCT = 64, 8, 0.5
MIN_LOOP_TOKENS = 32  # shorter answers are never said to loop


def check_learned(name: str, num_tokens: int, num_prompt_tokens: int, has_prompt: bool) -> None:
    """Refuse a row of which nothing is learned, and one of which the prompt is learned too."""
    if num_prompt_tokens >= num_tokens:
        raise ValueError(
            f"{name} has nothing to learn: all of its {num_tokens} tokens are counted as prompt; "
            f"{REMEDY}"
        )
    if num_prompt_tokens <= 0 and has_prompt:
        raise ValueError(
            f"{name} would be learned as a whole: none of its {num_tokens} tokens is counted as "
            f"prompt; {REMEDY}"
        )


def check_ids(
    name: str, ids: np.ndarray, num_prompt_tokens: int, vocab_size: int, num_real_ids: int
) -> None:
    """Refuse ids that the target has no column for, and padding columns in a prompt."""
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{name} holds token id {high if high >= vocab_size else low}, which is outside the "
            f"target's 0..{vocab_size - 1}; {REMEDY} with the target's own tokenizer"
        )
    prompt = ids[:num_prompt_tokens]
    if len(prompt) and int(prompt.max()) >= num_real_ids:
        raise ValueError(
            f"{name} holds token id {int(prompt.max())} in its prompt, a padding column of the "
            f"target's logits: its tokenizer ends at {num_real_ids - 1}; {REMEDY} with the "
            "target's own tokenizer"
        )


def check_start(name: str, prompt: np.ndarray, tokenizer: Any) -> None:
    """Refuse a prompt that begins twice."""
    bos = tokenizer.bos_token_id
    if bos is not None and len(prompt) > 1 and prompt[0] == prompt[1] == bos:
        raise ValueError(
            f"{name} begins with {tokenizer.bos_token} twice: the chat template and the tokenizer "
            "both add it, or the text brings its own; take it out of one of them and run "
            "stage=regenerate again"
        )


def check_end(
    name: str, answer: np.ndarray, ended: bool, eos_token_ids: Set[int], tokenizer: Any
) -> None:
    """Refuse an answer that ends without saying so, or says so and goes on."""
    ends = np.isin(answer, list(eos_token_ids)).nonzero()[0]
    first = int(ends[0]) if len(ends) else len(answer)
    if first < len(answer) - 1:
        raise ValueError(
            f"{name} goes on after {tokenizer.decode([int(answer[first])])!r}, which ends the "
            f"target's texts, at its answer's token {first}: other ends were known when it was "
            f"answered; {REMEDY}, or mend eos_token_id in generation_config.json"
        )
    if ended and first == len(answer):
        raise ValueError(
            f"{name} is said to have ended by itself, but its last token "
            f"{tokenizer.decode([int(answer[-1])])!r} ends no text of the target's; {REMEDY}, or "
            "mend eos_token_id in generation_config.json"
        )


def loops(answer: np.ndarray) -> bool:
    """Whether the last part of an answer says the same again and again."""
    end = answer[-LOOP_TOKENS:]
    if len(end) < MIN_LOOP_TOKENS:
        return False
    grams = np.lib.stride_tricks.sliding_window_view(end, LOOP_GRAM)
    return len({gram.tobytes() for gram in grams}) < LOOP_DISTINCT * len(grams)

"""Where a text ends, and its text so far: EOS, stop strings across token boundaries, lengths.

Every ending has one outcome. EOS: kept in the token ids, absent from the text. Stop string: the
token ids end with the token that completes it, the text ends before it. Length and context: both
end with the last token.
"""

from collections.abc import Sequence
from typing import Any

from decode.results import FinishReason

HALF = "\ufffd"  # what a tokenizer shows for bytes that are not a whole character yet


class TextSoFar:
    """The text of a growing list of token ids, at the price of the newest tokens only.

    A token's text depends on its neighbours (bytes of one character, a leading space), so new
    tokens are decoded together with the last ones that were complete, and the difference is what
    they add.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.complete = ""  # ends with a whole character
        self.pending = ""  # whole characters that came after, before the half one
        self._tokenizer = tokenizer
        self._context: list[int] = []  # newest tokens whose text is complete
        self._new: list[int] = []

    def push(self, token_id: int) -> None:
        """Add one token."""
        self._new.append(token_id)
        before = decode(self._tokenizer, self._context)
        added = decode(self._tokenizer, self._context + self._new)[len(before) :]
        self.pending = added.rstrip(HALF)
        if added and self.pending == added:
            self.complete += added
            self.pending = ""
            self._context, self._new = self._new, []

    @property
    def text(self) -> str:
        """All whole characters so far."""
        return self.complete + self.pending


class Stopper:
    """Watches one row: says after each token whether the text ends there."""

    def __init__(
        self,
        *,
        tokenizer: Any | None,
        stop: Sequence[str],
        eos_token_ids: frozenset[int],
        max_new_tokens: int,
        num_prompt_tokens: int,
        max_context: int,
        follow_text: bool,  # a stream wants the text as it grows; stop strings want it anyhow
    ) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._eos = eos_token_ids
        self._max_new_tokens = max_new_tokens
        self._room = max_context - num_prompt_tokens
        self._so_far = (
            TextSoFar(tokenizer) if tokenizer is not None and (stop or follow_text) else None
        )
        self._searched = 0  # characters in which no stop string begins
        self._shown = 0  # characters handed out by take()

    @property
    def most_draft_tokens(self) -> int:
        """Drafts that could still be accepted and followed by one more token."""
        return max(min(self._max_new_tokens, self._room) - len(self.token_ids) - 1, 0)

    def push(self, token_ids: Sequence[int]) -> int:
        """Take in emitted tokens up to the one that ends the text; how many were taken."""
        for number, token_id in enumerate(token_ids, 1):
            self.token_ids.append(token_id)
            self.finish_reason = self._ending(token_id)
            if self.finish_reason is not None:
                return number
        return len(token_ids)

    def _ending(self, token_id: int) -> FinishReason | None:
        if token_id in self._eos:
            return "eos"
        if self._so_far is not None:
            self._so_far.push(token_id)
            if self._stops(self._so_far.text):
                return "stop"
        if len(self.token_ids) == self._max_new_tokens:
            return "length"
        return "context" if len(self.token_ids) == self._room else None

    def _stops(self, text: str) -> bool:
        if not self._stop:
            return False
        found = any(text.find(stop, self._searched) >= 0 for stop in self._stop)
        self._searched = max(len(text) - max(map(len, self._stop)) + 1, 0)
        return found

    def text(self) -> str:
        """The text of everything taken in, without EOS and from the stop string on cut off."""
        if self._tokenizer is None:
            return ""
        if self.finish_reason == "stop" and self._so_far is not None:
            text = self._so_far.text
            return text[: min(at for stop in self._stop if (at := text.find(stop)) >= 0)]
        shown = self.token_ids[:-1] if self.finish_reason == "eos" else self.token_ids
        return decode(self._tokenizer, shown)

    def take(self) -> str:
        """What can be shown now and was not yet: never half a character, nor what may become a stop
        string.
        """
        if self._so_far is None:
            return ""
        text = self._so_far.text if self.finish_reason is None else self.text()
        until = len(text) - (self._held_back(text) if self.finish_reason is None else 0)
        new = text[self._shown : until]
        self._shown = max(self._shown, until)
        return new

    def _held_back(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string could begin."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The tokens' text, special tokens left out, nothing tidied."""
    return tokenizer.decode(
        list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )

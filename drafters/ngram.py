"""Lookup: what followed the same last tokens earlier, in prompt or output, will follow them again.

The rule. Of the verified tokens' suffixes of max_ngram, max_ngram - 1, ..., min_ngram tokens, the
longest that also occurs earlier is taken, at its most recent occurrence: the one that ends last,
before the end of the text. An occurrence may overlap the suffix itself. The proposal is what
follows the occurrence; where that runs into the end of the text it goes on into the tokens just
proposed, so periodic text continues with its period: "a b a b a" proposes b, a, b, a and so on.
A match therefore always offers `max_offer` tokens.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from torch import Tensor

from decode.types import MAX_DRAFT_TOKENS, DraftProposal, DraftSampler, Sampling
from drafters.base import BuildContext, DrafterConfig, common_prefix
from drafters.checkpoint import read_description, save_drafter

if TYPE_CHECKING:
    from decode.device.parts import DeviceLookup, DeviceParts


@dataclass(frozen=True, kw_only=True)
class NgramConfig(DrafterConfig):
    """Longest-suffix lookup in prompt and output."""

    min_ngram: int  # shortest suffix that counts as a match
    max_ngram: int  # longest suffix looked for
    max_offer: int  # tokens proposed at most

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                f"min_ngram={self.min_ngram} must lie between 1 and max_ngram={self.max_ngram}"
            )
        if not 1 <= self.max_offer <= MAX_DRAFT_TOKENS:
            raise ValueError(
                f"max_offer={self.max_offer} must lie between 1 and {MAX_DRAFT_TOKENS}"
            )

    def build(self, context: BuildContext) -> "NgramDrafter":
        return NgramDrafter(self)


@dataclass(frozen=True, slots=True)
class Match:
    """An earlier occurrence of the text's suffix."""

    end: int  # position of the token after the occurrence
    length: int  # tokens that agree


class NgramIndex:
    """Where each n-gram of a growing text occurred last, with enough memory to take tokens back.

    Invariant: every n-gram of `tokens` that ends before their last token is entered, and none that
    ends at it, so that looking up the suffix finds an earlier occurrence and never itself.
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self.tokens: list[int] = []
        self._lengths = range(max_ngram, min_ngram - 1, -1)
        self._last: dict[tuple[int, ...], int] = {}  # n-gram -> position after its last occurrence
        self._undo: list[
            list[tuple[tuple[int, ...], int]]
        ] = []  # by end - 1: n-grams and what they replaced

    def become(self, token_ids: Sequence[int]) -> None:
        """Hold this text, whatever was held before; costs little when the text has only grown."""
        text = token_ids if isinstance(token_ids, list) else list(token_ids)
        kept = common_prefix(self.tokens, text)
        self._take_back(kept)
        for token in text[kept:]:
            self.append(token)

    def append(self, token: int) -> None:
        end = len(self.tokens)
        if end > 0:
            replaced = []
            for n in self._lengths:
                if n <= end:
                    gram = tuple(self.tokens[end - n : end])
                    replaced.append((gram, self._last.get(gram, 0)))
                    self._last[gram] = end
            self._undo.append(replaced)
        self.tokens.append(token)

    def match(self) -> Match | None:
        """The longest suffix with an earlier occurrence, at the most recent one."""
        size = len(self.tokens)
        for n in self._lengths:
            if n < size and (end := self._last.get(tuple(self.tokens[size - n :]), 0)):
                return Match(end, n)
        return None

    def _take_back(self, size: int) -> None:
        while len(self.tokens) > size:
            self.tokens.pop()
            if self._undo:
                for gram, previous in self._undo.pop():
                    if previous:
                        self._last[gram] = previous
                    else:
                        del self._last[gram]


def continuation(tokens: Sequence[int], match: Match, num_tokens: int) -> list[int]:
    """The tokens after the occurrence, going on into the copy itself where the text ends."""
    period = len(tokens) - match.end
    return [tokens[match.end + i % period] for i in range(num_tokens)]


@dataclass(frozen=True, slots=True)
class Guess:
    """What a lookup makes of a text."""

    num_matched: int  # tokens that agree; 0: nothing found
    token_ids: list[int]


class NgramSession:
    """One row's index."""

    def __init__(self, drafter: "NgramDrafter") -> None:
        self._drafter = drafter
        self._index = drafter.index()

    def match_length(self, token_ids: Sequence[int]) -> int:
        """Tokens of the longest matching suffix; 0: no match."""
        return self._guess(token_ids, 0).num_matched

    def offer(self, token_ids: Sequence[int]) -> int:
        return len(self._guess(token_ids, MAX_DRAFT_TOKENS).token_ids)

    def propose(
        self, token_ids: Sequence[int], num_draft_tokens: int, sampler: DraftSampler
    ) -> DraftProposal:
        guess = self._guess(token_ids, num_draft_tokens)
        return DraftProposal(guess.token_ids, None, self._drafter.kind)

    def _guess(self, token_ids: Sequence[int], num_tokens: int) -> Guess:
        self._index.become(token_ids)
        return self._drafter.guess(self._index, num_tokens)


class NgramDrafter:
    """Guesses by lookup; has no weights."""

    kind = "ngram"
    num_parameters = 0
    memory_bytes = 0

    def __init__(self, config: NgramConfig) -> None:
        self.config = config
        self._parts: DeviceParts | None = None

    def open(self) -> NgramSession:
        return NgramSession(self)

    def index(self) -> NgramIndex:
        """One of an empty text."""
        return NgramIndex(self.config.min_ngram, self.config.max_ngram)

    def guess(self, index: NgramIndex, num_tokens: int) -> Guess:
        """The rule, for so many tokens at most."""
        match = index.match()
        if match is None:
            return Guess(0, [])
        size = min(num_tokens, self.config.max_offer)
        return Guess(match.length, continuation(index.tokens, match, size))

    def on_device(self) -> "DeviceParts":
        """The lookup that the device makes by the same rule (kernels/lookup.py)."""
        from decode.device.parts import DeviceParts  # Triton is not everywhere

        if self._parts is None:
            self._parts = DeviceParts(self.device_lookup(0), None)
        return self._parts

    def device_lookup(self, min_match: int) -> "DeviceLookup":
        """The rule's numbers, believed where at least so many tokens agree."""
        from decode.device.parts import DeviceLookup

        low, high, offer = self.config.min_ngram, self.config.max_ngram, self.config.max_offer
        return DeviceLookup(low, high, offer, max(low, min_match))

    def save(self, folder: Path) -> None:
        """Write drafter.json; there are no weights."""
        save_drafter(folder, "ngram", {"config": asdict(self.config)})

    def match_lengths(self, token_ids: Sequence[int], num_prompt_tokens: int) -> list[int]:
        """Tokens of the longest match had drafting begun at each answer token; 0: no match."""
        index = self.index()
        index.become(token_ids[:num_prompt_tokens])
        lengths = []
        for token in token_ids[num_prompt_tokens:]:
            lengths.append(self.guess(index, 0).num_matched)
            index.append(token)
        return lengths

    def score(
        self,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        target_logprobs: Tensor,
        sampling: Sampling,
        max_depth: int,
    ) -> Tensor:
        """Replay the lookup at every answer token.

        Drafted without chance, a token is accepted when the target draws it: given the answer, 1
        where the guess is the answer's token and 0 where it is not, at any temperature. After a
        miss, later depths still compare the same guess with the answer.
        """
        answer = list(token_ids[num_prompt_tokens:])
        accept = torch.full((len(answer), max_depth), torch.nan)
        index = self.index()
        index.become(token_ids[:num_prompt_tokens])
        for start, token in enumerate(answer):
            guess = self.guess(index, min(max_depth, len(answer) - start)).token_ids
            hits = [float(drafted == answer[start + d]) for d, drafted in enumerate(guess)]
            accept[start, : len(hits)] = torch.tensor(hits)
            index.append(token)
        return accept


def from_pretrained(name_or_path: str, target: Any) -> NgramDrafter:
    """A lookup drafter: what save() wrote, or plain "ngram" for the settings of conf/drafter."""
    if name_or_path == "ngram":
        text = (files("conf") / "drafter" / "ngram.yaml").read_text(encoding="utf-8")
        config = {key: value for key, value in yaml.safe_load(text).items() if key != "_target_"}
    else:
        config = read_description(Path(name_or_path), "ngram")["config"]
    if set(config) != {setting.name for setting in fields(NgramConfig)}:
        raise ValueError(
            f"{name_or_path} describes a lookup drafter with other settings ({sorted(config)}) "
            'than are known here; save it again, or name "ngram"'
        )
    return NgramDrafter(NgramConfig(**config))

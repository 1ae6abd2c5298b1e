"""What followed each n-gram of a corpus, in two tensors that the host and the device read alike.

The slot of a text's last n tokens x[-1], ..., x[-n], in whole numbers below 2^63 throughout, so
that Python, numpy and Triton agree (token ids below 2^28):

    (sum over j of x[-j] A[j] mod 2^32) >> (32 - bits),
    A[1] = FIRST, A[j + 1] = A[j] FACTOR mod 2^32

Both constants are odd, and so is every A[j]. Slots are shared: whoever looks there compares.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

FIRST = 0x9E3779B1  # the golden ratio's, which spreads neighbouring token ids
FACTOR = 0x2C9277B5  # below 2^31, so that no product leaves int64
MASK = 0xFFFFFFFF
END = -1  # before, between and after texts
MOST_TOKENS = 8  # of an n-gram
MOST_BITS = 28


def multipliers(longest: int) -> list[int]:
    """A[1], ..., A[longest]."""
    found = [FIRST]
    while len(found) < longest:
        found.append(found[-1] * FACTOR & MASK)
    return found


@dataclass(frozen=True, eq=False, repr=False)
class Table:
    """Texts, and by n and slot where in them the continuation of an n-gram stands.

    Raises ValueError where the tensors are no such table. Tables are told apart by identity.
    """

    texts: Tensor  # [N] int32, one after another, -1 before, between and after
    places: Tensor  # [longest, 2^bits] int32; 0: nothing
    _copies: dict[torch.device, "Table"] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        texts, places = self.texts, self.places
        if (texts.ndim, places.ndim) != (1, 2) or {texts.dtype, places.dtype} != {torch.int32}:
            raise ValueError(
                f"texts {texts.dtype} {list(texts.shape)} and places {places.dtype} "
                f"{list(places.shape)} must be int32 tensors [N] and [longest, 2^bits]; build the "
                "table again"
            )
        longest, size = places.shape
        if not 1 <= longest <= MOST_TOKENS or size != 1 << self.bits or self.bits > MOST_BITS:
            raise ValueError(
                f"places {list(places.shape)} must hold 1 to {MOST_TOKENS} rows of 2 to "
                f"2^{MOST_BITS} slots, a power of two; build the table again"
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest n-gram."""
        return self.places.shape[0]

    @property
    def bits(self) -> int:
        """Of a slot's number, at least 1."""
        return max(1, round(math.log2(max(1, self.places.shape[1]))))

    @property
    def num_bytes(self) -> int:
        return self.texts.nbytes + self.places.nbytes

    def on(self, device: torch.device) -> "Table":
        """The table there, copied once."""
        if device == self.texts.device:
            return self
        if device not in self._copies:
            self._copies[device] = Table(self.texts.to(device), self.places.to(device))
        return self._copies[device]

    def find(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """(n, place) of the longest n-gram at the end of a text that is known, else (0, 0)."""
        texts, places = self._arrays
        longest = min(self.longest, len(token_ids))
        last = list(token_ids[len(token_ids) - longest :])
        slots, total = [], 0
        for n, factor in enumerate(multipliers(longest)[:longest], 1):
            total += last[-n] * factor
            slots.append((total & MASK) >> (32 - self.bits))
        for n in range(longest, 0, -1):
            place = int(places[n - 1, slots[n - 1]])
            if place >= n and texts[place - n : place].tolist() == last[longest - n :]:
                return n, place
        return 0, 0

    def following(self, place: int, num_tokens: int) -> list[int]:
        """What stands there, up to the end of its text."""
        tokens: list[int] = self._arrays[0][place : place + num_tokens].tolist()
        return tokens[: tokens.index(END)] if END in tokens else tokens

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        return self.texts.cpu().numpy(), self.places.cpu().numpy()

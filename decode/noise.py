"""Randomness enters decoding through one object: a draw depends on its name alone."""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, Protocol

import numpy as np

from kernels.race import Key, uniforms

Domain = Literal["draft", "verify"]


class Noise(Protocol):
    """A table of uniforms, looked up and never used up."""

    def uniforms(self, request_id: str, step: int, domain: Domain, count: int) -> Sequence[float]:
        """The first `count` numbers in [0, 1) of one stream; a larger count begins alike."""

    def race_key(self, request_id: str) -> Key:
        """What Gumbel coupling draws all tokens of a request by: a key of kernels.race."""


class PhiloxNoise:
    """Philox 4x64 with 10 rounds, one stream per (seed, request, step, domain).

    The key is a digest of seed, request and domain; the step sits in the counter's highest word, so
    that streams of two steps never meet. No state is kept: neither batch nor order can change a
    draw.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def uniforms(self, request_id: str, step: int, domain: Domain, count: int) -> list[float]:
        key = _key(self.seed, request_id, domain)
        return uniforms(key, step, count).tolist()

    def race_key(self, request_id: str) -> Key:
        first, second = _key(self.seed, request_id, "race").tolist()
        return first, second


@lru_cache(maxsize=4096)
def _key(seed: int, request_id: str, domain: str) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    name = "\0".join((str(seed), domain, request_id)).encode()
    return np.frombuffer(hashlib.blake2b(name, digest_size=16).digest(), dtype=np.uint64)

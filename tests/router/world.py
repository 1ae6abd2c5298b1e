"""Prompts whose acceptance is known: words decide it, or nothing that a prompt shows does."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from router.examples import Examples, collect_examples

TOPICS = {  # acceptance of ("lookup", "small") by topic, as logits
    "code": (1.2, 0.4),
    "chat": (-1.0, 0.2),
    "reasoning": (-0.2, -1.0),
}
WORDS = {
    topic: words.split()
    for topic, words in {
        "code": "def return class import loop list bug array parser script",
        "chat": "friend holiday letter advice music dinner story garden feel weather",
        "reasoning": "apples total solve trains speed percent ratio years sum remainder",
    }.items()
}
SPLITS = {"router_train": 30, "validation": 18, "test": 30}  # prompts a topic


class HashEncoder:
    """A bag of words: each word has a fixed random vector, a text their mean, of norm 1."""

    def __init__(self, size: int = 48, digest: str = "hash-encoder") -> None:
        self.size = size
        self.digest = digest
        self.calls = 0

    def encode(self, texts: Sequence[str]) -> Tensor:
        self.calls += 1
        rows = [
            sum((self._word(word) for word in text.split()), np.zeros(self.size)) for text in texts
        ]
        table = torch.tensor(np.array(rows), dtype=torch.float32).reshape(len(rows), self.size)
        return table / table.norm(dim=1, keepdim=True).clamp(min=1e-6)

    def _word(self, word: str) -> np.ndarray:
        seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "little")
        return np.random.default_rng(seed).normal(size=self.size)


@dataclass(frozen=True)
class Row:
    """As stage collect keeps it."""

    prompt_id: str
    split: str
    domain: str
    family: str
    text: str
    num_prompt_tokens: int
    law: str
    temperature: float
    drafter: str
    num_tokens: int
    max_depth: int
    accept: np.ndarray


def make_rows(
    seed: int, *, informative: bool, spread: float = 0.35, depth_drop: float = 0.3, depth: int = 4
) -> list[Row]:
    """Answers to prompts under two laws. Not informative: topics have no say, only spread."""
    rng = np.random.default_rng(seed)
    rows = []
    for split, count in SPLITS.items():
        for topic, words in WORDS.items():
            for number in range(count):
                text = " ".join(rng.choice(words, size=rng.integers(4, 20)))
                for law, temperature, shift in (("greedy", 0.0, 0.0), ("sampled", 0.8, -0.3)):
                    num_tokens = int(rng.integers(20, 90))
                    for place, drafter in enumerate(("lookup", "small")):
                        centre = TOPICS[topic][place] if informative else 0.1
                        logit = centre + shift + spread * rng.normal()
                        accept = draw_accept(rng, logit, num_tokens, depth, depth_drop)
                        if drafter == "lookup":
                            accept[rng.random(num_tokens) < 0.4] = np.nan
                        rows.append(
                            Row(
                                f"{split}-{topic}-{number}",
                                split,
                                topic,
                                f"{topic}-{number % 12}-{split}",
                                text,
                                num_tokens + 7,
                                law,
                                temperature,
                                drafter,
                                num_tokens,
                                depth,
                                accept,
                            )
                        )
    return rows


def draw_accept(
    rng: np.random.Generator, logit: float, num_tokens: int, depth: int, depth_drop: float
) -> np.ndarray:  # [A, D] float32
    """Independent flips; each depth costs `depth_drop` logits; NaN past the end."""
    chance = 1 / (1 + np.exp(-(logit - depth_drop * np.arange(depth))))
    accept = (rng.random((num_tokens, depth)) < chance).astype(np.float32)
    past = np.add.outer(np.arange(num_tokens), np.arange(depth)) >= num_tokens
    accept[past] = np.nan
    return accept


def make_examples(seed: int, *, informative: bool, **settings: float) -> Examples:
    """The rows above, counted."""
    return collect_examples(make_rows(seed, informative=informative, **settings))  # type: ignore[arg-type]

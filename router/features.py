"""Cheap features of a prompt: lengths, traces of code, digits, and words that say what is asked
for.

They cost microseconds, and tell what a sentence embedding blurs: how long the prompt is, how much
of it an answer may copy (lookup lives on that), and under which temperature it will be answered.
Counts are shares of the text or log1p, so that one long prompt does not drown the others.
"""

import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor

FEATURE_VERSION = 1  # raise it when a feature is added or changes its meaning


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


CODE_WORDS = _words(
    "def class return import function func fn var let const public static void int str bool null "
    "none true false self print select from where insert lambda elif else async await struct enum"
)
QUESTION_WORDS = _words(
    "what why how when where who which whose whom is are can could does do did should would"
)
MAKE_WORDS = _words("write implement create build design generate compose draft make add")
EXPLAIN_WORDS = _words(
    "explain describe tell discuss summarise summarize compare advise suggest recommend"
)
SOLVE_WORDS = _words(
    "calculate compute solve prove find determine evaluate simplify count estimate"
)
COPY_WORDS = _words(  # the answer repeats much of the prompt
    "rewrite fix edit translate correct refactor convert repeat extract reformat complete debug"
)

FEATURE_NAMES = (
    "log_characters",
    "log_words",
    "log_prompt_tokens",
    "log_lines",
    "word_length",
    "repeated_words",
    "digits",
    "log_numbers",
    "operators",
    "code_symbols",
    "code_words",
    "code_fence",
    "capitals",
    "not_ascii",
    "quotes",
    "question_mark",
    "question_word",
    "make_words",
    "explain_words",
    "solve_words",
    "copy_words",
    "list_items",
    "temperature",
    "greedy",
)


def features(text: str, num_prompt_tokens: int, temperature: float) -> list[float]:
    """One value for each of FEATURE_NAMES; finite for any text, the empty one too."""
    words = re.findall(r"[^\W\d_]+", text.lower())
    size, num_words = max(len(text), 1), max(len(words), 1)

    def share(characters: str) -> float:
        return sum(text.count(character) for character in characters) / size

    def among(vocabulary: frozenset[str]) -> float:
        return sum(word in vocabulary for word in words) / num_words

    return [
        math.log1p(len(text)),
        math.log1p(len(words)),
        math.log1p(num_prompt_tokens),
        math.log1p(text.count("\n")),
        sum(map(len, words)) / num_words,
        1 - len(set(words)) / num_words if words else 0.0,
        sum(map(str.isdigit, text)) / size,
        math.log1p(len(re.findall(r"\d+(?:\.\d+)?", text))),
        share("+-*/=<>^%"),
        share("{}[]();_`\\"),
        among(CODE_WORDS),
        float("```" in text),
        sum(map(str.isupper, text)) / size,
        sum(ord(character) > 127 for character in text) / size,
        share("\"'\u201c\u201d"),
        float(text.rstrip().endswith("?")),
        float(bool(words) and words[0] in QUESTION_WORDS),
        float(not MAKE_WORDS.isdisjoint(words)),
        float(not EXPLAIN_WORDS.isdisjoint(words)),
        float(not SOLVE_WORDS.isdisjoint(words)),
        float(not COPY_WORDS.isdisjoint(words)),
        math.log1p(len(re.findall(r"^\s*(?:[-*\u2022]|\d+[.)])\s", text, flags=re.MULTILINE))),
        temperature,
        float(temperature == 0),
    ]


def feature_matrix(
    texts: Sequence[str], num_prompt_tokens: Sequence[int], temperatures: Sequence[float]
) -> Tensor:  # [P, F] float64
    """The features of several prompts."""
    rows = [
        features(text, length, temperature)
        for text, length, temperature in zip(texts, num_prompt_tokens, temperatures, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), len(FEATURE_NAMES))

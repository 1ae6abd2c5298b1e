"""Laws in exact fractions: logits are whole powers of two, so that nothing is rounded anywhere.

With temperature 1 / ln 2 a logit of z is a weight of 2^z. A world says what target and drafter
think after a prefix; `path_law` walks every draft and every cell of every uniform, and adds up what
comes out.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from typing import Any

import torch

from kernels.types import Verification

Law = list[Fraction]
TEMPERATURE = 1 / math.log(2)
# Where in its cell a uniform lies: near enough to the border that a misplaced one shows, and far
# from the kernel's own rounding (float32 sums, relative error 1e-7).
EDGE = Fraction(1, 100_000)


@dataclass(frozen=True)
class World:
    """Raw logits after the last token, for both models; and the rules of the law."""

    target: Sequence[Sequence[int]]  # [last token][V]
    draft: Sequence[Sequence[int]]
    num_draft: int
    top_k: int = 0
    top_p: Fraction = Fraction(1)
    min_p: Fraction = Fraction(0)
    penalty: int = 1
    one_hot: bool = False
    draft_ids: Sequence[int] = field(
        default_factory=tuple
    )  # what a one-hot drafter says, by last token

    def law(self, table: Sequence[Sequence[int]], prefix: Sequence[int]) -> Law:
        return processed(self, table[prefix[-1]], set(prefix))

    def target_law(self, prefix: Sequence[int]) -> Law:
        return self.law(self.target, prefix)

    def draft_law(self, prefix: Sequence[int]) -> Law:
        if not self.one_hot:
            return self.law(self.draft, prefix)
        return [Fraction(v == self.draft_ids[prefix[-1]]) for v in range(len(self.target))]


def processed(world: World, logits: Sequence[int], seen: set[int]) -> Law:
    """The contract's words once more: penalty, temperature, top-k, top-p, min-p, ties kept."""
    z = [Fraction(x) for x in logits]
    for v in seen:
        z[v] = z[v] / world.penalty if z[v] > 0 else z[v] * world.penalty
    assert all(x.denominator == 1 for x in z), "pick logits whose penalised value is whole"
    weights = [Fraction(2) ** int(x) for x in z]
    if world.top_k:
        edge = sorted(weights, reverse=True)[min(world.top_k, len(z)) - 1]
        weights = [w if w >= edge else Fraction(0) for w in weights]
    if world.top_p < 1:
        reached = Fraction(0)
        for edge in sorted(weights, reverse=True):
            reached += edge
            if reached >= world.top_p * sum(weights):
                break
        weights = [w if w >= edge else Fraction(0) for w in weights]
    weights = [w if w >= world.min_p * max(weights) else Fraction(0) for w in weights]
    return [w / sum(weights) for w in weights]


def sequence_law(world: World, start: int, length: int) -> dict[tuple[int, ...], Fraction]:
    """Chance of every text under the target alone."""
    laws = {(): Fraction(1)}
    for _ in range(length):
        laws = {
            (*text, v): chance * p
            for text, chance in laws.items()
            for v, p in enumerate(world.target_law((start, *text)))
            if p
        }
    return laws


@dataclass(frozen=True)
class Path:
    """One draft with one number in a cell of each uniform, and the chance of that cell."""

    drafts: tuple[int, ...]
    uniforms: list[float]
    weight: Fraction


def paths(world: World, start: int) -> list[Path]:
    """Every draft that can occur, every cell in which the outcome is one."""
    found = []
    for drafts in product(range(len(world.target)), repeat=world.num_draft):
        weight = Fraction(1)
        for i, token in enumerate(drafts):
            weight *= world.draft_law((start, *drafts[:i]))[token]
        if weight:
            found += _cells(world, start, drafts, weight, [])
    return found


def _cells(
    world: World, start: int, drafts: tuple[int, ...], weight: Fraction, tried: list[float]
) -> list[Path]:
    i = len(tried)
    prefix = (start, *drafts[:i])
    p = world.target_law(prefix)
    if i == len(drafts):
        return _ends(p, drafts, weight, tried)
    q = world.draft_law(prefix)
    border = min(Fraction(1), p[drafts[i]] / q[drafts[i]])
    found = []
    if border > 0:
        below = float(border * (1 - EDGE))
        found += _cells(world, start, drafts, weight * border, [*tried, below])
    if border < 1:
        residual = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
        above = float(border + (1 - border) * EDGE)
        rest = [0.5] * (len(drafts) - i - 1)  # never looked at
        found += _ends(residual, drafts, weight * (1 - border), [*tried, above, *rest])
    return found


def _ends(
    residual: Law, drafts: tuple[int, ...], weight: Fraction, tried: list[float]
) -> list[Path]:
    found, low = [], Fraction(0)
    for mass in residual:
        share = mass / sum(residual)
        high = low + share
        # Both ends of the cell, save the end that lies at 0 or 1 where another cell has the other.
        edges = [edge for edge, end in ((EDGE, low), (1 - EDGE, high)) if 0 < end < 1]
        edges = edges or [EDGE, 1 - EDGE]
        for edge in edges if share else ():
            number = float(low + share * edge)
            found.append(Path(drafts, [*tried, number], weight * share / len(edges)))
        low = high
    return found


def path_law(
    verify: Callable[..., Verification], world: World, start: int, dtype: torch.dtype
) -> dict[tuple[int, ...], Fraction]:
    """Law of the first num_draft + 1 tokens: what verify emits, then the target's own."""
    walked = paths(world, start)
    out = verify(*arguments(world, start, walked, dtype), **call_options(world, start, walked))
    law: dict[tuple[int, ...], Fraction] = {}
    for path, ids, n in zip(walked, out.token_ids.tolist(), out.num_accepted.tolist(), strict=True):
        emitted = tuple(ids[: n + 1])
        for text, chance in _continued(world, start, emitted).items():
            law[text] = law.get(text, Fraction(0)) + path.weight * chance
    return law


def _continued(
    world: World, start: int, emitted: tuple[int, ...]
) -> dict[tuple[int, ...], Fraction]:
    laws = {emitted: Fraction(1)}
    for _ in range(world.num_draft + 1 - len(emitted)):
        laws = {
            (*text, v): chance * p
            for text, chance in laws.items()
            for v, p in enumerate(world.target_law((start, *text)))
            if p
        }
    return laws


def arguments(world: World, start: int, walked: list[Path], dtype: torch.dtype) -> tuple[Any, ...]:
    """Logits, drafts and the drafter's logits, one row a path."""
    rows = [(start, *path.drafts) for path in walked]
    target = torch.tensor([[world.target[v] for v in row] for row in rows], dtype=dtype)
    draft = torch.tensor([[world.draft[v] for v in row[:-1]] for row in rows], dtype=dtype)
    ids = torch.tensor([path.drafts for path in walked])
    return target, ids, None if world.one_hot else draft


def call_options(world: World, start: int, walked: list[Path]) -> dict[str, Any]:
    """The other arguments of verify, one row a path."""
    batch = len(walked)

    def each(value: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.full((batch,), value, dtype=dtype)

    counts = torch.zeros(batch, len(world.target), dtype=torch.int32)
    counts[:, start] = 1
    return {
        "temperature": each(TEMPERATURE),
        "uniforms": torch.tensor([path.uniforms for path in walked], dtype=torch.float64),
        "top_k": each(world.top_k, torch.int64),
        "top_p": each(float(world.top_p)),
        "min_p": each(float(world.min_p)),
        "repetition_penalty": each(world.penalty),
        "seen_token_counts": counts,
    }

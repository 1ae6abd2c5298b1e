"""What a router learns from: for each prompt and law, how many drafted tokens each drafter had
accepted.

An accept matrix [A, D] (drafters.score) says for every start in an answer how likely the draft at
each depth is accepted, given that those before it were. Here it is summed to counts, in which only
two things matter:

- a NaN is no proposal, so it counts neither as a trial nor as a rejection, but as a start where
  the drafter was asked in vain;
- depth k weighs each start by the chance that drafting got there, the product of the entries
  before it.

Letters: P examples (a prompt under one law), N drafters, D depths.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


class Row(Protocol):
    """One answer scored by one drafter, as stage collect keeps it."""

    prompt_id: str
    split: str
    domain: str
    family: str
    text: str
    num_prompt_tokens: int
    temperature: float
    drafter: str
    accept: np.ndarray  # [A, D] float, NaN: no proposal or past the end


@dataclass(frozen=True)
class Examples:
    """Counts of P prompts, each under one temperature, for N drafters."""

    drafters: tuple[str, ...]
    prompt_ids: np.ndarray  # [P] str
    splits: np.ndarray  # [P] str
    domains: np.ndarray  # [P] str
    families: np.ndarray  # [P] str
    texts: np.ndarray  # [P] str
    num_prompt_tokens: np.ndarray  # [P] int
    temperatures: Tensor  # [P] float64
    accepted: Tensor  # [P, N, D] float64
    proposed: Tensor  # [P, N, D] float64
    asked: Tensor  # [P, N] float64, starts in its answers
    square_sums: Tensor  # [P, N]: sum of (a - mean)^2 over the starts of one answer, depth 1
    lagged_sums: Tensor  # [P, N]: sum of (a[t] - mean)(a[t + 1] - mean)

    @property
    def successes(self) -> Tensor:  # [P, N]
        """Accepted tokens at depth 1."""
        return self.accepted[:, :, 0]

    @property
    def trials(self) -> Tensor:  # [P, N]
        """Proposed tokens at depth 1; 0 where a drafter never proposed."""
        return self.proposed[:, :, 0]

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, index: np.ndarray) -> "Examples":
        """The examples of a boolean mask or an index, in its order."""
        rows = np.arange(len(self))[index]
        names = [field.name for field in fields(self) if field.name != "drafters"]
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    def split(self, *names: str) -> "Examples":
        """The examples of these splits."""
        return self.take(np.isin(self.splits, names))

    def with_prompts_of(self, order: np.ndarray) -> "Examples":
        """The same counts, each beside the prompt of example order[p]: the shuffled control."""
        return replace(
            self, texts=self.texts[order], num_prompt_tokens=self.num_prompt_tokens[order]
        )


def collect_examples(rows: Iterable[Row], drafters: Sequence[str] | None = None) -> Examples:
    """Sum accept matrices to one example for each prompt and temperature, in the order of arrival.

    `drafters` fixes their order; None: the order in which they are met.
    """
    rows = list(rows)
    names = (
        tuple(dict.fromkeys(row.drafter for row in rows)) if drafters is None else tuple(drafters)
    )
    keys: dict[tuple[str, str, float], Row] = {}
    for row in rows:
        keys.setdefault((row.split, row.prompt_id, float(row.temperature)), row)
    place = {key: number for number, key in enumerate(keys)}
    depth = max((row.accept.shape[1] for row in rows), default=1)
    counts = np.zeros((2, len(place), len(names), depth))
    spread = np.zeros((2, len(place), len(names)))
    asked = np.zeros((len(place), len(names)))
    for row in rows:
        if row.drafter not in names:
            raise ValueError(
                f"the acceptance of drafter {row.drafter!r} was collected, but the pool holds "
                f"{', '.join(names)}; run stage=collect again with this pool"
            )
        p, n = place[row.split, row.prompt_id, float(row.temperature)], names.index(row.drafter)
        counts[:, p, n, : row.accept.shape[1]] += count_depths(row.accept)
        spread[:, p, n] += _spread(row.accept)
        asked[p, n] += len(row.accept)
    first = list(keys.values())

    def column(name: str, dtype: Any = object) -> np.ndarray:
        return np.array([getattr(row, name) for row in first], dtype=dtype)

    return Examples(
        drafters=names,
        prompt_ids=column("prompt_id"),
        splits=column("split"),
        domains=column("domain"),
        families=column("family"),
        texts=column("text"),
        num_prompt_tokens=column("num_prompt_tokens", int),
        temperatures=torch.tensor(column("temperature", float), dtype=torch.float64),
        accepted=torch.from_numpy(counts[0]),
        proposed=torch.from_numpy(counts[1]),
        asked=torch.from_numpy(asked),
        square_sums=torch.from_numpy(spread[0]),
        lagged_sums=torch.from_numpy(spread[1]),
    )


def count_depths(accept: np.ndarray) -> np.ndarray:  # [A, D] -> [2, D]
    """Accepted and proposed tokens at each depth, a start weighted by the chance to get there."""
    offered = ~np.isnan(accept)
    chance = np.where(offered, accept, 0.0).astype(np.float64)
    reached = np.cumprod(chance, axis=1)
    reached = np.concatenate([np.ones_like(reached[:, :1]), reached[:, :-1]], axis=1)
    return np.stack([(reached * chance).sum(0), (reached * offered).sum(0)])


def _spread(accept: np.ndarray) -> tuple[float, float]:
    """How much one answer's tokens vary and resemble their neighbours, at depth 1."""
    first = accept[:, 0].astype(np.float64)
    if np.isnan(first).all():
        return 0.0, 0.0
    centred = np.nan_to_num(
        first - np.nanmean(first), nan=0.0
    )  # a gap breaks the chain of neighbours
    return float((centred**2).sum()), float((centred[1:] * centred[:-1]).sum())


def dispersion(examples: Examples) -> Tensor:  # [N]
    """Variance of an answer's mean acceptance over that of independent coin flips.

    Accepted tokens come in runs (above 1), and under sampling an entry is a chance, not a flip
    (below 1).
    """
    successes, trials = examples.successes, examples.trials
    rate = successes / trials.clamp(min=1)
    binomial = (trials * rate * (1 - rate)).sum(0)
    squares = examples.square_sums.sum(0)
    correlation = (examples.lagged_sums.sum(0) / squares.clamp(min=1e-9)).clamp(-0.5, 0.8)
    ratio = squares / binomial.clamp(min=1e-9) * (1 + correlation) / (1 - correlation)
    return torch.where(binomial > 1, ratio.clamp(0.2, 9.0), torch.ones_like(ratio))

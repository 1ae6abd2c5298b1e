"""What is believed about each drafter's acceptance in one row: a posterior on a grid of logits.

A drafter that drafts k tokens emits 1 + sum_{j<=k} prod_{i<=j} h(i) on average, where h(i) =
sigmoid(z + offset(i)) is the chance that depth i is accepted given that the depths before were. One
unknown z per drafter therefore prices every k. A step that accepted a of n drafted tokens has
likelihood prod_{i<=a} h(i), times (1 - h(a + 1)) exactly when a < n: the rejection is evidence, and
past n nothing was seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from decode.types import MAX_DRAFT_TOKENS, Prior

Floats = NDArray[np.float64]
GRID: Floats = np.linspace(-6.0, 6.0, 49)  # logits of acceptance at depth 1, a quarter apart
WIDE_MEAN, WIDE_SD = 0.0, 1.7  # nearly uniform in the chance itself: where nothing is known
NARROWEST_SD = 0.2  # below the grid's step a normal would fall between its points


@dataclass(frozen=True)
class DepthTables:
    """What every logit of the grid implies for one drafter's depth offsets."""

    log_accept: Floats  # [G, D] log h(depth)
    log_reject: Floats  # [G, D] log (1 - h(depth))
    tokens: Floats  # [G, D + 1] expected tokens emitted by a step that drafts 0..D


@lru_cache(maxsize=256)
def depth_tables(offsets: tuple[float, ...]) -> DepthTables:
    """Tables for a drafter whose depth k adds offsets[k - 1] to the logit; past their end the last
    one holds.
    """
    depths = np.zeros(MAX_DRAFT_TOKENS)
    if offsets:
        depths[:] = offsets[-1]
        depths[: len(offsets)] = offsets[:MAX_DRAFT_TOKENS]
    logits = GRID[:, None] + depths[None, :]
    log_accept, log_reject = -np.logaddexp(0.0, -logits), -np.logaddexp(0.0, logits)
    survival = np.exp(np.cumsum(log_accept, axis=1))
    tokens = np.concatenate([np.ones((len(GRID), 1)), 1 + np.cumsum(survival, axis=1)], axis=1)
    return DepthTables(log_accept, log_reject, tokens)


@lru_cache(maxsize=4096)
def normal_on_grid(mean: float, sd: float) -> Floats:
    """Probabilities of the grid's points under a normal law on the logit; wide where a value is not
    finite.
    """
    if not (np.isfinite(mean) and np.isfinite(sd)):
        mean, sd = WIDE_MEAN, WIDE_SD
    density = np.exp(
        -0.5 * ((GRID - np.clip(mean, GRID[0], GRID[-1])) / max(sd, NARROWEST_SD)) ** 2
    )
    return density / density.sum()


class Belief:
    """The posterior of every drafter in one row, by index into `drafters`."""

    def __init__(
        self,
        drafters: Sequence[str],
        prior: Prior | None,
        *,
        population_share: float,
        population_spread: float,
        hazard: float,
        likelihood_power: float,
    ) -> None:
        self.hazard = hazard
        self.power = likelihood_power
        self.num_observed = np.zeros(len(drafters))  # tokens that were accepted or rejected
        rows, population, tables = [], [], []
        for name in drafters:
            broad, own, offsets = _prior_of(name, prior, population_spread)
            population.append(broad)
            rows.append((1 - population_share) * own + population_share * broad)
            tables.append(depth_tables(offsets))
        self.posterior: Floats = np.array(rows)  # [N, G]
        self.population: Floats = np.array(population)  # [N, G]
        self.tables = tables
        self.token_tables: Floats = np.array([table.tokens for table in tables])  # [N, G, D + 1]

    def expected_tokens(self) -> Floats:  # [N, D + 1]
        """Tokens that a step of each drafter emits on average, by number of tokens drafted."""
        return np.matmul(self.posterior[:, None, :], self.token_tables)[:, 0]

    def sampled_tokens(self, generator: np.random.Generator, spread: float) -> Floats:  # [N, D + 1]
        """The same, were one logit drawn from each posterior the truth; `spread` below 1 draws
        nearer the mode.
        """
        law = self.posterior ** (1 / spread**2)
        law /= law.sum(axis=1, keepdims=True)
        index = (
            (law.cumsum(axis=1) < generator.random((len(law), 1)))
            .sum(axis=1)
            .clip(0, len(GRID) - 1)
        )
        return self.token_tables[np.arange(len(law)), index]

    def acceptance(self) -> Floats:  # [N]
        """Mean chance that a first drafted token is accepted."""
        return self.posterior @ (1 / (1 + np.exp(-GRID)))

    def observe(self, index: int, num_accepted: int, num_drafted: int) -> None:
        """Take in one proposal of a drafter; no proposal (0 drafted) says nothing."""
        table, seen = self.tables[index], min(num_drafted, MAX_DRAFT_TOKENS)
        accepted = min(num_accepted, seen)
        log_likelihood = table.log_accept[:, :accepted].sum(axis=1)
        if accepted < seen:
            log_likelihood = log_likelihood + table.log_reject[:, accepted]
        if seen == 0:
            return
        weights = self.posterior[index] * np.exp(
            self.power * (log_likelihood - log_likelihood.max())
        )
        self.posterior[index] = weights / weights.sum()
        self.num_observed[index] += accepted + (accepted < seen)

    def drift(self) -> None:
        """One step passes: with the hazard's chance the text has changed and the population holds
        again.
        """
        self.posterior = (1 - self.hazard) * self.posterior + self.hazard * self.population


def _prior_of(
    name: str, prior: Prior | None, population_spread: float
) -> tuple[Floats, Floats, tuple[float, ...]]:
    """Population law, own law and depth offsets of one drafter; wide where the prior does not know
    it.
    """
    wide = normal_on_grid(WIDE_MEAN, WIDE_SD)
    if prior is None or name not in prior.mean:
        return wide, wide, ()
    mean, sd = float(prior.mean[name]), float(prior.sd[name])
    broad = wide
    if name in prior.population_mean:
        broad = normal_on_grid(
            float(prior.population_mean[name]), population_spread * float(prior.population_sd[name])
        )
    return (
        broad,
        normal_on_grid(mean, sd),
        tuple(float(x) for x in prior.depth_offsets.get(name, ())),
    )

"""What is believed about each drafter's acceptance in one row: a posterior on a grid of logits.

A drafter that drafts k tokens emits 1 + sum_{j<=k} prod_{i<=j} h(i) on average, where h(i) =
sigmoid(z + offset(i)) is the chance that depth i is accepted given that the depths before were. One
unknown z per drafter therefore prices every k. A step that accepted a of n drafted tokens has
likelihood prod_{i<=a} h(i), times (1 - h(a + 1)) exactly when a < n: the rejection is evidence, and
past n nothing was seen.

Whether a drafter proposes at all is known beforehand, but for those of Request.unsure: lookups
on the device match or do not. Their arms emit 1 + m (E - 1) tokens, where E are those of a draft
and m is the chance of one: the mean of a Beta law over asked and answered.

Earlier texts say how the logit is distributed over texts: by the law that makes what they have
shown most likely, held to the population's (or a wide one, where nothing is known) as strongly as
by one text (empirical Bayes; the maximum is taken by EM). Texts that have shown little add up; many
that disagree stay a broad law. What a router says of a text beyond what it says of the population,
the quotient of its two laws, then goes for a text of that law.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from decode.types import MAX_DRAFT_TOKENS, Prior

Floats = NDArray[np.float64]
GRID: Floats = np.linspace(-6.0, 6.0, 49)  # logits of acceptance at depth 1, a quarter apart
WIDE_MEAN, WIDE_SD = 0.0, 1.7  # nearly uniform in the chance itself: where nothing is known
NARROWEST_SD = 0.2  # below the grid's step a normal would fall between its points
MATCH_CHANCE = 0.5  # of a lookup of which nothing is known
EM_ROUNDS = 12  # nothing is gained by more
MOST_SAID = 50.0  # times that a router may call a logit likelier than the population does
MATCH_WEIGHT = 2.0  # times it was asked that this, or what a prior says, is worth


@dataclass(frozen=True)
class DepthTables:
    """What every logit of the grid implies for one drafter's depth offsets."""

    accepted: Floats  # [D + 1, G] log-likelihood of so many accepted, nothing seen after them
    rejected: Floats  # [D, G] of so many accepted, and the next one rejected
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
    all_so_far = np.cumsum(log_accept, axis=1)
    tokens = 1 + np.cumsum(np.exp(all_so_far), axis=1)
    accepted = np.concatenate([np.zeros((1, len(GRID))), all_so_far.T])
    return DepthTables(
        accepted,
        accepted[:-1] + log_reject.T,
        np.concatenate([np.ones((len(GRID), 1)), tokens], axis=1),
    )


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


class Matches:
    """How often each drafter proposes something when it is asked, by index into `drafters`."""

    def __init__(
        self,
        drafters: Sequence[str],
        prior: Prior | None,
        unsure: Collection[str],
        texts: Sequence["Matches"],  # earlier ones
    ) -> None:
        known = {} if prior is None else prior.match_chance
        chances = [_chance(known.get(name, MATCH_CHANCE)) for name in drafters]
        if texts:
            # A text weighs by how often it asked, at most as much as what was known beforehand.
            answers = [text.answers / (1 + text.answers.sum(axis=0)) for text in texts]
            matched, missed = np.array([chances, [1 - c for c in chances]]) + sum(answers)
            chances = [_chance(chance) for chance in matched / (matched + missed)]
        self._unsure = np.array([name in unsure for name in drafters], dtype=bool)
        self._prior: Floats = MATCH_WEIGHT * np.array([chances, [1 - c for c in chances]])
        self._counts = self._prior.copy()  # [2, N]: answered, not answered
        self.answers: Floats = np.zeros_like(self._prior)  # the same of this text alone

    @property
    def chance(self) -> Floats:  # [N]
        """Mean chance of a draft; 1 for a drafter whose offers can be relied on."""
        return np.where(self._unsure, self._counts[0] / self._counts.sum(axis=0), 1.0)

    def observe(self, index: int, matched: bool) -> None:
        """Take in whether a drafter that was asked has proposed anything."""
        row = 0 if matched else 1
        self._counts[row, index] += 1
        self.answers[row, index] += 1

    def drift(self, hazard: float) -> None:
        """One step passes."""
        self._counts += hazard * (self._prior - self._counts)


def _chance(value: float) -> float:
    """A chance of neither 0 nor 1, so that it can be unlearnt; of what is no number, ignorance."""
    return min(max(float(value), 0.02), 0.98) if np.isfinite(value) else MATCH_CHANCE


def law_over_texts(texts: Sequence["Belief"], anchor: Floats) -> Floats:  # [N, G]
    """Each drafter's logit over texts, whose rows may still go on; `anchor` [N, G] without any."""
    if not texts:
        return anchor
    shown = np.exp([text.log_likelihood for text in texts])  # [R, N, G]
    anchor = 0.999 * anchor + 0.001 * normal_on_grid(WIDE_MEAN, WIDE_SD)  # nothing is impossible
    laws = anchor
    for _ in range(EM_ROUNDS):
        given = laws * shown
        given /= given.sum(axis=2, keepdims=True)
        laws = (anchor + given.sum(axis=0)) / (1 + len(texts))
    return laws


class Belief:
    """The posterior of every drafter in one row, by index into `drafters`."""

    def __init__(
        self,
        drafters: Sequence[str],
        prior: Prior | None,
        unsure: Collection[str] = (),
        texts: Sequence["Belief"] = (),  # earlier ones
        *,
        population_share: float,
        population_spread: float,
        hazard: float,
        likelihood_power: float,
    ) -> None:
        self.hazard = hazard
        self.power = likelihood_power
        self.num_observed = np.zeros(len(drafters))  # tokens that were accepted or rejected
        priors = [_prior_of(name, prior, population_spread) for name in drafters]
        broad, own = (np.array([law[place] for law in priors]) for place in (0, 1))  # [N, G]
        tables = [depth_tables(offsets) for _, _, offsets in priors]
        population = law_over_texts(texts, broad)
        if texts:
            own = population * np.clip(own / np.maximum(broad, 1e-9), 1 / MOST_SAID, MOST_SAID)
            own /= own.sum(axis=1, keepdims=True)
        self.posterior: Floats = (1 - population_share) * own + population_share * population
        self.population: Floats = population  # [N, G]
        self.log_likelihood: Floats = np.zeros_like(population)  # of all that was seen
        self.tables = tables
        self.token_tables: Floats = np.array([table.tokens for table in tables])  # [N, G, D + 1]
        asked = [text.matches for text in texts if text.matches is not None]
        self.matches: Matches | None = None
        if unsure:
            self.matches = Matches(drafters, prior, unsure, asked)

    def expected_tokens(self) -> Floats:  # [N, D + 1]
        """Tokens that a step of each drafter emits on average, by number of tokens asked for."""
        drafted = np.matmul(self.posterior[:, None, :], self.token_tables)[:, 0]
        return self._if_matched(drafted)

    def tokens_of(self, drafters: NDArray[np.intp]) -> Floats:  # [n, G, D + 1]
        """The same of these drafters, were each logit of the grid the truth."""
        drafted = self.token_tables[drafters]
        if self.matches is None:
            return drafted
        return 1 + self.matches.chance[drafters, None, None] * (drafted - 1)

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
        return self._if_matched(self.token_tables[np.arange(len(law)), index])

    def _if_matched(self, drafted: Floats) -> Floats:  # [N, D + 1] both
        """Tokens of a step that may draft nothing, from those of one that drafts."""
        if self.matches is None:
            return drafted
        return 1 + self.matches.chance[:, None] * (drafted - 1)

    def acceptance(self) -> Floats:  # [N]
        """Mean chance that a first drafted token is accepted."""
        return self.posterior @ (1 / (1 + np.exp(-GRID)))

    def observe(self, index: int, num_accepted: int, num_drafted: int) -> None:
        """Take in one proposal of a drafter; no proposal (0 drafted) says nothing of acceptance."""
        table, seen = self.tables[index], min(num_drafted, MAX_DRAFT_TOKENS)
        accepted = min(num_accepted, seen)
        if seen == 0:
            return
        log_likelihood = (table.rejected if accepted < seen else table.accepted)[accepted]
        log_likelihood = self.power * (log_likelihood - log_likelihood.max())
        weights = self.posterior[index] * np.exp(log_likelihood)
        total = self.log_likelihood[index] + log_likelihood
        self.log_likelihood[index] = total - total.max()
        self.posterior[index] = weights / weights.sum()
        self.num_observed[index] += accepted + (accepted < seen)

    def drift(self) -> None:
        """One step passes: with the hazard's chance the text has changed and the population holds
        again.
        """
        self.posterior = (1 - self.hazard) * self.posterior + self.hazard * self.population
        if self.matches is not None:
            self.matches.drift(self.hazard)


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

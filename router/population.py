"""How drafters do on prompts at large: the belief before a prompt is looked at, one for each
temperature.

Model: the acceptance of drafter i on prompt p is sigmoid(z), z ~ N(mean_i, sd_i^2) between prompts,
and its accepted tokens are binomial with the trials divided by their dispersion
(examples.dispersion). Beside it stands how often the drafter proposes anything where it is asked,
as a lookup may not. Two scales are kept apart: `log_odds` is the logit of the acceptance of a
token drawn at large, `mean` the centre of the prompts' logits. They differ because a sigmoid bends
(D. J. C. MacKay 1992, "The evidence framework applied to classification networks"):
sigmoid(log_odds) = E sigmoid(z) for mean = log_odds sqrt(1 + pi sd^2/8).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from router.examples import Examples, dispersion

PSEUDO_TOKENS = (
    20.0  # weight of the shared rate in a drafter's own: a drafter seen once is not believed
)
USUAL_SD = 0.6  # logits; spread of acceptance between prompts where too few were seen to tell
SD_PRIOR = 0.5  # sd of log(sd) around what is expected
OFFSET_SD = 0.5  # logits; how far a depth's offset may lie from the depth before it
MOST_LOGITS = 6.0  # acceptance stays within 0.25% .. 99.75%


@dataclass(frozen=True)
class Population:
    """Beliefs for L temperatures (ascending), N drafters, D depths."""

    temperatures: Tensor  # [L]
    log_odds: Tensor  # [L, N] logit of a token's acceptance at depth 1
    sd: Tensor  # [L, N] spread of the prompts' logits
    depth_offsets: Tensor  # [L, N, D]; depth 1 (index 0) adds 0
    match_chance: Tensor  # [L, N] of a proposal at a start of an answer

    def at(self, temperatures: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # temperatures [P]
        """log_odds [P, N], sd [P, N] and depth offsets [P, N, D]."""
        return (
            self._mixed(self.log_odds, temperatures),
            self._mixed(self.sd, temperatures),
            self._mixed(self.depth_offsets, temperatures),
        )

    def match_chance_at(self, temperatures: Tensor) -> Tensor:  # [P] -> [P, N]
        """How often each drafter proposes anything where it is asked."""
        return self._mixed(self.match_chance, temperatures)

    def _mixed(self, values: Tensor, temperatures: Tensor) -> Tensor:  # [L, ...] -> [P, ...]
        """Linear between the known temperatures, constant outside them."""
        known = self.temperatures
        x = temperatures.clamp(known[0], known[-1])
        right = torch.searchsorted(known, x).clamp(max=len(known) - 1)
        left = (right - 1).clamp(min=0)
        gap = (known[right] - known[left]).clamp(min=1e-12)
        weight = torch.where(right == left, torch.zeros_like(x), (x - known[left]) / gap)
        w = weight.reshape(-1, *[1] * (values.dim() - 1))
        return (1 - w) * values[left] + w * values[right]


def centre_of(log_odds: Tensor, sd: Tensor) -> Tensor:
    """The mean of a normal law of logits under which a token's acceptance has these log-odds."""
    return log_odds * torch.sqrt(1 + math.pi / 8 * sd**2)


def fit_population(examples: Examples) -> Population:
    """The population of these examples, shrunk where a drafter was hardly seen."""
    temperatures = torch.unique(examples.temperatures)  # ascending
    inflation = dispersion(examples)
    shared = _rate(examples.successes.sum(), examples.trials.sum(), torch.tensor(0.5))
    own = _rate(examples.successes.sum(0), examples.trials.sum(0), shared)
    matching = _rate(examples.trials.sum(0), examples.asked.sum(0), torch.tensor(0.5))
    beliefs = []
    for temperature in temperatures:
        part = examples.take((examples.temperatures == temperature).numpy())
        log_odds = logit(_rate(part.successes.sum(0), part.trials.sum(0), own))
        successes, trials = part.successes / inflation, part.trials / inflation
        expected = torch.full_like(log_odds, USUAL_SD)
        sd = between_prompt_sd(successes, trials, log_odds.expand_as(trials), expected)
        offsets = _depth_offsets(part, log_odds, sd, inflation)
        matches = _rate(part.trials.sum(0), part.asked.sum(0), matching)
        beliefs.append((log_odds, sd, offsets, matches))
    return Population(temperatures, *(torch.stack(found) for found in zip(*beliefs, strict=True)))


def logit(rate: Tensor) -> Tensor:
    """The log-odds of a rate, kept within MOST_LOGITS."""
    return torch.logit(rate).clamp(-MOST_LOGITS, MOST_LOGITS)


def _rate(successes: Tensor, trials: Tensor, towards: Tensor) -> Tensor:
    return (successes + PSEUDO_TOKENS * towards) / (trials + PSEUDO_TOKENS)


def between_prompt_sd(
    successes: Tensor,  # [P, N], divided by their dispersion
    trials: Tensor,  # [P, N]
    log_odds: Tensor,  # [P, N] what was predicted
    expected: Tensor,  # [N] the sd where the data do not tell
    known_variance: Tensor | None = None,  # [P, N] of the prediction itself, explained already
) -> Tensor:  # [N]
    """The sd of true logits around predictions, with the binomial noise of counting taken off.

    Maximises the marginal likelihood (a sum over 33 points of the normal law) times a log-normal
    prior.
    """
    grid = torch.logspace(math.log10(0.05), math.log10(2.5), 48, dtype=torch.float64)
    points = torch.linspace(-4, 4, 33, dtype=torch.float64)
    mass = torch.log_softmax(-(points**2) / 2, 0)
    known = torch.zeros_like(trials) if known_variance is None else known_variance
    scores = []
    for value in grid:
        sd = torch.sqrt(value**2 + known)
        z = centre_of(log_odds, sd)[..., None] + sd[..., None] * points  # [P, N, 33]
        log_likelihood = successes[..., None] * z - trials[..., None] * softplus(z)
        prior = -((torch.log(value) - torch.log(expected)) ** 2) / (2 * SD_PRIOR**2)
        scores.append(torch.logsumexp(log_likelihood + mass, -1).sum(0) + prior)
    return grid[torch.stack(scores).argmax(0)]


def softplus(z: Tensor) -> Tensor:
    """log(1 + e^z) without torch's threshold, which would make it linear too early for float64."""
    return torch.logaddexp(z, torch.zeros_like(z))


def _depth_offsets(
    part: Examples, log_odds: Tensor, sd: Tensor, inflation: Tensor
) -> Tensor:  # [N, D]
    """What each depth adds to a prompt's own logit at depth 1.

    Taken within prompts, not between them: deep drafts come from easy prompts, and their ease must
    not be read as an effect of depth. A depth that was hardly reached carries on from the one
    before it.
    """
    rate = torch.sigmoid(log_odds)
    weight = inflation / (sd**2 * rate * (1 - rate))  # tokens that the population counts for
    own = logit((part.successes + weight * rate) / (part.trials + weight))  # [P, N]
    offsets = [torch.zeros_like(log_odds)]
    for k in range(1, part.accepted.shape[2]):
        accepted, proposed = part.accepted[:, :, k] / inflation, part.proposed[:, :, k] / inflation
        before, delta = offsets[-1], offsets[-1]
        for _ in range(30):  # Newton on a concave function of one number
            p = torch.sigmoid(own + delta)
            slope = (accepted - proposed * p).sum(0) - (delta - before) / OFFSET_SD**2
            curve = (proposed * p * (1 - p)).sum(0) + 1 / OFFSET_SD**2
            delta = delta + (slope / curve).clamp(-1, 1)
        offsets.append(delta)
    return torch.stack(offsets, 1)

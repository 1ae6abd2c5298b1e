"""Make predicted acceptance mean what it says, and measure whether it does.

Calibration keeps the population and rescales what the network adds to it, one slope and one bias a
drafter: log_odds = population + slope * correction + bias. It is a ridge-penalised logistic
regression on held-out prompts whose slope is pulled towards 0, and further where its gain may be
luck: without evidence the answer is the population.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from router.head import binomial_nll

SLOPE_SD = 1.0  # a correction right as it stands (slope 1) is one sd from none at all
BIAS_SD = 0.2  # logits
NUM_BINS = 10


@dataclass(frozen=True)
class Calibration:
    """What held-out prompts say about the corrections of N drafters."""

    slope: Tensor  # [N], 0 (the population only) and up
    bias: Tensor  # [N] logits

    def __call__(self, base: Tensor, correction: Tensor) -> Tensor:  # [P, N]
        """Calibrated log-odds; a drafter whose slope is 0 has the population's, plus the bias."""
        return base + self.slope * correction + self.bias


def fit_calibration(
    base: Tensor,  # [P, N] population log-odds
    correction: Tensor,  # [P, N]
    successes: Tensor,  # [P, N]
    trials: Tensor,  # [P, N]
) -> Calibration:
    """The most probable slope and bias; counts are discounted by how much prompts differ."""
    overdispersion = pearson(base, successes, trials)
    successes, trials = successes / overdispersion, trials / overdispersion
    free = _newton(base, correction, successes, trials)
    wrong = free[0] < 0  # anti-correlated on held-out prompts: no use is safer than its reverse
    alone = _newton(base, torch.zeros_like(correction), successes, trials)
    slope, bias = (torch.where(wrong, a, f) for a, f in zip(alone, free, strict=True))
    population = binomial_nll(base + bias, successes, trials)
    gain = population - binomial_nll(base + slope * correction + bias, successes, trials)
    return Calibration(slope * _trust(gain, trials > 0), bias)


def _trust(gain: Tensor, seen: Tensor) -> Tensor:  # [P, N], [P, N] -> [N]
    """How much of a slope to keep, in [0, 1]: next to none where its gain could be luck.

    1 - (standard error / gain)^2 over held-out prompts: the same prompts chose when training
    stopped, so a gain of one standard error is what training on noise looks like.
    """
    total, count = gain.sum(0), seen.sum(0).clamp(min=1)
    error = ((gain - total / count).square() * seen).sum(0).sqrt()
    return torch.where(total > error, 1 - (error / total.clamp(min=1e-12)).square(), 0.0)


def pearson(log_odds: Tensor, successes: Tensor, trials: Tensor) -> Tensor:  # [N]
    """Variance of counts between prompts over that of coin flips, at least 1."""
    p = torch.sigmoid(log_odds)
    squares = (successes - trials * p).square() / (trials * p * (1 - p)).clamp(min=1e-9)
    seen = trials > 0
    return ((squares * seen).sum(0) / seen.sum(0).clamp(min=1)).clamp(min=1)


def _newton(base: Tensor, x: Tensor, successes: Tensor, trials: Tensor) -> tuple[Tensor, Tensor]:
    """Maximise the penalised likelihood of slope and bias of all drafters; it is concave."""
    slope, bias = torch.zeros_like(base[0]), torch.zeros_like(base[0])
    for _ in range(50):
        p = torch.sigmoid(base + slope * x + bias)
        rest, weight = successes - trials * p, trials * p * (1 - p)
        g0 = (rest * x).sum(0) - slope / SLOPE_SD**2
        g1 = rest.sum(0) - bias / BIAS_SD**2
        h00 = (weight * x * x).sum(0) + 1 / SLOPE_SD**2
        h01, h11 = (weight * x).sum(0), weight.sum(0) + 1 / BIAS_SD**2
        determinant = h00 * h11 - h01 * h01
        slope = slope + ((h11 * g0 - h01 * g1) / determinant).clamp(-1, 1)
        bias = bias + ((h00 * g1 - h01 * g0) / determinant).clamp(-1, 1)
    return slope, bias


# ------------------------------------------------------------------------------------ measures


def token_nll(log_odds: Tensor, successes: Tensor, trials: Tensor) -> float:
    """Nats per proposed token."""
    return float(binomial_nll(log_odds, successes, trials).sum() / trials.sum())


def acceptance_error(log_odds: Tensor, successes: Tensor, trials: Tensor) -> float:
    """|predicted - counted acceptance| of a prompt, averaged over its tokens."""
    return float((successes - trials * torch.sigmoid(log_odds)).abs().sum() / trials.sum())


def brier(log_odds: Tensor, successes: Tensor, trials: Tensor) -> float:
    """Mean squared error of predicted acceptance against a token's outcome (0 or 1)."""
    p = torch.sigmoid(log_odds)
    return float((trials * p**2 - 2 * successes * p + successes).sum() / trials.sum())


def bin_of(log_odds: Tensor) -> Tensor:
    """Which of NUM_BINS equal intervals of [0, 1] a predicted acceptance falls in."""
    return (torch.sigmoid(log_odds) * NUM_BINS).long().clamp(max=NUM_BINS - 1)


def expected_calibration_error(log_odds: Tensor, successes: Tensor, trials: Tensor) -> float:
    """Gap of predicted and counted acceptance in NUM_BINS bins, averaged over tokens."""
    gaps = torch.zeros(NUM_BINS, dtype=torch.float64)
    surplus = trials * torch.sigmoid(log_odds) - successes
    gaps.index_add_(0, bin_of(log_odds).flatten(), surplus.flatten())
    return float(gaps.abs().sum() / trials.sum())


def reliability(log_odds: Tensor, successes: Tensor, trials: Tensor) -> list[dict[str, float]]:
    """The bins of a reliability plot that hold tokens: predicted and counted acceptance, tokens."""
    rows = []
    bins, p = bin_of(log_odds), torch.sigmoid(log_odds)
    for number in range(NUM_BINS):
        tokens = float(trials[bins == number].sum())
        if tokens > 0:
            predicted = float((trials * p)[bins == number].sum()) / tokens
            counted = float(successes[bins == number].sum()) / tokens
            rows.append({"predicted": predicted, "counted": counted, "tokens": tokens})
    return rows

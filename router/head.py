"""A small network from a prompt to one correction a drafter, added to the population's log-odds.

It starts as the population itself (its last layer is zero), and leaves it only as far as held-out
prompts gain: full-batch descent, a quadratic penalty chosen on validation, the best step kept, step
0 included. The uncertainty of the last layer is Bayesian (neural-linear, arXiv 1802.09127).
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from router.population import softplus


@dataclass(frozen=True)
class HeadSettings:
    """How the network is shaped and trained."""

    hidden: int
    penalties: Sequence[
        float
    ]  # weights of the squared parameters; the one that validates best is kept
    learning_rate: float
    max_steps: int
    patience: int  # steps without a better validation before training stops


@dataclass(frozen=True)
class Batch:
    """Inputs and counts of P prompts; a drafter without trials on a prompt is not counted there."""

    inputs: Tensor  # [P, X]
    base: Tensor  # [P, N] the population's log-odds
    successes: Tensor  # [P, N]
    trials: Tensor  # [P, N]


class Head(nn.Module):
    """Corrections [P, N] = last(tanh(first(inputs))); small, so it runs in float64."""

    def __init__(self, num_inputs: int, hidden: int, num_drafters: int, seed: int = 0) -> None:
        super().__init__()
        self.first = nn.Linear(num_inputs, hidden, dtype=torch.float64)
        self.last = nn.Linear(hidden, num_drafters, dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():  # inputs have norm of about one, see model.Standardiser
            self.first.weight.normal_(0, 1, generator=generator)
            self.first.bias.zero_()
            self.last.weight.zero_()
            self.last.bias.zero_()

    def trunk(self, inputs: Tensor) -> Tensor:  # [P, X] -> [P, hidden + 1]
        """What the last layer is linear in, with the constant."""
        hidden = torch.tanh(self.first(inputs))
        return torch.cat([hidden, torch.ones_like(hidden[:, :1])], 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(inputs)))


def binomial_nll(log_odds: Tensor, successes: Tensor, trials: Tensor) -> Tensor:
    """-log p of the counts, without the binomial coefficient, which no prediction changes."""
    return trials * softplus(log_odds) - successes * log_odds


def mean_nll(log_odds: Tensor, batch: Batch) -> Tensor:
    """Nats per proposed token, each drafter counting alike."""
    tokens = batch.trials.sum(0)
    nll = binomial_nll(log_odds, batch.successes, batch.trials).sum(0)
    seen = tokens > 0
    return (nll[seen] / tokens[seen]).mean()


@dataclass(frozen=True)
class Trained:
    """The network that validated best, and how training went."""

    head: Head
    penalty: float
    step: int
    history: list[dict[str, float]]


def train_head(
    train: Batch,
    validation: Batch,
    settings: HeadSettings,
    seed: int,
    on_step: Callable[[], None] = lambda: None,
) -> Trained:
    """The best step of the best run, one run a penalty; equal seeds give equal weights."""
    runs = [
        _descend(train, validation, settings, value, seed, on_step) for value in settings.penalties
    ]
    losses = [run.history[run.step]["validation_nll"] for run in runs]
    return runs[losses.index(min(losses))]


def _descend(
    train: Batch,
    validation: Batch,
    settings: HeadSettings,
    penalty: float,
    seed: int,
    on_step: Callable[[], None],
) -> Trained:
    head = Head(train.inputs.shape[1], settings.hidden, train.trials.shape[1], seed)
    start = head.first.weight.detach().clone()
    optimizer = torch.optim.Adam(head.parameters(), lr=settings.learning_rate)
    best, best_step, history = deepcopy(head), 0, []
    for step in range(settings.max_steps + 1):
        loss = mean_nll(train.base + head(train.inputs), train)
        with torch.no_grad():
            held_out = float(mean_nll(validation.base + head(validation.inputs), validation))
        history.append({"train_nll": float(loss.detach()), "validation_nll": held_out})
        if held_out < history[best_step]["validation_nll"]:
            best, best_step = deepcopy(head), step
        if step - best_step >= settings.patience:
            break
        # the first layer is pulled to where it began: random features, bent only as far as they pay
        size = (head.first.weight - start).square().sum() + head.last.weight.square().sum()
        optimizer.zero_grad()
        (loss + penalty * size).backward()
        optimizer.step()
        on_step()
    return Trained(best.requires_grad_(False), penalty, best_step, history)


def last_layer_covariance(
    head: Head,
    batch: Batch,
    sd: Tensor,  # [P, N] spread between prompts
    inflation: Tensor,  # [N] dispersion of counts
) -> Tensor:  # [N, hidden + 1, hidden + 1]
    """Posterior covariance of the last layer, one matrix a drafter.

    Each prompt tells a logit with variance sd^2 + counting noise. A priori the layer is as wide as
    lets the correction spread like the population does, so that the variance never exceeds that by
    much.
    """
    phi = head.trunk(batch.inputs)
    p = torch.sigmoid(batch.base + head(batch.inputs))
    information = batch.trials * p * (1 - p) / inflation
    precision = information / (1 + sd**2 * information)  # zero where nothing was proposed
    gram = torch.einsum("ph,pn,pk->nhk", phi, precision, phi)
    width = phi.square().sum(1).mean() / sd.square().mean(0)  # [N] prior precision
    eye = torch.eye(phi.shape[1], dtype=phi.dtype)
    return torch.linalg.inv(gram + width[:, None, None] * eye)

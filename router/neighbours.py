"""The baseline a router must beat: what the nearest known prompts had (arXiv 2505.12601)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from router.calibration import token_nll
from router.examples import Examples
from router.population import Population, logit

PSEUDO_TOKENS = (20.0, 100.0, 500.0, 2500.0)  # weights of the population, tried on validation


@dataclass(frozen=True)
class Neighbours:
    """Pooled counts of the k most similar training prompts under the same temperature."""

    embeddings: Tensor  # [P, E], of norm 1
    examples: Examples
    population: Population
    num_neighbours: int
    pseudo_tokens: float

    def log_odds(self, embeddings: Tensor, temperatures: Tensor) -> Tensor:  # [Q, E], [Q] -> [Q, N]
        """Predicted log-odds of acceptance at depth 1."""
        base, _, _ = self.population.at(temperatures)
        similar = unit(embeddings) @ self.embeddings.T
        known = self.examples.temperatures
        nearest = (temperatures[:, None] - known).abs()
        other_law = nearest > nearest.min(1, keepdim=True).values + 1e-9
        order = similar.masked_fill(other_law, -2).topk(min(self.num_neighbours, len(known)), dim=1)
        ours = (order.values > -2)[..., None]  # [Q, k, 1]
        successes = (self.examples.successes[order.indices] * ours).sum(1)
        trials = (self.examples.trials[order.indices] * ours).sum(1)
        weight = self.pseudo_tokens
        return logit((successes + weight * torch.sigmoid(base)) / (trials + weight))


def unit(embeddings: Tensor) -> Tensor:
    """Rows of norm 1 in float64; a zero row stays zero."""
    rows = embeddings.double()
    return rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-12)


def fit_neighbours(
    train: Examples,
    train_embeddings: Tensor,
    validation: Examples,
    validation_embeddings: Tensor,
    population: Population,
    candidates: Sequence[int],
) -> Neighbours:
    """The number of neighbours and the weight of the population that predict validation best."""
    known = unit(train_embeddings)
    tried = [
        Neighbours(known, train, population, k, weight)
        for k in candidates
        for weight in PSEUDO_TOKENS
    ]
    losses = [
        token_nll(
            one.log_odds(validation_embeddings, validation.temperatures),
            validation.successes,
            validation.trials,
        )
        for one in tried
    ]
    return tried[losses.index(min(losses))]

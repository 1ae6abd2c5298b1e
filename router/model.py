"""The router as numbers: prompt vectors in, log-odds of acceptance and their spread out."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from router.calibration import Calibration, fit_calibration
from router.examples import Examples, dispersion
from router.features import feature_matrix
from router.head import Batch, Head, HeadSettings, Trained, last_layer_covariance, train_head
from router.population import Population, between_prompt_sd, fit_population


@dataclass(frozen=True)
class Standardiser:
    """Brings embeddings and features to norm one each, so that neither drowns the other."""

    embedding_mean: Tensor  # [E]
    embedding_scale: Tensor  # []
    feature_mean: Tensor  # [F]
    feature_scale: Tensor  # [F]; 0 for a feature that never varied

    @classmethod
    def fit(cls, embeddings: Tensor, features: Tensor) -> "Standardiser":
        """From the training prompts."""
        embeddings = embeddings.double()
        mean = embeddings.mean(0)
        spread = (embeddings - mean).square().sum(1).mean().sqrt()
        sd = features.std(0, correction=0)
        varies = sd > 1e-6
        scale = torch.where(varies, 1 / sd.clamp(min=1e-6), torch.zeros_like(sd))
        return cls(mean, 1 / spread.clamp(min=1e-6), features.mean(0), scale)

    def __call__(self, embeddings: Tensor, features: Tensor) -> Tensor:  # -> [P, E + F]
        semantic = (embeddings.double() - self.embedding_mean) * self.embedding_scale
        cheap = ((features - self.feature_mean) * self.feature_scale).clamp(-3, 3)
        return torch.cat([semantic, cheap / features.shape[1] ** 0.5], 1)


@dataclass(frozen=True)
class RouterModel:
    """Population, network and calibration of N drafters."""

    population: Population
    standardiser: Standardiser
    head: Head
    calibration: Calibration
    sd: Tensor  # [N] spread of prompts around the prediction
    covariance: Tensor  # [N, hidden + 1, hidden + 1] of the last layer

    def predict(
        self, embeddings: Tensor, features: Tensor, temperatures: Tensor
    ) -> tuple[Tensor, Tensor]:  # [P, N] log-odds, [P, N] sd of a prompt's logit
        """Acceptance of a token at depth 1, calibrated, and how far a prompt may lie from it."""
        base, _, _ = self.population.at(temperatures)
        inputs = self.standardiser(embeddings, features)
        log_odds = self.calibration(base, self.head(inputs))
        variance = _network_variance(self.head, self.covariance, self.calibration, inputs)
        return log_odds, (self.sd**2 + variance).sqrt()


@dataclass(frozen=True)
class FittedRouter:
    """A router and what its training said."""

    model: RouterModel
    trained: Trained


def example_features(examples: Examples) -> Tensor:  # [P, F]
    """The cheap features of these prompts under their temperatures."""
    return feature_matrix(
        list(examples.texts),
        [int(length) for length in examples.num_prompt_tokens],
        examples.temperatures.tolist(),
    )


def fit_router(
    train: Examples,
    train_embeddings: Tensor,  # [P, E]
    validation: Examples,
    validation_embeddings: Tensor,  # [Q, E]
    settings: HeadSettings,
    seed: int,
    on_step: Callable[[], None] = lambda: None,
) -> FittedRouter:
    """Population and network from training prompts; stop, calibration, spread from validation."""
    population = fit_population(train)
    standardiser = Standardiser.fit(train_embeddings, example_features(train))

    def batch(examples: Examples, embeddings: Tensor) -> Batch:
        base, _, _ = population.at(examples.temperatures)
        inputs = standardiser(embeddings, example_features(examples))
        return Batch(inputs, base, examples.successes, examples.trials)

    fit, held_out = batch(train, train_embeddings), batch(validation, validation_embeddings)
    trained = train_head(fit, held_out, settings, seed, on_step)
    head, inflation = trained.head, dispersion(train)
    _, spread, _ = population.at(train.temperatures)
    covariance = last_layer_covariance(head, fit, spread, inflation)
    correction = head(held_out.inputs)
    calibration = fit_calibration(held_out.base, correction, held_out.successes, held_out.trials)
    sd = between_prompt_sd(
        held_out.successes / inflation,
        held_out.trials / inflation,
        calibration(held_out.base, correction),
        expected=population.sd.mean(0),
        known_variance=_network_variance(head, covariance, calibration, held_out.inputs),
    )
    model = RouterModel(population, standardiser, head, calibration, sd, covariance)
    return FittedRouter(model, trained)


def _network_variance(
    head: Head, covariance: Tensor, calibration: Calibration, inputs: Tensor
) -> Tensor:  # [P, N]
    """Variance of the correction that the last layer leaves open, on the calibrated scale."""
    phi = head.trunk(inputs)
    return torch.einsum("ph,nhk,pk->pn", phi, covariance, phi) * calibration.slope**2

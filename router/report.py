"""What a router is worth on unseen prompts: measures, and paired intervals against baselines."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from router.calibration import (
    NUM_BINS,
    acceptance_error,
    bin_of,
    brier,
    expected_calibration_error,
    token_nll,
)
from router.examples import Examples
from router.head import binomial_nll
from router.population import logit

FEWEST_FAMILIES = 8  # below this, prompts are resampled in place of families


def measures(log_odds: Tensor, examples: Examples) -> dict[str, float]:
    """NLL and Brier per token, error of a prompt's acceptance, calibration error."""
    counts = examples.successes, examples.trials
    return {
        "nll": token_nll(log_odds, *counts),
        "acceptance_error": acceptance_error(log_odds, *counts),
        "brier": brier(log_odds, *counts),
        "calibration_error": expected_calibration_error(log_odds, *counts),
    }


def compare(
    predictions: Mapping[str, Tensor],  # method -> [P, N] log-odds; "router" among them
    examples: Examples,
    num_resamples: int,
    seed: int,
) -> dict[str, Any]:
    """Measures of each method, and router minus method with a 95% paired bootstrap interval (below
    0: better).

    `hindsight` is the NLL had each prompt's own acceptance been known: no prediction can be below
    it.
    """
    known = (examples.successes + 1e-6) / (examples.trials + 2e-6)
    units, weights = _resampled(examples, num_resamples, seed)
    ours = _cluster_sums(predictions["router"], examples, units)
    result: dict[str, Any] = {
        "num_prompts": len(set(examples.prompt_ids)),
        "num_tokens": float(examples.trials.sum()),
        "hindsight_nll": token_nll(logit(known), examples.successes, examples.trials),
        "methods": {name: measures(values, examples) for name, values in predictions.items()},
        "router_minus": {},
    }
    for name, values in predictions.items():
        if name != "router":
            theirs = _cluster_sums(values, examples, units)
            result["router_minus"][name] = _differences(ours, theirs, weights)
    return result


def _resampled(examples: Examples, num_resamples: int, seed: int) -> tuple[np.ndarray, Tensor]:
    """The cluster of each example [P], and how often each resample [R, C] draws a cluster.

    Prompts of one template family resemble each other, so families are drawn where there are
    enough.
    """
    enough = len(set(examples.families)) >= FEWEST_FAMILIES
    names = examples.families if enough else examples.prompt_ids
    _, units = np.unique(names.astype(str), return_inverse=True)
    count = int(units.max()) + 1
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), num_resamples)
    everything = np.ones((1, count), dtype=draws.dtype)  # the first row is the sample itself
    return units, torch.from_numpy(np.concatenate([everything, draws])).double()


def _cluster_sums(log_odds: Tensor, examples: Examples, units: np.ndarray) -> dict[str, Tensor]:
    """Sums over each cluster of which every measure is a ratio: [C] or [C, bins]."""
    s, n = examples.successes, examples.trials
    p = torch.sigmoid(log_odds)
    count, index = int(units.max()) + 1, torch.from_numpy(units)

    def sums(values: Tensor) -> Tensor:
        return torch.zeros(count, dtype=torch.float64).index_add_(0, index, values.sum(1))

    surplus = torch.zeros(count, NUM_BINS, dtype=torch.float64)
    places = index[:, None].expand_as(n), bin_of(log_odds)
    surplus.index_put_(places, n * p - s, accumulate=True)
    return {
        "tokens": sums(n),
        "nll": sums(binomial_nll(log_odds, s, n)),
        "acceptance_error": sums((s - n * p).abs()),
        "calibration_error": surplus,
    }


def _differences(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], weights: Tensor
) -> dict[str, dict[str, float]]:
    tokens = weights @ ours["tokens"]
    result = {}
    for name in ("nll", "acceptance_error", "calibration_error"):
        a, b = weights @ ours[name], weights @ theirs[name]
        if a.dim() == 2:  # bins: the absolute gap of each is taken after resampling
            a, b = a.abs().sum(1), b.abs().sum(1)
        difference = (a - b) / tokens.clamp(min=1e-9)
        low, high = torch.quantile(difference[1:], torch.tensor([0.025, 0.975]).double()).tolist()
        result[name] = {"difference": float(difference[0]), "low": low, "high": high}
    return result

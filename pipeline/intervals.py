"""Ratios of totals with paired bootstrap intervals over prompts."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

Floats = Sequence[float] | np.ndarray
LEVEL = 0.95
CHUNK = 256  # resamples at a time, so that memory stays small for many prompts


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and the interval around it, from `num` prompts."""

    value: float
    low: float
    high: float
    num: int

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"

    def plain(self) -> dict[str, float | int]:
        """As JSON."""
        return asdict(self)


def ratio_of_totals(
    numerators: Floats, denominators: Floats, num_resamples: int, seed: int
) -> Interval:
    """sum(numerators) / sum(denominators); entries are paired prompts, which are resampled
    together.
    """
    return _bootstrap([np.array([numerators, denominators], dtype=float)], num_resamples, seed)


def ratio_of_rates(
    tokens: Floats,
    seconds: Floats,
    base_tokens: Floats,
    base_seconds: Floats,
    num_resamples: int,
    seed: int,
) -> Interval:
    """(tokens / seconds of the totals) over the same of the base; entries are paired prompts."""
    ours = np.array([tokens, seconds], dtype=float)
    base = np.array([base_tokens, base_seconds], dtype=float)
    return _bootstrap([ours, base], num_resamples, seed)


def _bootstrap(pairs: list[np.ndarray], num_resamples: int, seed: int) -> Interval:
    num = pairs[0].shape[1]
    if num == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    stacked = np.stack(pairs)  # [1 or 2, 2, P]
    value = float(_combine(stacked.sum(axis=2)))
    if num == 1:  # nothing to resample: no interval can be claimed
        return Interval(value, math.nan, math.nan, 1)
    generator = np.random.default_rng(seed)
    samples = []
    for start in range(0, num_resamples, CHUNK):
        rows = min(CHUNK, num_resamples - start)
        index = generator.integers(0, num, size=(rows, num))
        samples.append(_combine(np.moveaxis(stacked[:, :, index].sum(axis=3), 2, 0)))
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.nanpercentile(np.concatenate(samples), [tail, 100 - tail])
    return Interval(value, float(low), float(high), num)


def _combine(totals: np.ndarray) -> np.ndarray:  # [..., 1 or 2, 2]
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = totals[..., 0] / totals[..., 1]
        return rates[..., 0] if rates.shape[-1] == 1 else rates[..., 0] / rates[..., 1]

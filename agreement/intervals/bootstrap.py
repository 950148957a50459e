"""Intervals by resampling whole clusters.

`studentised` is written here because it needs a standard error inside every resample; with sums by cluster that is a
few matrix products (Efron and Tibshirani 1993, *An Introduction to the Bootstrap*, section 12.5). `percentile` and
`bca` go through `scipy.stats.bootstrap` and are kept for comparison.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agreement.intervals.clusters import Float64Array, Ratios

# Elements of one (draws, resamples) block: 2**17 float64 are 1 MB, so the ten or so that live at a time stay in cache;
# blocks of 16 MB take twice as long.
BLOCK = 1 << 17


@dataclass(frozen=True)
class Resampling:
    """How a bootstrap is run.

    Attributes:
        rng: Source of the resamples.
        confidence: Nominal two-sided coverage, between 0 and 1.
        n_resamples: Resamples; each tail must hold at least one.
    """

    rng: np.random.Generator
    confidence: float
    n_resamples: int


class Statistic(Protocol):
    """A smooth function of one or several means, with its gradient."""

    def __call__(self, means: Sequence[Float64Array]) -> tuple[Float64Array, tuple[Float64Array, ...]]:
        """Return the value and its derivative by each mean; arrays of any one shape."""


def identity(means: Sequence[Float64Array]) -> tuple[Float64Array, tuple[Float64Array, ...]]:
    """Return the mean itself."""
    return means[0], (np.ones_like(means[0]),)


def logit(means: Sequence[Float64Array]) -> tuple[Float64Array, tuple[Float64Array, ...]]:
    """Return `log(p / (1 - p))`; infinite at 0 and 1."""
    p = means[0]
    with np.errstate(divide="ignore"):
        return np.log(p) - np.log1p(-p), (1.0 / (p * (1.0 - p)),)


def log(means: Sequence[Float64Array]) -> tuple[Float64Array, tuple[Float64Array, ...]]:
    """Return the logarithm of a mean that is not negative; minus infinity at 0."""
    with np.errstate(divide="ignore"):
        return np.log(means[0]), (1.0 / means[0],)


def exp_difference(means: Sequence[Float64Array]) -> tuple[Float64Array, tuple[Float64Array, ...]]:
    """Return `exp(second) - exp(first)`: perplexity of the test minus that of the base from both mean losses."""
    base, test = np.exp(means[0]), np.exp(means[1])
    return test - base, (-base, test)


def resample_weights(n_clusters: int, n_resamples: int, rng: np.random.Generator) -> Float64Array:
    """Return (n_resamples, n_clusters) float64: how often each resample holds each cluster; rows add to n_clusters."""
    picks = rng.integers(0, n_clusters, size=(n_resamples, n_clusters))
    picks += np.arange(n_resamples)[:, None] * n_clusters
    counts = np.bincount(picks.ravel(), minlength=n_resamples * n_clusters)
    return counts.reshape(n_resamples, n_clusters).astype(np.float64)


def studentised(
    columns: Sequence[Ratios],
    statistic: Statistic,
    plan: Resampling,
) -> tuple[Float64Array, Float64Array]:
    """Return the (n_draws,) ends of the bootstrap-t interval, on the statistic's own scale.

    In each resample of clusters the distance from the estimate is divided by that resample's own linearised standard
    error. A resample whose standard error is zero lies infinitely far on its side (it says nothing about spread), so
    an end is infinite where such resamples are more than the tail; the caller clips or replaces it. All draws share
    one set of resamples.

    Args:
        columns: One batch for each mean the statistic takes, all with the same counts.
        statistic: The function of the means.
        plan: Source and number of resamples, and the coverage.
    """
    n_resamples = plan.n_resamples
    counts = columns[0].counts
    n_draws, k = counts.shape
    weights = resample_weights(k, n_resamples, plan.rng)
    low = np.empty(n_draws)
    high = np.empty(n_draws)
    rows = max(1, BLOCK // n_resamples)
    tail = max(0, int((n_resamples + 1) * (1.0 - plan.confidence) / 2.0) - 1)
    for start in range(0, n_draws, rows):
        part = slice(start, start + rows)
        means = [column.value[part] for column in columns]
        value, gradient = statistic(means)
        residuals = [column.residuals[part] for column in columns]
        none = [np.zeros((1, 1))] * len(columns)
        slopes = [slope[:, None] for slope in gradient]
        with np.errstate(invalid="ignore"):
            error = _error(residuals, counts[part], np.ones((1, k)), slopes, none)[:, 0]
        pivots = _pivots(residuals, means, counts[part], weights, statistic)
        pivots.partition((tail, n_resamples - 1 - tail), axis=1)
        # The upper tail of the pivot sets the lower end: an estimate far above the truth calls for a long way down.
        with np.errstate(invalid="ignore"):
            low[part] = value - pivots[:, n_resamples - 1 - tail] * error
            high[part] = value - pivots[:, tail] * error
    return low, high


def _pivots(
    residuals: Sequence[Float64Array],
    means: Sequence[Float64Array],
    counts: Float64Array,
    weights: Float64Array,
    statistic: Statistic,
) -> Float64Array:
    """Return (n_draws, n_resamples) distances from the estimate in the resample's own standard errors."""
    total = counts @ weights.T
    shifts = [residual @ weights.T / total for residual in residuals]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        star, gradient = statistic([mean[:, None] + shift for mean, shift in zip(means, shifts, strict=True)])
        distance = star - statistic(means)[0][:, None]
        pivots = distance / _error(residuals, counts, weights, gradient, shifts)
    # Zero or undefined standard error: see `studentised`.
    undefined = ~np.isfinite(pivots)
    pivots[undefined] = np.where(distance == 0.0, 0.0, np.copysign(np.inf, distance))[undefined]
    return pivots


def _error(
    residuals: Sequence[Float64Array],
    counts: Float64Array,
    weights: Float64Array,
    gradient: Sequence[Float64Array],
    shifts: Sequence[Float64Array],
) -> Float64Array:
    """Return the (n_draws, n_resamples) linearised standard error of the statistic in each resample.

    The residual of a cluster in a resample is `sum_q gradient_q * (residual_q - shift_q * count)`; its weighted sum
    of squares is expanded so that it needs only products with `weights`. Residuals about the full-sample ratio keep
    the expansion free of cancellation.
    """
    k = counts.shape[1]
    total = counts @ weights.T
    count_squares = counts**2 @ weights.T
    products = [(residual * counts) @ weights.T for residual in residuals]
    square: Float64Array = np.zeros_like(total)
    scale: Float64Array = np.zeros_like(total)
    for i, first in enumerate(residuals):
        for j, second in enumerate(residuals[: i + 1]):
            weight = (1.0 if i == j else 2.0) * gradient[i] * gradient[j]
            plain = (first * second) @ weights.T
            shifted = plain - shifts[i] * products[j] - shifts[j] * products[i] + shifts[i] * shifts[j] * count_squares
            square += weight * shifted
            scale += np.abs(weight * plain)
    # A resample of one cluster over and over has no spread; rounding leaves about 1e-16 of the terms, set that to zero.
    square[square <= 1e-12 * scale] = 0.0
    error: Float64Array = np.sqrt(square * (k / max(1, k - 1))) / total
    return error


def resampled(
    columns: Sequence[Ratios],
    statistic: Statistic,
    kind: Literal["percentile", "bca"],
    plan: Resampling,
) -> tuple[Float64Array, Float64Array]:
    """Return the (n_draws,) ends of SciPy's percentile or BCa interval over clusters.

    An end that SciPy cannot give (BCa where every jackknife value is the same) is NaN.
    """
    from scipy.stats import bootstrap  # noqa: PLC0415 - takes half a second to import, and few need it

    def ratio(*arrays: Float64Array, axis: int = -1) -> Float64Array:
        total = arrays[-1].sum(axis=axis)
        value: Float64Array = statistic([sums.sum(axis=axis) / total for sums in arrays[:-1]])[0]
        return value

    data = (*(column.sums for column in columns), columns[0].counts)
    n_draws, k = columns[0].sums.shape
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # a degenerate draw is NaN here, and the caller says so in words
        result = bootstrap(
            data,
            ratio,
            paired=True,
            vectorized=True,
            axis=-1,
            method="BCa" if kind == "bca" else "percentile",
            confidence_level=plan.confidence,
            n_resamples=plan.n_resamples,
            batch=max(1, BLOCK // (n_draws * k)),
            rng=plan.rng,
        )
    interval = result.confidence_interval
    return np.atleast_1d(np.asarray(interval.low)), np.atleast_1d(np.asarray(interval.high))

"""Intervals without resampling: score intervals for shares, Student t intervals for means.

With few clusters, or few of them that disagree at all, the spread between clusters is itself badly known and moves
together with the estimate. `quantiles` answers that by the shape of the residuals: fewer degrees of freedom where a
few clusters make up most of the variance, and a longer side where they lie.
"""

from __future__ import annotations

import numpy as np

from agreement.intervals.clusters import Float64Array, Ratios, t_quantile

# Below: constants of `quantiles` and `score`, found by simulation on beta-binomial agreement (docs/intervals.md) and
# checked on other distributions.

# Up to this many clusters the degrees of freedom follow the residuals' own kurtosis; beyond, less and less so, because
# the central limit theorem takes over.
FEW_CLUSTERS = 12.0
# The skewness enters by this power: a small one is mostly luck and counts for little.
SKEW_POWER = 1.25
# A design effect below 1 is luck (clusters cannot agree better than independent positions do), but replacing it by
# 1 makes the interval of few clusters too wide; a quarter only rules out the absurd.
LEAST_EFFECT = 0.25


def design_effect(shares: Ratios) -> Float64Array:
    """Return the (n_draws,) variance between clusters over the binomial variance of as many positions.

    NaN where every position agrees or none does: both variances are zero.
    """
    binomial = shares.value * (1.0 - shares.value) / shares.total
    with np.errstate(divide="ignore", invalid="ignore"):
        effect: Float64Array = np.where(binomial > 0.0, shares.variance / binomial, np.nan)
    return effect


def quantiles(means: Ratios, confidence: float) -> tuple[Float64Array, Float64Array]:
    """Return the (n_draws,) quantiles for the low and the high side, at least Student's for equal clusters.

    Both start from Student's t. Its degrees of freedom are Satterthwaite's or, where that is less, those that the
    residuals' own fourth moment gives: with `r = sum(e**4) / sum(e**2)**2` the variance has relative variance
    `r - 1 / k`, so `2 / (r - 1 / k)`; one cluster that makes up all of the variance leaves about two. The side on
    which the residuals have their tail grows by `|s|**1.25 * (2 * t**2 + 1) / 4`, `s = sum(e**3) / sum(e**2)**1.5`:
    the first-order term for a skewed mean (Johnson 1978, *JASA* 73; Hall 1992, *JRSS B* 54) with its power and factor
    fitted to measured coverage. The other side is not shortened, which costs width and guards against clusters that
    have not been seen.
    """
    residuals = means.residuals
    square = (residuals**2).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        skew = np.nan_to_num((residuals**3).sum(axis=1) / square**1.5)
        relative = np.nan_to_num((residuals**4).sum(axis=1) / square**2) - 1.0 / means.n_clusters
    ideal = 1.0 / means.degrees()
    own = np.maximum(ideal, relative / 2.0)
    weight = min(1.0, (FEW_CLUSTERS / means.n_clusters) ** 0.5)
    t = t_quantile(confidence, 1.0 / (ideal + weight * (own - ideal)))
    longer = np.abs(skew) ** SKEW_POWER * (2.0 * t**2 + 1.0) / 4.0
    return t + np.where(skew < 0.0, longer, 0.0), t + np.where(skew > 0.0, longer, 0.0)


def score(shares: Ratios, *, confidence: float) -> tuple[Float64Array, Float64Array]:
    """Return the (n_draws,) ends of Wilson's interval with an effective sample size and adjusted t quantiles.

    Wilson 1927 (*JASA* 22) with the number of positions divided by the design effect and the normal quantile replaced
    by that of `quantiles` for each side.
    """
    size = shares.total / np.fmax(design_effect(shares), LEAST_EFFECT)
    below, above = quantiles(shares, confidence)
    return wilson(shares.value, size, below)[0], wilson(shares.value, size, above)[1]


def korn_graubard(shares: Ratios, *, confidence: float) -> tuple[Float64Array, Float64Array]:
    """Return the (n_draws,) ends of Wilson's interval with an effective sample size and Student's quantile.

    The usual survey interval (Korn and Graubard 1998, *Survey Methodology* 24; Dean and Pagano 2015, *Journal of
    Survey Statistics and Methodology* 3), kept for comparison; its design effect counts as at least 1.
    """
    size = shares.total / np.fmax(design_effect(shares), 1.0)
    return wilson(shares.value, size, t_quantile(confidence, shares.n_clusters - 1.0))


def wilson(share: Float64Array, size: Float64Array, quantile: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Return both ends of Wilson's score interval for a share among `size` independent positions."""
    square = quantile**2 / size
    middle = share + square / 2.0
    half = np.sqrt(square * (share * (1.0 - share) + square / 4.0))
    return (middle - half) / (1.0 + square), (middle + half) / (1.0 + square)


def student(means: Ratios, *, confidence: float) -> tuple[Float64Array, Float64Array]:
    """Return the (n_draws,) ends of the Student t interval from the variance between clusters."""
    half = t_quantile(confidence, means.degrees()) * np.sqrt(means.variance)
    return means.value - half, means.value + half


def adjusted_student(means: Ratios, *, confidence: float) -> tuple[Float64Array, Float64Array]:
    """Return the (n_draws,) ends of the t interval with the quantiles that the residuals' shape calls for."""
    below, above = quantiles(means, confidence)
    error = np.sqrt(means.variance)
    return means.value - below * error, means.value + above * error


def all_alike(n_clusters: int, confidence: float) -> float:
    """Return the exact one-sided lower bound of a share when every position of every cluster agreed.

    Whatever the correlation within clusters, a true share `p` leaves a cluster without a disagreement with
    probability at most `p`, so `n_clusters` of them in a row with at most `p ** n_clusters`; that is
    `1 - confidence` at the bound returned.
    """
    return float((1.0 - confidence) ** (1.0 / n_clusters))

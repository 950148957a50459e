"""Intervals without resampling: score intervals for shares, Student t intervals for means.

With few clusters, or few of them that disagree at all, the spread between clusters is itself badly known and moves
together with the estimate: a sample without its rare bad clusters looks both better and surer than it is. `quantiles`
answers that by making the side longer on which the residuals have their tail.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from agreement.intervals.clusters import Float64Array, Ratios, t_quantile

# A design effect below 1 is luck (clusters cannot agree better than independent positions do), but replacing it by
# 1 makes the interval of few clusters too wide; a quarter only rules out the absurd.
LEAST_EFFECT = 0.25


@dataclass(frozen=True)
class Tail:
    """How much longer an interval gets on the side of its skew: `factor * |skew| ** power * (2 * t**2 + 1)`.

    Theory for large samples has factor 1/6 and power 1. A larger power leaves a small skew alone, which is mostly
    luck; a larger factor makes up for clusters that the sample lacks. Both were chosen by simulated coverage
    (docs/intervals.md).
    """

    factor: float
    power: float


TAIL = Tail(factor=0.45, power=1.5)
# On the logarithmic scale, which straightens most of the skew by itself and whose upper end grows exponentially.
LOG_TAIL = Tail(factor=0.25, power=1.25)


def design_effect(shares: Ratios) -> Float64Array:
    """Return the (n_draws,) variance between clusters over the binomial variance of as many positions.

    NaN where every position agrees or none does: both variances are zero.
    """
    binomial = shares.value * (1.0 - shares.value) / shares.total
    with np.errstate(divide="ignore", invalid="ignore"):
        effect: Float64Array = np.where(binomial > 0.0, shares.variance / binomial, np.nan)
    return effect


def quantiles(means: Ratios, confidence: float, tail: Tail) -> tuple[Float64Array, Float64Array]:
    """Return the (n_draws,) quantiles for the low and the high side, each at least Student's.

    Student's t with Satterthwaite's degrees of freedom; on one side the skewness of the residuals `e`,
    `sum(e**3) / sum(e**2)**1.5`, is added as `tail` says, in the form of the first-order correction of a skewed mean
    (Johnson 1978, *JASA* 73; Hall 1992, *JRSS B* 54). The other side is not shortened: that costs a little width and
    keeps the interval from trusting a skewness that few clusters cannot show.
    """
    square = (means.residuals**2).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        skew = np.nan_to_num((means.residuals**3).sum(axis=1) / square**1.5)
    t = t_quantile(confidence, means.degrees())
    longer = tail.factor * np.abs(skew) ** tail.power * (2.0 * t**2 + 1.0)
    return t + np.where(skew < 0.0, longer, 0.0), t + np.where(skew > 0.0, longer, 0.0)


def score(shares: Ratios, *, confidence: float) -> tuple[Float64Array, Float64Array]:
    """Return the (n_draws,) ends of Wilson's interval with an effective sample size and adjusted t quantiles.

    Wilson 1927 (*JASA* 22) with the number of positions divided by the design effect and the normal quantile replaced
    by that of `quantiles` for each side.
    """
    size = shares.total / np.fmax(design_effect(shares), LEAST_EFFECT)
    below, above = quantiles(shares, confidence, TAIL)
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
    """Return the (n_draws,) ends of the t interval with the quantiles that the residuals' skewness calls for."""
    below, above = quantiles(means, confidence, TAIL)
    error = np.sqrt(means.variance)
    return means.value - below * error, means.value + above * error


def log_student(means: Ratios, *, confidence: float, bound: float) -> tuple[Float64Array, Float64Array]:
    """Return the (n_draws,) ends of the adjusted t interval for the logarithm of the mean above `bound`.

    For a quantity that cannot go below `bound` and varies by factors, such as KL divergence from 0; the ends are
    `bound + (mean - bound) * exp(±quantile * error / (mean - bound))`. A mean at the bound has no logarithm and gets
    `adjusted_student`, cut off at the bound.
    """
    below, above = quantiles(means, confidence, LOG_TAIL)
    error = np.sqrt(means.variance)
    height = means.value - bound
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        relative = error / height
        low = bound + height * np.exp(-below * relative)
        high = bound + height * np.exp(above * relative)
    plain_low, plain_high = adjusted_student(means, confidence=confidence)
    usable = (height > 0.0) & np.isfinite(high)
    return np.where(usable, low, np.maximum(plain_low, bound)), np.where(usable, high, plain_high)


def all_alike(n_clusters: int, confidence: float) -> float:
    """Return the exact one-sided lower bound of a share when every position of every cluster agreed.

    Whatever the correlation within clusters, a true share `p` leaves a cluster without a disagreement with
    probability at most `p`, so `n_clusters` of them in a row with at most `p ** n_clusters`; that is
    `1 - confidence` at the bound returned.
    """
    return float((1.0 - confidence) ** (1.0 / n_clusters))

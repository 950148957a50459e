"""Intervals without resampling: score intervals for shares, Student t intervals for means."""

from __future__ import annotations

import numpy as np

from agreement.intervals.clusters import Float64Array, Ratios, t_quantile


def design_effect(shares: Ratios) -> Float64Array:
    """Return the (n_draws,) variance between clusters over the binomial variance of as many positions.

    NaN where every position agrees or none does: both variances are zero.
    """
    binomial = shares.value * (1.0 - shares.value) / shares.total
    with np.errstate(divide="ignore", invalid="ignore"):
        effect: Float64Array = np.where(binomial > 0.0, shares.variance / binomial, np.nan)
    return effect


def score(shares: Ratios, *, confidence: float) -> tuple[Float64Array, Float64Array]:
    """Return the (n_draws,) ends of Wilson's interval with an effective sample size and a t quantile.

    Wilson 1927 (*JASA* 22) with the number of positions divided by the design effect and the normal quantile
    replaced by Student's (Korn and Graubard 1998, *Survey Methodology* 24; Dean and Pagano 2015, *Journal of Survey
    Statistics and Methodology* 3). The design effect counts as at least 1: a smaller one is luck of few clusters.
    """
    effect = np.fmax(design_effect(shares), 1.0)
    return wilson(shares.value, shares.total / effect, t_quantile(confidence, shares.degrees()))


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


def all_alike(n_clusters: int, confidence: float) -> float:
    """Return the exact one-sided lower bound of a share when every position of every cluster agreed.

    Whatever the correlation within clusters, a true share `p` leaves a cluster without a disagreement with
    probability at most `p`, so `n_clusters` of them in a row with at most `p ** n_clusters`; that is
    `1 - confidence` at the bound returned.
    """
    return float((1.0 - confidence) ** (1.0 / n_clusters))

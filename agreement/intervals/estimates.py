"""Per-cluster sums of one quantity to an estimate with its interval."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from agreement.errors import UsageError
from agreement.intervals import score
from agreement.intervals.bootstrap import Resampling
from agreement.intervals.clusters import Checked, check
from agreement.intervals.methods import MEAN_METHODS, SHARE_METHODS, Method, mean_ends, share_ends
from agreement.intervals.results import (
    DEFAULT_RESAMPLES,
    NO_SPREAD,
    ONE_CLUSTER,
    check_options,
    exponential,
    with_interval,
    without_interval,
)

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from agreement.records import Estimate

# Means that must not be negative are sums of rounded terms; so far below their bound is still on it.
ROUNDING = 1e-6


def proportion(
    successes: ArrayLike,
    trials: ArrayLike,
    *,
    rng: np.random.Generator,
    confidence: float = 0.95,
    method: Method = "auto",
    n_resamples: int = DEFAULT_RESAMPLES,
) -> Estimate:
    """Estimate a share, such as top-1 agreement, from its counts by cluster.

    Args:
        successes: (n_clusters,) whole numbers, positions that agree.
        trials: (n_clusters,) whole numbers, scored positions.
        rng: Source of resamples, for the bootstrap methods.
        confidence: Nominal coverage, between 0 and 1.
        method: One of `SHARE_METHODS`; see `docs/intervals.md`.
        n_resamples: Resamples of the bootstrap methods.

    Returns:
        The ratio of sums with an interval inside [0, 1]. One cluster gives no interval. Where all positions agree,
        or none, the interval is one-sided (see `score.all_alike`). Clusters that all have the same share get the score
        interval, whatever the method.

    Raises:
        UsageError: See `check`; also more successes than trials, or an argument out of range.
    """
    check_options(confidence, n_resamples, method, allowed=SHARE_METHODS)
    data = check(trials, [("successes", successes)])
    hits = data.columns[0]
    if np.any(hits < 0) or np.any(hits > data.counts) or np.any(hits != np.floor(hits)):
        at = int(np.flatnonzero(((hits < 0) | (hits > data.counts) | (hits != np.floor(hits)))[0])[0])
        raise UsageError(
            f"`successes` must be whole numbers from 0 to `trials`, found {hits[0, at]:g} of {data.counts[0, at]:g}"
        )
    shares = data.ratios()
    value = float(shares.value[0])
    if data.n_clusters == 1:
        return without_interval(data, value, confidence, ONE_CLUSTER)
    if value in (0.0, 1.0):
        bound = score.all_alike(data.n_clusters, confidence)
        low, high = (bound, 1.0) if value == 1.0 else (0.0, 1.0 - bound)
        word = "all positions agree" if value == 1.0 else "no position agrees"
        note = f"{word}: one-sided bound from {data.n_clusters} clusters"
        return with_interval(data, value, (low, high), confidence=confidence, method="exact", note=note)
    if not shares.varies[0]:
        method = "score"  # Clusters that are equal by luck: the other methods would say [value, value].
    low_end, high_end, used = share_ends(shares, method, Resampling(rng, confidence, n_resamples))
    ends = float(low_end[0]), float(high_end[0])
    effect = float(score.design_effect(shares)[0])
    return with_interval(data, value, ends, confidence=confidence, method=used, effect=effect)


def mean(
    sums: ArrayLike,
    counts: ArrayLike,
    *,
    rng: np.random.Generator,
    squares: ArrayLike | None = None,
    lower_bound: float | None = None,
    confidence: float = 0.95,
    method: Method = "auto",
    n_resamples: int = DEFAULT_RESAMPLES,
) -> Estimate:
    """Estimate a mean over positions, such as KL divergence, from its sums by cluster.

    Args:
        sums: (n_clusters,) sum of the quantity.
        counts: (n_clusters,) whole numbers, scored positions.
        rng: Source of resamples.
        squares: (n_clusters,) sum of the squared quantity, for the design effect; without it there is none.
        lower_bound: Least value the mean can have, e.g. 0 for KL divergence. The interval does not go below, and
            `auto` forms it on the logarithmic scale.
        confidence: Nominal coverage.
        method: One of `MEAN_METHODS`; see `docs/intervals.md`.
        n_resamples: Resamples of the bootstrap methods.

    Returns:
        The ratio of sums with its interval. One cluster, or clusters that all have the same mean, give none.

    Raises:
        UsageError: See `check`; also a mean below `lower_bound`, squares too small for the sums, or an argument out
            of range.
    """
    check_options(confidence, n_resamples, method, allowed=MEAN_METHODS)
    columns = [("sums", sums)] if squares is None else [("sums", sums), ("squares", squares)]
    data = check(counts, columns)
    means = data.ratios()
    value = float(means.value[0])
    if lower_bound is not None:
        if value < lower_bound - ROUNDING:
            raise UsageError(f"the mean {value:g} is below `lower_bound` {lower_bound:g}; check how the sums were made")
        value = max(value, lower_bound)
    effect = None if squares is None else _mean_effect(data)
    if data.n_clusters == 1:
        return without_interval(data, value, confidence, ONE_CLUSTER)
    if not means.varies[0]:
        return without_interval(data, value, confidence, NO_SPREAD)
    low_end, high_end, used = mean_ends(means, method, Resampling(rng, confidence, n_resamples), bound=lower_bound)
    ends = float(low_end[0]), float(high_end[0])
    return with_interval(data, value, ends, confidence=confidence, method=used, effect=effect)


def exp_mean(
    sums: ArrayLike,
    counts: ArrayLike,
    *,
    rng: np.random.Generator,
    squares: ArrayLike | None = None,
    confidence: float = 0.95,
    method: Method = "auto",
    n_resamples: int = DEFAULT_RESAMPLES,
) -> Estimate:
    """Estimate the exponential of a mean, such as a ratio of perplexities.

    With `sums` the per-cluster sums of `nll_test - nll_base` this is `exp(sum(nll_test - nll_base) / n)`, the
    perplexity of the test over that of the base. The interval is formed for the mean and then exponentiated, so it
    is that of `mean` in every respect. Arguments and errors are those of `mean`.
    """
    found = mean(sums, counts, rng=rng, squares=squares, confidence=confidence, method=method, n_resamples=n_resamples)
    return replace(
        found,
        value=exponential(found.value),
        low=None if found.low is None else exponential(found.low),
        high=None if found.high is None else exponential(found.high),
    )


def bounded_mean(
    sums_low: ArrayLike,
    sums_high: ArrayLike,
    counts: ArrayLike,
    *,
    rng: np.random.Generator,
    lower_bound: float | None = None,
    confidence: float = 0.95,
    method: Method = "auto",
    n_resamples: int = DEFAULT_RESAMPLES,
) -> Estimate:
    """Estimate a mean that is known only to lie between two others, such as KL divergence from a truncated recording.

    The low end is that of the interval for `sums_low`, the high end that for `sums_high`, and the value is the
    mean of `sums_low`: of the two bounds on KL divergence the lower is by far the nearer to the truth
    (`docs/method.md`). The interval holds sampling and truncation together. Equal sums give what `mean` gives. The
    other arguments and the errors are those of `mean`; `sums_low` above `sums_high` anywhere is a UsageError.
    """
    data = check(counts, [("sums_low", sums_low), ("sums_high", sums_high)])
    if np.any(data.columns[0] > data.columns[1]):
        at = int(np.flatnonzero((data.columns[0] > data.columns[1])[0])[0])
        raise UsageError(
            f"`sums_low` {data.columns[0][0, at]:g} is above `sums_high` {data.columns[1][0, at]:g}; swap them"
        )
    # Both ends from the same resamples: equal sums then give exactly one interval.
    state = rng.bit_generator.state
    lower = mean(
        sums_low,
        counts,
        rng=rng,
        lower_bound=lower_bound,
        confidence=confidence,
        method=method,
        n_resamples=n_resamples,
    )
    rng.bit_generator.state = state
    upper = mean(
        sums_high,
        counts,
        rng=rng,
        lower_bound=lower_bound,
        confidence=confidence,
        method=method,
        n_resamples=n_resamples,
    )
    low = lower.low
    if low is None and upper.high is not None and lower.value == lower_bound:
        low = lower_bound  # Every lower sum is at the bound: the mean cannot be less, whatever other clusters hold.
    complete = low is not None and upper.high is not None
    return replace(
        upper,
        value=lower.value,
        low=low if complete else None,
        high=upper.high if complete else None,
        method=upper.method if complete else "none",
        note=upper.note if complete or upper.high is None else lower.note,
    )


def _mean_effect(data: Checked) -> float | None:
    """Return the variance of the mean between clusters over that of as many independent positions, if defined."""
    means = data.ratios()
    value, n = float(means.value[0]), data.n_positions
    square = float(data.columns[1].sum()) / n
    if np.any(data.columns[1] * data.counts < data.columns[0] ** 2 * (1.0 - 1e-9)):
        raise UsageError("`squares` is too small for `sums` in some cluster; pass the sum of squares, not its root")
    spread = square - value**2
    if n < 2 or data.n_clusters < 2 or spread <= 1e-12 * square or not means.varies[0]:
        return None
    return float(means.variance[0]) / (spread / (n - 1))

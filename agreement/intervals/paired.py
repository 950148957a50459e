"""Per-cluster sums of two quantities over the same positions to an estimate of how they differ."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from agreement.errors import UsageError
from agreement.intervals.bootstrap import Resampling, exp_difference
from agreement.intervals.clusters import Ratios, check
from agreement.intervals.estimates import mean
from agreement.intervals.methods import MEAN_METHODS, Method, resample, t_ends
from agreement.intervals.results import (
    DEFAULT_RESAMPLES,
    NO_SPREAD,
    ONE_CLUSTER,
    check_options,
    exponential,
    joined,
    with_interval,
    without_interval,
)

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from agreement.records import Estimate

# A signed quantity has no lower bound, so no logarithmic scale.
SIGNED_METHODS = tuple(name for name in MEAN_METHODS if name != "log-t")


def ppl_delta(
    nll_base: ArrayLike,
    nll_test: ArrayLike,
    counts: ArrayLike,
    *,
    rng: np.random.Generator,
    confidence: float = 0.95,
    method: Method = "auto",
    n_resamples: int = DEFAULT_RESAMPLES,
) -> Estimate:
    """Estimate the perplexity of the test minus that of the base, paired by cluster.

    Args:
        nll_base: (n_clusters,) sum of the base's negative log-likelihood, nats.
        nll_test: (n_clusters,) the same for the test.
        counts: (n_clusters,) whole numbers, scored positions.
        rng: Source of resamples.
        confidence: Nominal coverage.
        method: One of `SIGNED_METHODS`; see `docs/intervals.md`.
        n_resamples: Resamples of the bootstrap methods.

    Returns:
        `exp(sum(nll_test) / n) - exp(sum(nll_base) / n)` with an interval from its linearisation (delta method).
        One cluster, or clusters that do not differ, give none.

    Raises:
        UsageError: See `check`; also a mean loss too large for its exponential.
    """
    check_options(confidence, n_resamples, method, allowed=SIGNED_METHODS)
    data = check(counts, [("nll_base", nll_base), ("nll_test", nll_test)])
    base, test = data.ratios(0), data.ratios(1)
    ppl_base, ppl_test = exponential(float(base.value[0])), exponential(float(test.value[0]))
    value = ppl_test - ppl_base
    # The delta method: to first order the difference moves with these per-cluster sums.
    line = Ratios(ppl_test * test.residuals - ppl_base * base.residuals, data.counts)
    if data.n_clusters == 1:
        return without_interval(data, value, confidence, ONE_CLUSTER)
    if not base.varies[0] and not test.varies[0]:
        return without_interval(data, value, confidence, NO_SPREAD)
    if np.array_equal(data.columns[0], data.columns[1]):
        return without_interval(data, value, confidence, NO_SPREAD)
    used: Method = "adjusted-t" if method == "auto" else method
    around = t_ends(line, used, confidence)
    low_end, high_end = resample(
        (base, test),
        exp_difference,
        used,
        Resampling(rng, confidence, n_resamples),
        spare=(value + around[0], value + around[1]),
    )
    ends = float(low_end[0]), float(high_end[0])
    return with_interval(data, value, ends, confidence=confidence, method=used)


def difference(
    sums_a: ArrayLike,
    sums_b: ArrayLike,
    counts: ArrayLike,
    *,
    rng: np.random.Generator,
    limit: float | None = None,
    confidence: float = 0.95,
    method: Method = "auto",
    n_resamples: int = DEFAULT_RESAMPLES,
) -> Estimate:
    """Estimate the difference of two settings' means over the same positions, paired by cluster: `a` minus `b`.

    Agreement takes both counts of agreeing positions and `limit=1`; KL divergence both sums; perplexity both sums of
    `nll`, where the result is the logarithm of the ratio of perplexities.

    Args:
        sums_a: (n_clusters,) sum for one setting.
        sums_b: (n_clusters,) sum for the other, over the same positions.
        counts: (n_clusters,) whole numbers, scored positions.
        rng: Source of resamples.
        limit: Largest absolute value that the difference can have; the interval does not go beyond.
        confidence: Nominal coverage.
        method: One of `SIGNED_METHODS`; see `docs/intervals.md`.
        n_resamples: Resamples of the bootstrap methods.

    Returns:
        The difference with its interval. One cluster, or settings that differ alike in every cluster, give none.

    Raises:
        UsageError: See `check`; also a difference beyond `limit`.
    """
    data = check(counts, [("sums_a", sums_a), ("sums_b", sums_b)])
    found = mean(
        data.columns[0][0] - data.columns[1][0],
        data.counts[0],
        rng=rng,
        confidence=confidence,
        method=method,
        n_resamples=n_resamples,
    )
    note = joined(found.note, data.note)
    if limit is None:
        return replace(found, note=note)
    if abs(found.value) > limit:
        raise UsageError(f"the difference {found.value:g} is beyond `limit` {limit:g}; check how the sums were made")
    return replace(
        found,
        low=None if found.low is None else max(found.low, -limit),
        high=None if found.high is None else min(found.high, limit),
        note=note,
    )

"""Per-cluster sums to estimates with intervals: the functions that the rest of the package calls."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from agreement.errors import UsageError
from agreement.intervals import bootstrap, score
from agreement.intervals.bootstrap import Resampling
from agreement.intervals.clusters import Checked, Ratios, check
from agreement.intervals.methods import (
    MEAN_METHODS,
    METHODS,
    NAMES,
    Method,
    mean_ends,
    mean_rule,
    resample,
    share_ends,
    t_ends,
)
from agreement.records import Estimate

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

DEFAULT_RESAMPLES = 1999

ONE_CLUSTER = "one cluster: no interval, nothing shows how clusters differ"
NO_SPREAD = "no interval: every cluster has the same mean, nothing shows how clusters differ"


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
        method: One of `METHODS`; see `docs/intervals.md`.
        n_resamples: Resamples of the bootstrap methods.

    Returns:
        The ratio of sums with an interval inside [0, 1]. One cluster gives no interval. Where all positions agree,
        or none, the interval is one-sided (see `score.all_alike`).

    Raises:
        UsageError: See `check`; also more successes than trials, or an argument out of range.
    """
    _check_options(confidence, n_resamples, method, allowed=METHODS)
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
        return _bare(data, value, confidence, ONE_CLUSTER)
    if value in (0.0, 1.0):
        bound = score.all_alike(data.n_clusters, confidence)
        low, high = (bound, 1.0) if value == 1.0 else (0.0, 1.0 - bound)
        word = "all positions agree" if value == 1.0 else "no position agrees"
        note = f"{word}: one-sided bound from {data.n_clusters} clusters"
        return _bounded(data, value, (low, high), confidence=confidence, method="exact", note=note)
    low_end, high_end, used = share_ends(shares, method, Resampling(rng, confidence, n_resamples))
    ends = float(low_end[0]), float(high_end[0])
    effect = float(score.design_effect(shares)[0])
    return _bounded(data, value, ends, confidence=confidence, method=used, effect=effect)


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
        lower_bound: Least value the mean can have, e.g. 0 for KL divergence; the interval does not go below.
        confidence: Nominal coverage.
        method: One of `MEAN_METHODS`; see `docs/intervals.md`.
        n_resamples: Resamples of the bootstrap methods.

    Returns:
        The ratio of sums with its interval. One cluster, or clusters that all have the same mean, give none.

    Raises:
        UsageError: See `check`; also a mean below `lower_bound`, squares too small for the sums, or an argument out
            of range.
    """
    _check_options(confidence, n_resamples, method, allowed=MEAN_METHODS)
    columns = [("sums", sums)] if squares is None else [("sums", sums), ("squares", squares)]
    data = check(counts, columns)
    means = data.ratios()
    value = float(means.value[0])
    if lower_bound is not None and value < lower_bound:
        raise UsageError(f"the mean {value:g} is below `lower_bound` {lower_bound:g}; check how the sums were made")
    effect = None if squares is None else _mean_effect(data)
    if data.n_clusters == 1:
        return _bare(data, value, confidence, ONE_CLUSTER)
    if not _varies(means):
        return _bare(data, value, confidence, NO_SPREAD)
    low_end, high_end, used = mean_ends(means, method, Resampling(rng, confidence, n_resamples))
    low, high = float(low_end[0]), float(high_end[0])
    if lower_bound is not None:
        low = max(low, lower_bound)
    return _bounded(data, value, (low, high), confidence=confidence, method=used, effect=effect)


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
        value=_exp(found.value),
        low=None if found.low is None else _exp(found.low),
        high=None if found.high is None else _exp(found.high),
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

    The low end is that of the interval for `sums_low`, the high end that for `sums_high`, and the value is the middle
    of both means, so the interval holds sampling and truncation together. Equal sums give what `mean` gives. The
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
    complete = lower.low is not None and upper.high is not None
    return replace(
        upper,
        value=lower.value + (upper.value - lower.value) / 2.0,
        low=lower.low if complete else None,
        high=upper.high if complete else None,
        note=upper.note if upper.high is None else lower.note,
    )


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
        method: One of `MEAN_METHODS`; see `docs/intervals.md`.
        n_resamples: Resamples of the bootstrap methods.

    Returns:
        `exp(sum(nll_test) / n) - exp(sum(nll_base) / n)` with an interval from its linearisation (delta method).
        One cluster, or clusters that do not differ, give none.

    Raises:
        UsageError: See `check`; also a mean loss too large for its exponential.
    """
    _check_options(confidence, n_resamples, method, allowed=MEAN_METHODS)
    data = check(counts, [("nll_base", nll_base), ("nll_test", nll_test)])
    base, test = data.ratios(0), data.ratios(1)
    ppl_base, ppl_test = _exp(float(base.value[0])), _exp(float(test.value[0]))
    value = ppl_test - ppl_base
    # The delta method: to first order the difference moves with these per-cluster sums.
    line = Ratios(ppl_test * test.residuals - ppl_base * base.residuals, data.counts)
    if data.n_clusters == 1:
        return _bare(data, value, confidence, ONE_CLUSTER)
    if not _varies(base) and not _varies(test):
        return _bare(data, value, confidence, NO_SPREAD)
    if np.array_equal(data.columns[0], data.columns[1]):
        return _bare(data, value, confidence, NO_SPREAD)
    used = mean_rule(data.n_clusters) if method == "auto" else method
    around = t_ends(line, used, confidence)
    low_end, high_end = resample(
        (base, test),
        bootstrap.exp_difference,
        used,
        Resampling(rng, confidence, n_resamples),
        spare=(value + around[0], value + around[1]),
    )
    ends = float(low_end[0]), float(high_end[0])
    return _bounded(data, value, ends, confidence=confidence, method=used)


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
        method: One of `MEAN_METHODS`; see `docs/intervals.md`.
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
    note = _join(found.note, data.note)
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


def _check_options(confidence: float, n_resamples: int, method: str, *, allowed: tuple[str, ...]) -> None:
    """Raise UsageError for an option that is out of range."""
    if method not in allowed:
        raise UsageError(f"`method` must be one of {', '.join(allowed)}; found {method!r}")
    if not 0.0 < confidence < 1.0:
        raise UsageError(f"`confidence` must lie between 0 and 1, found {confidence:g}; 0.95 is usual")
    least = math.ceil(2.0 / (1.0 - confidence) - 1e-9) - 1
    if n_resamples < least:
        raise UsageError(f"`n_resamples` must be at least {least} for confidence {confidence:g}, found {n_resamples}")


def _varies(means: Ratios) -> bool:
    """Return whether clusters differ by more than rounding."""
    size = np.abs(means.sums) + np.abs(means.value[:, None] * means.counts)
    return bool(np.any(np.abs(means.residuals) > 1e-12 * size))


def _mean_effect(data: Checked) -> float | None:
    """Return the variance of the mean between clusters over that of as many independent positions, if defined."""
    means = data.ratios()
    value, n = float(means.value[0]), data.n_positions
    square = float(data.columns[1].sum()) / n
    if np.any(data.columns[1] * data.counts < data.columns[0] ** 2 * (1.0 - 1e-9)):
        raise UsageError("`squares` is too small for `sums` in some cluster; pass the sum of squares, not its root")
    spread = square - value**2
    if n < 2 or data.n_clusters < 2 or spread <= 1e-12 * square or not _varies(means):
        return None
    return float(means.variance[0]) / (spread / (n - 1))


def _exp(value: float) -> float:
    """Return the exponential, or say that the mean is no loss in nats."""
    try:
        return math.exp(value)
    except OverflowError:
        raise UsageError(f"a mean of {value:g} nats has no finite exponential; check how the sums were made") from None


def _join(*notes: str) -> str:
    """Return the notes that say something, as one."""
    return "; ".join(note for note in notes if note)


def _bare(data: Checked, value: float, confidence: float, note: str) -> Estimate:
    """Return an estimate without an interval."""
    return Estimate(
        value=value,
        low=None,
        high=None,
        confidence=confidence,
        method="none",
        n_clusters=data.n_clusters,
        n_positions=data.n_positions,
        note=_join(note, data.note),
    )


def _bounded(
    data: Checked,
    value: float,
    ends: tuple[float, float],
    *,
    confidence: float,
    method: str,
    effect: float | None = None,
    note: str = "",
) -> Estimate:
    """Return an estimate with an interval that contains it: a skewed bootstrap can leave its own estimate outside."""
    return Estimate(
        value=value,
        low=min(ends[0], value),
        high=max(ends[1], value),
        confidence=confidence,
        method=NAMES[method],
        n_clusters=data.n_clusters,
        n_positions=data.n_positions,
        design_effect=effect or None,
        note=_join(note, data.note),
    )

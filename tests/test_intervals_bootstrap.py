"""Resampling of clusters: against a plain loop, against SciPy, and where resamples have no spread."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from agreement.intervals import exp_mean, mean, ppl_delta, proportion
from agreement.intervals.bootstrap import (
    Resampling,
    Statistic,
    exp_difference,
    identity,
    resample_weights,
    studentised,
)
from agreement.intervals.clusters import Ratios

COUNTS = np.array([128, 256, 128, 384, 512, 128, 256, 128, 128, 640])
AGREED = np.array([119, 240, 110, 350, 480, 127, 231, 118, 125, 571])
BASE = np.array([260.0, 540.0, 251.0, 770.0, 1010.0, 280.0, 499.0, 262.0, 240.0, 1300.0])
TEST = np.array([268.0, 551.0, 262.0, 777.0, 1041.0, 281.0, 512.0, 265.0, 251.0, 1330.0])


def test_weights_are_counts_of_draws() -> None:
    weights = resample_weights(7, 4000, np.random.default_rng(3))
    assert weights.shape == (4000, 7)
    assert np.all(weights.sum(axis=1) == 7)
    # Each count is binomial(7, 1/7): mean 1, variance 6/7; 28,000 of them, so their mean square is within 0.05.
    assert weights.var() == pytest.approx(6 / 7, abs=0.05)


Means = list[float]


def loop_over_resamples(
    columns: list[np.ndarray], value_of: Callable[[Means], float], gradient_of: Callable[[Means], list[float]]
) -> list[float]:
    """The studentised distances, one resample at a time, written from the definition."""
    rng = np.random.default_rng(5)
    k = len(COUNTS)
    picks = rng.integers(0, k, size=(199, k))
    value = value_of([x.sum() / COUNTS.sum() for x in columns])
    distances = []
    for pick in picks:
        n = COUNTS[pick].sum()
        means = [x[pick].sum() / n for x in columns]
        slopes = gradient_of(means)
        line = sum(slope * (x[pick] - m * COUNTS[pick]) for slope, x, m in zip(slopes, columns, means, strict=True))
        error = math.sqrt((line**2).sum() * k / (k - 1)) / n
        distances.append((value_of(means) - value) / error)
    return sorted(distances)


@pytest.mark.parametrize(
    ("columns", "statistic", "value_of", "gradient_of"),
    [
        ([AGREED.astype(float)], identity, lambda m: m[0], lambda m: [1.0]),
        (
            [BASE, TEST],
            exp_difference,
            lambda m: math.exp(m[1]) - math.exp(m[0]),
            lambda m: [-math.exp(m[0]), math.exp(m[1])],
        ),
    ],
)
def test_studentised_is_the_plain_loop(
    columns: list[np.ndarray],
    statistic: Statistic,
    value_of: Callable[[Means], float],
    gradient_of: Callable[[Means], list[float]],
) -> None:
    distances = loop_over_resamples(columns, value_of, gradient_of)
    means = [x.sum() / COUNTS.sum() for x in columns]
    line = sum(slope * (x - m * COUNTS) for slope, x, m in zip(gradient_of(means), columns, means, strict=True))
    error = math.sqrt((line**2).sum() * 10 / 9) / COUNTS.sum()
    batches = [Ratios(x[None, :], COUNTS[None, :].astype(float)) for x in columns]
    low, high = studentised(batches, statistic, Resampling(np.random.default_rng(5), 0.95, 199))
    # 200 * 0.025 = 5: the fifth distance from either end.
    assert low[0] == pytest.approx(value_of(means) - distances[-5] * error, rel=1e-10)
    assert high[0] == pytest.approx(value_of(means) - distances[4] * error, rel=1e-10)


@pytest.mark.parametrize(("method", "name"), [("percentile", "percentile"), ("bca", "BCa")])
def test_percentile_and_bca_are_scipys(method: str, name: str) -> None:
    found = proportion(AGREED, COUNTS, rng=np.random.default_rng(8), method=method, n_resamples=999)
    wanted = stats.bootstrap(
        (AGREED.astype(float), COUNTS.astype(float)),
        lambda a, n, axis: a.sum(axis=axis) / n.sum(axis=axis),
        paired=True,
        vectorized=True,
        axis=-1,
        method=name,
        n_resamples=999,
        rng=np.random.default_rng(8),
    ).confidence_interval
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), rel=1e-12)


def test_draws_are_independent_of_their_batch() -> None:
    second = AGREED[::-1] * COUNTS / COUNTS[::-1]
    together = Ratios(np.stack([AGREED.astype(float), second]), np.stack([COUNTS, COUNTS]).astype(float))
    low, high = studentised([together], identity, Resampling(np.random.default_rng(1), 0.95, 499))
    for row, sums in enumerate((AGREED, second)):
        alone = studentised(
            [Ratios(sums[None, :].astype(float), COUNTS[None, :].astype(float))],
            identity,
            Resampling(np.random.default_rng(1), 0.95, 499),
        )
        assert (low[row], high[row]) == pytest.approx((alone[0][0], alone[1][0]), rel=1e-12)


@pytest.mark.parametrize("method", ["studentised", "percentile", "bca"])
def test_same_seed_same_interval_and_no_global_state(method: str) -> None:
    before = np.random.get_state()[1].copy()  # noqa: NPY002 - the global state is what must not move
    first, second, other = (
        exp_mean(TEST - BASE, COUNTS, rng=np.random.default_rng(seed), method=method) for seed in (4, 4, 5)
    )
    assert first == second
    assert (first.low, first.high) != (other.low, other.high)
    assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002 - as above


@pytest.mark.parametrize("method", ["studentised", "percentile", "bca"])
def test_resamples_without_spread(method: str) -> None:
    # Two clusters: half of all resamples hold one of them twice and have no standard error.
    share = proportion([120, 110], [128, 128], rng=np.random.default_rng(0), method=method)
    positive = mean([3.0, 5.0], [128, 128], rng=np.random.default_rng(0), lower_bound=0.0, method=method)
    delta = ppl_delta([256.0, 260.0], [258.0, 269.0], [128, 128], rng=np.random.default_rng(0), method=method)
    for found in (share, positive, delta):
        assert found.low is not None
        assert found.high is not None
        assert math.isfinite(found.low)
        assert math.isfinite(found.high)
        assert found.low <= found.value <= found.high
    assert share.low is not None
    assert share.low >= 0.0
    assert positive.low is not None
    assert positive.low >= 0.0


def test_studentised_and_delta_method_agree_on_many_clusters() -> None:
    rng = np.random.default_rng(2)
    counts = rng.integers(100, 300, 400)
    base = counts * rng.normal(2.0, 0.3, 400)
    test = base + counts * rng.normal(0.05, 0.02, 400)
    plain = ppl_delta(base, test, counts, rng=rng, method="t")
    resampled = ppl_delta(base, test, counts, rng=rng, method="studentised")
    assert plain.low is not None
    assert plain.high is not None
    assert resampled.low is not None
    assert resampled.high is not None
    width = plain.high - plain.low
    assert resampled.low == pytest.approx(plain.low, abs=0.1 * width)
    assert resampled.high == pytest.approx(plain.high, abs=0.1 * width)

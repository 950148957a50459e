"""Intervals without resampling: numbers by hand and by SciPy, degenerate input, bad input, properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from agreement.errors import UsageError
from agreement.intervals import (
    MEAN_METHODS,
    SHARE_METHODS,
    bounded_mean,
    difference,
    exp_mean,
    mean,
    ppl_delta,
    proportion,
)
from agreement.intervals.clusters import Ratios
from agreement.records import Estimate


def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def ends(found: Estimate) -> tuple[float, float]:
    assert found.low is not None
    assert found.high is not None
    return found.low, found.high


# --- numbers --------------------------------------------------------------------------------------------------------


def test_share_by_hand() -> None:
    found = proportion([9, 7], [10, 10], rng=rng(), method="korn-graubard")
    # residuals 9 - 8 and 7 - 8; variance (1 + 1) / (1 - 1/2) / 20**2 = 0.01; binomial 0.8 * 0.2 / 20 = 0.008
    assert found.value == pytest.approx(0.8)
    assert found.design_effect == pytest.approx(1.25)
    assert found.effective_n == pytest.approx(16.0)
    assert (found.n_clusters, found.n_positions, found.method, found.note) == (2, 20, "Korn-Graubard", "")
    # t for one degree of freedom is tan(0.475 pi) = 12.7062; squared over 16: 10.09046
    # (0.8 + 5.04523 -+ sqrt(10.09046 * (0.16 + 2.52262))) / 11.09046 = (5.84523 -+ 5.20278) / 11.09046
    assert ends(found) == pytest.approx((0.057928, 0.996176), abs=2e-5)


def test_score_lengthens_the_side_of_the_skew() -> None:
    found = proportion([8, 8, 8, 4], [10, 10, 10, 10], rng=rng())
    # share 0.7, residuals 1, 1, 1, -3: squares 12, cubes -24, skewness -24 / 12**1.5 = -0.57735
    # variance 12 / (3/4) / 40**2 = 0.01; binomial 0.21 / 40 = 0.00525; design effect 1.90476; size 21
    # t for 3 degrees of freedom 3.18245; low side + 0.45 * 0.57735**1.5 * (2 * 10.1280 + 1) = 4.19616, so 7.37860
    assert found.design_effect == pytest.approx(1.904762)
    assert found.method == "score, adjusted t"
    low, high = ends(found)
    # low: 7.37860**2 / 21 = 2.59256; (0.7 + 1.29628 - sqrt(2.59256 * (0.21 + 0.64814))) / 3.59256 = 0.14049
    assert low == pytest.approx(0.14049, abs=2e-5)
    # high: 3.18245**2 / 21 = 0.48228; (0.7 + 0.24114 + sqrt(0.48228 * (0.21 + 0.12057))) / 1.48228 = 0.90430
    assert high == pytest.approx(0.90430, abs=2e-5)


def test_mean_by_hand() -> None:
    found = mean([0.0, 0.0, 0.0, 4.0], [1, 1, 1, 1], rng=rng(), squares=[0.0, 0.0, 0.0, 16.0])
    # mean 1, residuals -1, -1, -1, 3: skewness 24 / 12**1.5; variance 12 / (3/4) / 16 = 1; t and its extra as above
    assert found.value == pytest.approx(1.0)
    assert ends(found) == pytest.approx((1 - 3.18245, 1 + 7.37860), abs=2e-5)
    # one position a cluster: the clusters are the positions, 16/4 - 1 = 3 over 4 - 1 is the same variance
    assert found.design_effect == pytest.approx(1.0)


def test_positive_mean_is_formed_on_the_log_scale() -> None:
    found = mean([1, 1, 1, 1, 1, 1, 1, 3], [1] * 8, rng=rng(), lower_bound=0.0)
    # mean 1.25, residuals -0.25 (7 times) and 1.75: squares 3.5, cubes 5.25, skewness 5.25 / 3.5**1.5 = 0.80178
    # error sqrt(3.5 / (7/8) / 64) = 0.25, relative 0.2; t for 7 degrees of freedom 2.36462
    # high side + 0.25 * 0.80178**1.25 * (2 * 5.59145 + 1) = 2.31080
    assert found.method == "adjusted t, log scale"
    assert ends(found) == pytest.approx((1.25 * math.exp(-0.472925), 1.25 * math.exp(0.935085)), rel=2e-6)


def test_student_is_scipys_for_equal_clusters() -> None:
    values = rng().normal(size=17)
    found = mean(values * 50, [50] * 17, rng=rng(), method="t", confidence=0.9)
    wanted = stats.ttest_1samp(values, 0.0).confidence_interval(0.9)
    assert ends(found) == pytest.approx((wanted.low, wanted.high), rel=1e-12)


def quadratic_form(counts: np.ndarray) -> np.ndarray:
    """The matrix A with `variance = sums @ A @ sums`, written out from the definition."""
    k, share = len(counts), counts / counts.sum()
    residual = np.eye(k) - np.outer(share, np.ones(k))
    return residual.T @ np.diag(1.0 / (1.0 - share)) @ residual / counts.sum() ** 2


def test_variance_is_unbiased_for_independent_positions() -> None:
    counts = np.array([1.0, 5.0, 40.0, 3.0])
    # E[s' A s] = trace(A V) with V = diag(counts) for unit variance a position; the mean's true variance is 1 / n
    assert np.trace(quadratic_form(counts) @ np.diag(counts)) == pytest.approx(1.0 / counts.sum(), rel=1e-12)
    sums = np.array([0.3, -1.0, 7.0, 2.0])
    batch = Ratios(sums[None, :], counts[None, :])
    assert batch.variance[0] == pytest.approx(sums @ quadratic_form(counts) @ sums, rel=1e-12)


@pytest.mark.parametrize("correlation", [0.0, 0.1, 1.0])
def test_degrees_of_freedom_are_satterthwaites(correlation: float) -> None:
    counts = np.array([128.0, 128.0, 1024.0, 256.0, 300.0, 77.0])
    spread = np.diag(counts * (1.0 + (counts - 1.0) * correlation))
    product = quadratic_form(counts) @ spread
    wanted = np.trace(product) ** 2 / np.trace(product @ product)
    batch = Ratios(np.zeros((1, 6)), counts[None, :])
    assert batch.degrees(correlation)[0] == pytest.approx(wanted, rel=1e-10)
    assert 1.0 < wanted < 5.0


def test_equal_clusters_have_all_degrees_of_freedom() -> None:
    assert Ratios(np.zeros((1, 9)), np.full((1, 9), 7.0)).degrees()[0] == pytest.approx(8.0)


def test_exp_mean_is_the_exponential_of_the_mean() -> None:
    sums, counts = [1.0, 2.0, 1.5, 3.0], [20, 30, 25, 40]
    plain, found = mean(sums, counts, rng=rng()), exp_mean(sums, counts, rng=rng())
    assert found.value == pytest.approx(math.exp(7.5 / 115))
    assert ends(found) == pytest.approx(tuple(math.exp(end) for end in ends(plain)))


def test_ppl_delta_by_hand() -> None:
    found = ppl_delta([20.0, 22.0], [21.0, 24.0], [10, 10], rng=rng(), method="t")
    base, test = math.exp(2.1), math.exp(2.25)
    assert found.value == pytest.approx(test - base)
    # residuals of base -1, 1 and of test -1.5, 1.5; linearised -(1.5 test - base) and its negative
    # variance 2 * (1.5 test - base)**2 / (1/2) / 20**2; t for one degree of freedom 12.7062
    half = 12.7062047 * (1.5 * test - base) / 10.0
    assert ends(found) == pytest.approx((found.value - half, found.value + half), rel=1e-6)


def test_difference_is_paired() -> None:
    a, b, counts = [90, 45, 180, 60], [80, 41, 165, 50], [100, 50, 200, 70]
    found = difference(a, b, counts, rng=rng(), limit=1.0)
    assert found == mean([10, 4, 15, 10], counts, rng=rng())
    swapped = difference(b, a, counts, rng=rng(), limit=1.0)
    assert swapped.value == -found.value
    assert ends(swapped) == pytest.approx((-ends(found)[1], -ends(found)[0]))
    # Each setting varies between clusters far more than their difference does.
    assert found.high is not None
    assert found.high - found.value < 0.07


def test_difference_stays_within_its_limit() -> None:
    found = difference([10, 0, 10], [0, 0, 0], [10, 10, 10], rng=rng(), limit=1.0)
    assert ends(found)[1] == 1.0
    unlimited = difference([10, 0, 10], [0, 0, 0], [10, 10, 10], rng=rng())
    assert ends(unlimited)[1] > 1.0


def test_bounded_mean_spans_both_bounds() -> None:
    low, high, counts = [1.0, 2.0, 1.5, 2.5, 1.0, 2.0], [1.5, 2.5, 2.0, 3.0, 1.6, 2.2], [10] * 6
    found = bounded_mean(low, high, counts, rng=rng(), lower_bound=0.0)
    assert found.value == pytest.approx(10.0 / 60)  # the lower sums
    assert found.low == mean(low, counts, rng=rng(), lower_bound=0.0).low
    assert found.high == mean(high, counts, rng=rng(), lower_bound=0.0).high


@pytest.mark.parametrize("method", ["auto", "studentised"])
def test_bounded_mean_of_equal_bounds_is_the_mean(method: str) -> None:
    sums, counts = [1.0, 2.0, 1.5, 2.5, 1.0, 2.0], [10, 20, 10, 20, 10, 20]
    found = bounded_mean(sums, sums, counts, rng=rng(), lower_bound=0.0, method=method)
    assert found == mean(sums, counts, rng=rng(), lower_bound=0.0, method=method)


def test_bounded_mean_whose_lower_sums_are_all_at_the_bound() -> None:
    found = bounded_mean([0.0] * 6, [0.1, 0.2, 0.1, 0.3, 0.2, 0.1], [10] * 6, rng=rng(), lower_bound=0.0)
    assert found.low == 0.0
    assert found.high is not None
    assert found.note == ""


def test_bounded_mean_refuses_crossed_bounds() -> None:
    with pytest.raises(UsageError, match=r"`sums_low` 3 is above `sums_high` 2"):
        bounded_mean([1.0, 3.0], [2.0, 2.0], [5, 5], rng=rng())


def test_more_confidence_is_wider() -> None:
    widths = []
    for confidence in (0.5, 0.9, 0.95, 0.99):
        low, high = ends(proportion([90, 85, 99, 70, 95, 88], [100] * 6, rng=rng(), confidence=confidence))
        widths.append(high - low)
    assert widths == sorted(widths)
    assert widths[0] < 0.5 * widths[-1]


# --- degenerate input, each with its written answer in docs/intervals.md ----------------------------------------------


@pytest.mark.parametrize("counts", [[], [0, 0, 0]])
def test_no_scored_position(counts: list[int]) -> None:
    zeros = [0] * len(counts)
    for call in (
        lambda: proportion(zeros, counts, rng=rng()),
        lambda: mean(zeros, counts, rng=rng()),
        lambda: ppl_delta(zeros, zeros, counts, rng=rng()),
        lambda: difference(zeros, zeros, counts, rng=rng()),
    ):
        with pytest.raises(UsageError, match="no scored position"):
            call()


def test_one_cluster_gives_no_interval() -> None:
    for found in (
        proportion([9], [10], rng=rng()),
        proportion([10], [10], rng=rng()),
        mean([0.5], [10], rng=rng(), lower_bound=0.0),
        exp_mean([0.5], [10], rng=rng()),
        ppl_delta([20.0], [21.0], [10], rng=rng()),
        difference([9], [8], [10], rng=rng(), limit=1.0),
        bounded_mean([0.4], [0.5], [10], rng=rng()),
    ):
        assert (found.low, found.high, found.design_effect, found.method) == (None, None, None, "none")
        assert found.note.startswith("one cluster: no interval")


@pytest.mark.parametrize("method", SHARE_METHODS)
def test_all_agree_is_one_sided(method: str) -> None:
    found = proportion([100] * 24, [100] * 24, rng=rng(), method=method)
    # 24 clusters without a disagreement: p**24 = 0.05 at p = exp(log(0.05) / 24) = 0.88265
    assert (found.value, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(0.88265, abs=1e-5)
    assert found.low is not None
    assert found.low**24 == pytest.approx(0.05)
    assert found.design_effect is None
    assert found.effective_n is None
    assert found.note == "all positions agree: one-sided bound from 24 clusters"


def test_none_agree_mirrors_all_agree() -> None:
    found = proportion([0] * 24, [100] * 24, rng=rng())
    assert (found.value, found.low) == (0.0, 0.0)
    assert found.high == pytest.approx(1 - 0.88265, abs=1e-5)
    assert found.note == "no position agrees: one-sided bound from 24 clusters"


def test_nearly_all_agree_is_not_rounded_up() -> None:
    found = proportion([10_000] * 9 + [9_999], [10_000] * 10, rng=rng())
    assert found.value == 0.99999
    low, high = ends(found)
    assert low < 0.99999 < high <= 1.0


@pytest.mark.parametrize("lower_bound", [None, 0.0])
def test_clusters_that_do_not_differ_give_a_mean_no_interval(lower_bound: float | None) -> None:
    found = mean([0.1, 0.2, 0.3], [1, 2, 3], rng=rng(), squares=[0.01, 0.02, 0.03], lower_bound=lower_bound)
    assert found.value == pytest.approx(0.1)
    assert (found.low, found.high, found.design_effect) == (None, None, None)
    assert found.note.startswith("no interval: every cluster has the same value")


def test_settings_that_do_not_differ() -> None:
    same = [20.0, 31.0, 25.0]
    for found in (
        difference(same, same, [10, 15, 12], rng=rng()),
        ppl_delta(same, same, [10, 15, 12], rng=rng()),
        exp_mean([0.0] * 3, [10, 15, 12], rng=rng()),
    ):
        assert (found.low, found.high) == (None, None)
        assert "every cluster has the same value" in found.note


@pytest.mark.parametrize("method", SHARE_METHODS)
def test_shares_that_do_not_differ_keep_an_interval(method: str) -> None:
    # Clusters that are equal by luck: at least a quarter of the binomial variance is counted, by the score interval.
    found = proportion([9, 18, 27], [10, 20, 30], rng=rng(), method=method)
    assert found.method == "score, adjusted t"
    low, high = ends(found)
    assert 0.5 < low < 0.9 < high < 1.0
    assert found.design_effect is None


def test_clusters_without_positions_are_left_out_and_counted() -> None:
    kept = proportion([9, 7, 8], [10, 10, 10], rng=rng())
    found = proportion([9, 0, 7, 8, 0], [10, 0, 10, 10, 0], rng=rng())
    assert (found.n_clusters, found.value, found.low, found.high) == (3, kept.value, kept.low, kept.high)
    assert found.note == "2 clusters without a scored position left out"
    assert (
        difference([9, 0, 7], [8, 0, 8], [10, 0, 10], rng=rng()).note == "1 cluster without a scored position left out"
    )
    assert proportion([9, 0], [10, 0], rng=rng()).note.endswith("1 cluster without a scored position left out")


def test_a_mean_may_lie_a_rounding_below_its_bound() -> None:
    found = mean([-1e-9, -2e-9, -1e-9], [10, 10, 10], rng=rng(), lower_bound=0.0)
    assert (found.value, found.low) == (0.0, 0.0)
    assert found.high is not None
    assert 0.0 <= found.high < 1e-8


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_no_numbers(bad: float) -> None:
    for call in (
        lambda: mean([1.0, bad, 2.0], [5, 5, 5], rng=rng()),
        lambda: mean([1.0, 1.0, 2.0], [5, 5, 5], rng=rng(), squares=[1.0, bad, 2.0]),
        lambda: proportion([1, bad, 2], [5, 5, 5], rng=rng()),
        lambda: ppl_delta([1.0, 1.0, 2.0], [1.0, bad, 2.0], [5, 5, 5], rng=rng()),
        lambda: difference([1.0, 1.0, 2.0], [1.0, bad, 2.0], [5, 5, 5], rng=rng()),
        lambda: mean([1.0, 2.0, 3.0], [5, bad, 5], rng=rng()),
    ):
        with pytest.raises(UsageError, match=r"is -?(nan|inf) in cluster 1"):
            call()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], [3, 4, 5]), r"`successes` has 2 clusters and `counts` has 3"),
        (([[1, 2]], [3, 4]), r"`successes` must have one dimension, found shape \(1, 2\)"),
        (([1, 6], [5, 5]), r"`successes` must be whole numbers from 0 to `trials`, found 6 of 5"),
        (([1, -1], [5, 5]), r"found -1 of 5"),
        (([1, 2.5], [5, 5]), r"found 2.5 of 5"),
        (([1, 2], [5, 5.5]), r"`counts` must be whole numbers of at least 0, found 5.5"),
        (([1, 2], [5, -5]), r"found -5"),
        (([1, 2], [5, 0]), r"`successes` is 2 in cluster 1, which has no scored position"),
    ],
)
def test_counts_that_cannot_be(arguments: tuple[list[float], list[float]], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        proportion(*arguments, rng=rng())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "score"}, r"`method` must be one of auto, adjusted-t, .*found 'score'"),
        ({"method": "log-t"}, r"log-t needs `lower_bound`"),
        ({"confidence": 95}, r"`confidence` must lie between 0 and 1, found 95"),
        ({"confidence": 0.0}, r"found 0"),
        ({"n_resamples": 38}, r"`n_resamples` must be at least 39 for confidence 0.95, found 38"),
        (
            {"confidence": 0.9999},
            r"`confidence` 0.9999 is too high for 1999 resamples; give at most 0.999, or in Python",
        ),
        ({"lower_bound": 1.0}, r"the mean 0.3 is below `lower_bound` 1"),
        ({"squares": [0.1, 0.8]}, r"`squares` is too small"),
    ],
)
def test_options_that_cannot_be(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        mean([1.0, 2.0], [5, 5], rng=rng(), **options)


def test_sums_that_are_no_losses() -> None:
    with pytest.raises(UsageError, match="a mean of 800 nats has no finite exponential"):
        exp_mean([8000.0], [10], rng=rng())
    with pytest.raises(UsageError, match="beyond `limit` 1"):
        difference([30, 20, 30], [0, 0, 0], [10, 10, 10], rng=rng(), limit=1.0)


# --- properties -----------------------------------------------------------------------------------------------------

clusters = st.lists(st.tuples(st.integers(1, 400), st.floats(0.0, 1.0)), min_size=2, max_size=30)
quick_methods = st.sampled_from([name for name in SHARE_METHODS if name not in {"percentile", "bca"}])


@settings(deadline=None, max_examples=60)
@given(clusters, quick_methods, st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_a_share_and_its_interval_stay_in_range(drawn: list[tuple[int, float]], method: str, confidence: float) -> None:
    trials = [n for n, _ in drawn]
    hits = [round(n * p) for n, p in drawn]
    found = proportion(hits, trials, rng=rng(), method=method, confidence=confidence, n_resamples=199)
    low, high = ends(found)
    assert 0.0 <= low <= found.value <= high <= 1.0
    assert low < high
    assert found.value == pytest.approx(sum(hits) / sum(trials))
    assert found.design_effect is None or found.design_effect > 0.0


@settings(deadline=None, max_examples=60)
@given(clusters)
def test_disagreement_is_the_mirror_image(drawn: list[tuple[int, float]]) -> None:
    trials = np.array([n for n, _ in drawn])
    hits = np.array([round(n * p) for n, p in drawn])
    found, mirror = (proportion(x, trials, rng=rng()) for x in (hits, trials - hits))
    low, high = ends(found)
    assert ends(mirror) == pytest.approx((1.0 - high, 1.0 - low), abs=1e-9)


@settings(deadline=None, max_examples=60)
@given(clusters, st.randoms(use_true_random=False))
def test_the_order_of_clusters_does_not_matter(drawn: list[tuple[int, float]], random: object) -> None:
    shuffled = list(drawn)
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis gives a random.Random
    first, second = (
        proportion([round(n * p) for n, p in each], [n for n, _ in each], rng=rng()) for each in (drawn, shuffled)
    )
    assert ends(first) == pytest.approx(ends(second), abs=1e-9)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 400), st.floats(0.0, 20.0)), min_size=2, max_size=30),
    st.sampled_from([name for name in MEAN_METHODS if name not in {"percentile", "bca"}]),
    st.floats(0.01, 100.0),
)
def test_a_positive_mean_scales_and_stays_above_its_bound(
    drawn: list[tuple[int, float]], method: str, factor: float
) -> None:
    counts = [n for n, _ in drawn]
    sums = np.array([n * x for n, x in drawn])
    options = {"lower_bound": 0.0, "method": method, "n_resamples": 199}
    found = mean(sums, counts, rng=rng(), **options)
    scaled = mean(sums * factor, counts, rng=rng(), **options)
    assert scaled.value == pytest.approx(found.value * factor)
    if found.low is None or found.high is None or scaled.low is None or scaled.high is None:
        assert found.note.startswith("no interval") or scaled.note.startswith("no interval")
        return
    assert 0.0 <= found.low <= found.value <= found.high
    assert math.isfinite(found.high)
    assert (scaled.low, scaled.high) == pytest.approx((found.low * factor, found.high * factor), rel=1e-6)

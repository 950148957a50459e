"""The coverage benchmark in short: the default intervals reach their goals, and weak ones are caught."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from benchmarks import coverage

from agreement.intervals import mean, ppl_delta, proportion
from agreement.intervals.bootstrap import Resampling

DRAWS = 4000
# Three standard errors of a coverage of 95 %: 3 * sqrt(0.95 * 0.05 / 4000) = 1.03 points.
ERROR = 300.0 * math.sqrt(0.95 * 0.05 / DRAWS)

GRID = {(row.n_clusters, row.label): row for row in coverage.grid()}


@pytest.mark.parametrize(
    "row",
    [
        (6, "agreement 0.9, correlation 0.01"),
        (8, "agreement 0.99, correlation 0.05"),
        (12, "agreement 0.8, correlation 0.002"),
        (12, "agreement 0.99, correlation 0.05"),
        (24, "agreement 0.95, correlation 0.05"),
        (24, "agreement 0.99, correlation 0.01"),
        (24, "agreement 0.999, correlation 0.01"),
        (100, "agreement 0.9, correlation 0.05"),
        (8, "log-normal clusters, 0.6"),
        (12, "t5 clusters, sd 0.04"),
        (24, "log-normal clusters, 0.3"),
    ],
)
def test_default_reaches_its_goal(row: tuple[int, str]) -> None:
    # KL divergence has rows of the same name; goals are set for the ratio of perplexities.
    scenario = next(s for s in coverage.grid() if (s.n_clusters, s.label) == row and s.goal is not None)
    assert scenario.goal is not None
    held = coverage.run(replace(scenario, methods=("auto",)), n_draws=DRAWS, seed=1).outcomes["auto"].held
    assert scenario.goal.least - ERROR <= held <= scenario.goal.most + ERROR


def test_treating_positions_as_independent_is_caught() -> None:
    scenario = GRID[24, "agreement 0.9, correlation 0.05"]
    found = coverage.run(replace(scenario, methods=("auto", "binomial")), n_draws=1000, seed=1)
    # Design effect above 1 + 127 * 0.05 = 7.35, so the interval is at most 1 / sqrt(7.35) = 0.37 of what it must be:
    # it covers what a normal variable does within 0.37 * 1.96 = 0.72 standard deviations, 53 %, or less.
    assert found.outcomes["binomial"].held < 53.0 + 5.0
    assert found.outcomes["auto"].held > 92.0


def test_percentile_bootstrap_of_eight_clusters_is_caught() -> None:
    scenario = GRID[8, "agreement 0.99, correlation 0.05"]
    found = coverage.run(replace(scenario, methods=("percentile",)), n_draws=500, seed=1)
    assert found.outcomes["percentile"].held < 85.0


def test_an_interval_that_is_too_wide_is_caught() -> None:
    scenario = replace(GRID[24, "agreement 0.9, correlation 0.01"], methods=("auto",))
    row = coverage.run(scenario, n_draws=1000, seed=1, confidence=0.995)
    assert row.outcomes["auto"].held > coverage.EXACT.most
    assert row.met is False


def test_batches_are_what_the_public_functions_give() -> None:
    plan = Resampling(np.random.default_rng(0), 0.95, 199)
    rng = np.random.default_rng(3)
    shares = coverage.beta_binomial(6, 0.99, 0.05)(rng, 40)[0]
    low, high = coverage.share_intervals(shares, "auto", plan)
    assert np.any(shares.value == 1.0)  # the one-sided answer is among them
    for i in range(40):
        found = proportion(shares.sums[i], shares.counts[i], rng=rng)
        assert (found.low, found.high) == pytest.approx((low[i], high[i]))
    base, test = coverage.paired_losses(12)(rng, 5)
    low, high = coverage.delta_intervals(base, test, "auto", plan)
    for i in range(5):
        delta = ppl_delta(base.sums[i], test.sums[i], base.counts[i], rng=rng)
        assert (delta.low, delta.high) == pytest.approx((low[i], high[i]))
    scenario = next(s for s in coverage.grid() if s.kind == "positive" and s.n_clusters == 12)
    data = scenario.draw(rng, 5)
    low, high = coverage.intervals(scenario, data, "auto", plan)
    for i in range(5):
        kld = mean(data[0].sums[i], data[0].counts[i], rng=rng, lower_bound=0.0)
        assert (kld.low, kld.high) == pytest.approx((low[i], high[i]))


def test_the_truth_of_each_scenario_is_its_mean() -> None:
    # Each scenario states the value that intervals should hold; ten thousand clusters find it within 4.5 errors.
    for name in ("0.97, one in ten 15 points worse", "logit-normal 3 ± 0.6", "logit-normal 4.5 ± 1"):
        scenario = GRID[60, name]
        values = scenario.draw(np.random.default_rng(4), 300)[0].value
        assert values.mean() == pytest.approx(scenario.truth, abs=4.5 * values.std() / math.sqrt(300))


def test_the_report_names_its_command_and_its_misses() -> None:
    scenario = replace(GRID[24, "agreement 0.9, correlation 0.01"], methods=("auto",))
    met = coverage.Row(scenario, {"auto": coverage.Outcome(95.0, 2.0, 3.0, 0.0412)})
    missed = coverage.Row(scenario, {"auto": coverage.Outcome(91.0, 4.0, 5.0, 0.03)})
    text = coverage.report(
        [met, missed], ["missed: it"], ["| dense |"], command="do it", n_draws=2000, confidence=0.95, seconds=1.0
    )
    assert "Made by `do it` in 1 s of processor time." in text
    assert "Goals met: 1 of 2." in text
    assert "- missed: it" in text
    assert text.endswith("10,000 draws each.\n\n| dense |\n")
    assert "| 24 | agreement 0.9, correlation 0.01 | 95.0 (2.0/3.0) 0.0412 | 93.5-96.5 met |" in text
    assert "91.0 (4.0/5.0) 0.0300 | 93.5-96.5 **missed** |" in text

"""The sequential gate: its boundary against theory, its sides by hand, its errors by simulation."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks import sequential as benchmark
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import multivariate_normal, norm

from agreement.errors import GateError
from agreement.intervals import proportion
from agreement.intervals.clusters import Ratios
from agreement.records import Requirement, Verdict
from agreement.requirements import parse_requirement
from agreement.sequential import (
    METHOD,
    SequentialTest,
    ends,
    judge_look,
    make_rules,
    run_many,
    spend,
    unseen,
)

AT_LEAST_90 = parse_requirement("experts=7 agreement>=90%")


def batch(sums: list[float], counts: list[float]) -> Ratios:
    return Ratios(np.array([sums], dtype=float), np.array([counts], dtype=float))


def feed(test: SequentialTest, n_agree: int, n: int, times: int) -> Verdict | None:
    """Give the same cluster until there is a verdict."""
    for _ in range(times):
        if test.update(n_agree, n) is not None:
            break
    return test.state.verdict


# --- the boundary ---------------------------------------------------------------------------------------------------


def test_one_look_spends_everything() -> None:
    assert spend((40,), 0.025) == pytest.approx([0.025], rel=1e-9)


def test_three_looks_agree_with_the_multivariate_normal() -> None:
    looks, error = (2, 5, 8), 0.03
    z = norm.isf(spend(looks, error))
    # Sums after 2, 5 and 8 increments, standardised: corr(S_i, S_j) = sqrt(i / j) for i < j.
    correlation = [[math.sqrt(min(i, j) / max(i, j)) for j in looks] for i in looks]
    for n, k in enumerate(looks, start=1):
        below = multivariate_normal(cov=[row[:n] for row in correlation[:n]]).cdf(z[:n]) if n > 1 else norm.cdf(z[0])
        assert 1.0 - below == pytest.approx(error * k / looks[-1], abs=2e-5)


def test_the_boundary_of_sixty_looks_is_crossed_as_often_as_it_says() -> None:
    rules = make_rules(0.9)
    z = norm.isf(rules.tails)
    walks = np.random.default_rng(1).standard_normal((20_000, 60)).cumsum(axis=1)[:, 5:] / np.sqrt(np.arange(6, 61))
    crossed = walks >= z
    # 0.48 * 5 % in all, and after 30 of 60 clusters half of it; errors are four standard deviations.
    assert np.mean(crossed.any(axis=1)) == pytest.approx(0.024, abs=4 * math.sqrt(0.024 / 20_000))
    assert np.mean(crossed[:, :25].any(axis=1)) == pytest.approx(0.012, abs=4 * math.sqrt(0.012 / 20_000))


def test_looks() -> None:
    assert make_rules(0.9, max_clusters=9).looks == (6, 7, 8, 9)
    assert make_rules(0.9, max_clusters=20, first_look=8, every=5).looks == (8, 13, 18, 20)
    assert make_rules(0.9, max_clusters=6).looks == (6,)
    # ceil(130 / 60) = 3
    assert make_rules(0.9, max_clusters=130).looks == (*range(6, 130, 3), 130)


def test_later_looks_of_a_longer_run_ask_for_more() -> None:
    short, long = make_rules(0.9, max_clusters=20), make_rules(0.9, max_clusters=60)
    assert short.tails[short.looks.index(20)] > long.tails[long.looks.index(20)]
    assert max(long.tails) < 0.024


# --- what a look judges ---------------------------------------------------------------------------------------------


def test_unseen_by_hand() -> None:
    # (1 + 0.05 / 0.15) * (1 + 0.02 / 0.15) = 4/3 * 17/15 = 68/45
    assert unseen(batch([95, 92], [100, 100]), 0.9, 0.15)[0] == pytest.approx(68 / 45)
    # A position drawn at random lies in a cluster of (100 * 100 + 300 * 300) / 400 = 250 positions on average, so 5
    # more than the bound's 90 is 5 / 250 / 0.15 = 2/15; 270 of 300 is the bound.
    assert unseen(batch([95, 270], [100, 300]), 0.9, 0.15)[0] == pytest.approx(1 + 2 / 15)
    # 40 points below the bound, but a tenth is left: 4/3 * 0.1
    assert unseen(batch([95, 50], [100, 100]), 0.9, 0.15)[0] == pytest.approx(4 / 30)


def test_unseen_keeps_what_it_promises() -> None:
    # Clusters 2.7 points above 0.9 or 13.5 below, with the mean on the bound: 0.027 * 5/6 = 0.135 * 1/6.  Ville: the
    # evidence ever reaches 18 in at most one run of 18, 5.6 %; 4,000 runs have a standard error of 0.36 points.
    bad = np.random.default_rng(2).random((4000, 60)) < 1 / 6
    sums, counts = np.where(bad, 765.0, 927.0), np.full(bad.shape, 1000.0)
    reached = np.zeros(4000, dtype=bool)
    for k in range(1, 61):
        reached |= unseen(Ratios(sums[:, :k], counts[:, :k]), 0.9, 0.15) >= 18.0
    assert 0.02 < np.mean(reached) < 1 / 18 + 3 * 0.0036


@pytest.mark.parametrize(
    ("sums", "counts"),
    [
        ([95, 80, 97, 92, 99, 90], [100] * 6),
        ([200, 120, 130, 250, 127, 180, 131], [250, 127, 140, 255, 127, 190, 150]),
        ([100] * 8, [100] * 8),
        ([0] * 8, [100] * 8),
        ([9, 9, 9, 9, 9, 9], [10] * 6),
    ],
)
def test_ends_are_those_of_the_gate(sums: list[float], counts: list[float]) -> None:
    low, high = ends(batch(sums, counts), 0.004)
    alike = sum(sums) in (0, sum(counts))
    # The exact bound is one-sided there, so it has the whole error of its one side.
    rng = np.random.default_rng(0)
    fixed = proportion(sums, counts, rng=rng, confidence=0.996 if alike else 0.992)
    assert (low[0], high[0]) == pytest.approx((fixed.low, fixed.high))


def test_a_good_interval_alone_is_not_enough() -> None:
    # Six clusters of 93 % that hardly differ: the interval is safely above 90 %, but (1 + 0.03 / 0.15)**6 = 2.99 < 18.
    rules = make_rules(0.9)
    sums, counts = [932, 930, 931, 929, 930, 928], [1000] * 6
    found = judge_look(batch(sums, counts), rules, 0)
    assert found.low[0] > 0.9
    assert found.unseen[0] == pytest.approx(1.2**6, rel=1e-2)
    assert not found.above[0]
    assert judge_look(batch(sums, counts), replace(rules, unseen_needed=2.9), 0).above[0]


def test_below_needs_no_such_evidence() -> None:
    found = judge_look(batch([872, 870, 871, 869, 870, 868], [1000] * 6), make_rules(0.9), 0)
    assert found.below[0]
    assert not found.above[0]


counts_of_runs = st.lists(st.tuples(st.integers(1, 300), st.floats(0, 1)), min_size=6, max_size=12)


@settings(max_examples=60, deadline=None)
@given(counts_of_runs, st.sampled_from([0.1, 0.5, 0.8, 0.9, 0.97, 0.995]))
def test_sides_never_contradict_the_estimate(clusters: list[tuple[int, float]], bound: float) -> None:
    counts = [n for n, _ in clusters]
    sums = [round(share * n) for n, share in clusters]
    rules = make_rules(bound, max_clusters=len(clusters), first_look=2)
    found = judge_look(batch(sums, counts), rules, len(rules.looks) - 1)
    value = sum(sums) / sum(counts)
    assert 0.0 <= found.low[0] <= value <= found.high[0] <= 1.0
    assert not (found.above[0] and found.below[0])
    assert not found.above[0] or value >= bound
    assert not found.below[0] or value < bound


# --- one run --------------------------------------------------------------------------------------------------------


def test_one_run_is_what_many_runs_are() -> None:
    rules = make_rules(0.9, max_clusters=40, every=2)
    n_agree, n = benchmark.beta_binomial(0.93, 0.02)(np.random.default_rng(5), 25, 40)
    ended = run_many(n_agree, n, rules)
    assert {1, 0} <= set(ended.side.tolist())
    for i in range(25):
        test = SequentialTest(AT_LEAST_90, max_clusters=40, every=2)
        for a, b in zip(n_agree[i], n[i], strict=True):
            if test.update(int(a), int(b)) is not None:
                break
        expected = {1: Verdict.PASS, -1: Verdict.FAIL, 0: Verdict.INCONCLUSIVE}[int(ended.side[i])]
        assert (test.state.verdict, test.state.clusters) == (expected, ended.clusters[i])


def test_full_agreement_passes_once_the_evidence_is_as_strong_as_the_look_asks() -> None:
    test = SequentialTest(AT_LEAST_90)
    # Each cluster is worth 1 + 0.1 / 0.15 = 5/3.
    first = next(k for k, tail in zip(test.rules.looks, test.rules.tails, strict=True) if (5 / 3) ** k >= 1 / tail)
    assert feed(test, 200, 200, 60) is Verdict.PASS
    assert test.state.clusters == first
    assert 10 <= first <= 15


def test_no_agreement_fails_at_the_first_look() -> None:
    test = SequentialTest(AT_LEAST_90)
    assert feed(test, 0, 200, 5) is None
    assert test.state.next_look == 6
    assert test.update(0, 200) is Verdict.FAIL
    assert "below the bound, safely so after 6 of at most 60 clusters" in test.judgement().reason


def test_at_most_turns_the_sides() -> None:
    requirement = parse_requirement("experts=7 agreement<=90%")
    assert feed(SequentialTest(requirement), 0, 200, 60) is Verdict.PASS
    assert feed(SequentialTest(requirement), 200, 200, 60) is Verdict.FAIL
    # Failing is out of reach (see below), passing is not: no error.
    assert feed(SequentialTest(parse_requirement("x agreement<=99.9%")), 150, 200, 60) is Verdict.PASS


def test_on_the_bound_it_ends_inconclusive() -> None:
    test = SequentialTest(AT_LEAST_90, max_clusters=20)
    for i in range(20):
        verdict = test.update(85 if i % 2 else 95, 100)
    assert verdict is Verdict.INCONCLUSIVE
    assert test.finish() is Verdict.INCONCLUSIVE
    judgement = test.judgement()
    assert judgement.reason.startswith("the bound lies within the interval after 20 of at most 20 clusters; ")
    assert judgement.estimate.value == pytest.approx(0.9)
    assert test.state.next_look is None


def test_unseen_bad_clusters_are_named_as_the_reason() -> None:
    test = SequentialTest(AT_LEAST_90, max_clusters=10)
    for i in range(10):
        test.update(929 + i % 3, 1000)
    judgement = test.judgement()
    assert judgement.verdict is Verdict.INCONCLUSIVE
    assert judgement.estimate.low is not None
    assert judgement.estimate.low > 0.9
    assert "rare bad documents may not have been seen yet" in judgement.reason


def test_what_a_verdict_says() -> None:
    test = SequentialTest(AT_LEAST_90)
    assert feed(test, 195, 200, 60) is Verdict.PASS
    state, judgement = test.state, test.judgement()
    estimate = judgement.estimate
    assert judgement.requirement is AT_LEAST_90
    assert (estimate.value, estimate.n_clusters, estimate.n_positions) == (0.975, state.clusters, 200 * state.clusters)
    assert (estimate.low, estimate.high) == (state.low, state.high)
    assert (estimate.method, estimate.confidence, estimate.design_effect) == (METHOD, 0.95, None)  # clusters are equal
    assert estimate.note == test.assumption
    assert "hardly any agrees less than 76.5% (13.5 points below the bound)" in test.assumption
    assert "at most 5% of runs give a wrong verdict, 7% if one document in ten is much worse" in test.assumption
    tail = test.rules.tails[test.rules.looks.index(state.clusters)]
    assert state.look_confidence == pytest.approx(1 - 2 * tail)
    assert state.unseen_needed == pytest.approx(18.0)
    assert state.unseen is not None
    assert state.unseen >= 18.0


def test_a_run_that_ends_before_its_first_look() -> None:
    test = SequentialTest(AT_LEAST_90)
    assert test.state.agreement is None
    test.update(90, 100)
    with pytest.raises(GateError, match="no verdict after 1 clusters; go on, or finish"):
        test.judgement()
    assert test.finish() is Verdict.INCONCLUSIVE
    judgement = test.judgement()
    assert (judgement.estimate.low, judgement.estimate.high) == (None, None)
    assert judgement.reason == "the text ended after 1 of at most 60 clusters, before the first look at 6"


def test_a_run_without_a_scored_position_has_no_judgement() -> None:
    test = SequentialTest(AT_LEAST_90)
    test.finish()
    with pytest.raises(GateError, match="no verdict after 0 clusters"):
        test.judgement()


def test_clusters_after_the_last_look_stay_within_the_interval() -> None:
    test = SequentialTest(AT_LEAST_90, max_clusters=40, every=20)
    for i in range(6):
        test.update(89 + i % 3, 100)
    for _ in range(15):
        test.update(0, 100)
    test.finish()
    estimate = test.judgement().estimate
    assert estimate.low is not None
    assert estimate.low <= estimate.value == pytest.approx(540 / 2100)


def test_a_cluster_without_positions_is_left_out() -> None:
    test = SequentialTest(AT_LEAST_90)
    assert test.update(0, 0) is None
    assert (test.state.clusters, test.state.positions) == (0, 0)


def test_the_confidence_of_the_requirement_counts_first() -> None:
    requirement = Requirement("x", "agreement", ">=", 0.9, confidence=0.99)
    assert SequentialTest(requirement).rules == make_rules(0.9, confidence=0.99)
    assert SequentialTest(AT_LEAST_90, confidence=0.9).rules == make_rules(0.9, confidence=0.9)


def test_the_documented_example(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[1] / "docs/sequential.md").read_text(encoding="utf-8")
    exec(text.split("```python")[1].split("```")[0], {"counts": [(190, 200)] * 60})
    assert "agreement is at or above the bound, safely so after" in capsys.readouterr().out


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("x ppl_ratio<=1.02", {}, "judges agreement against a fixed bound only"),
        ("x kld<=0.05", {}, "judges agreement against a fixed bound only"),
        # log(18) / log(1 + 0.002 / 0.15) = 218.2
        ("x agreement>=99.8%", {}, "passing takes 219 clusters even if every position agrees, and there are 60"),
        ("x agreement>=100%", {}, "bound 1.0 cannot be settled by a sample"),
        ("x agreement>=90%", {"max_clusters": 5}, "5 clusters are fewer than the 6 of the first look"),
        ("x agreement>=90%", {"confidence": 0.4}, "confidence 0.4 is outside"),
        ("x agreement>=90%", {"confidence": 1.0}, "confidence 1.0 is outside"),
        ("x agreement>=90%", {"first_look": 1}, "first look after 1 clusters"),
        ("x agreement>=90%", {"every": 0}, "every 0"),
        ("x agreement>=90%", {"max_clusters": 100, "every": 1}, "too many looks; look every 2"),
        ("x agreement>=90%", {"reach": 0.0}, "reach 0.0 is outside"),
    ],
)
def test_what_cannot_be_judged(text: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(GateError, match=message):
        SequentialTest(parse_requirement(text), **options)  # type: ignore[arg-type]  # a table of options


def test_a_change_since_an_earlier_report_cannot_be_judged() -> None:
    requirement = Requirement("x", "agreement", ">=", 0.5, against="before")
    with pytest.raises(GateError, match="fixed bound only"):
        SequentialTest(requirement)


def test_counts_that_cannot_be() -> None:
    test = SequentialTest(AT_LEAST_90)
    for n_agree, n in ((3, 2), (-1, 5), (0, -1)):
        with pytest.raises(GateError, match="positions agree; count again"):
            test.update(n_agree, n)
    feed(test, 0, 100, 6)
    with pytest.raises(GateError, match="a cluster after the verdict fail"):
        test.update(1, 1)


def test_arrays_of_another_shape() -> None:
    with pytest.raises(GateError, match="both need 60 columns"):
        run_many(np.ones((3, 50)), np.ones((3, 50)), make_rules(0.9))


# --- the simulation in short ----------------------------------------------------------------------------------------

RUNS = 1000


def most(goal: float) -> float:
    """Return the goal in percent and three standard errors on top."""
    return goal + 300.0 * math.sqrt(goal / 100.0 * (1.0 - goal / 100.0) / RUNS)


@pytest.mark.parametrize("bound", [0.80, 0.97])
def test_errors_stay_within_the_goals(bound: float) -> None:
    rules = make_rules(bound)
    fair = benchmark.Null("fair", rules, benchmark.beta_binomial(bound, 0.01))
    worse = benchmark.Null("worse", rules, benchmark.some_worse(bound, 0.1, 0.15, 0.005))
    assert benchmark.errors(fair, n_runs=RUNS, seed=1).total <= most(5.0)
    assert benchmark.errors(worse, n_runs=RUNS, seed=1).total <= most(7.0)


def test_looking_at_the_fixed_interval_is_caught() -> None:
    rules = benchmark.methods(0.97)["95 % interval after each cluster"]
    worse = benchmark.Null("worse", rules, benchmark.some_worse(0.97, 0.1, 0.15, 0.005))
    assert benchmark.errors(worse, n_runs=200, seed=1).total > 20.0


def test_three_points_take_a_third_of_sixty_clusters() -> None:
    # Correlation 0.01 at 0.93 with 127 to 255 positions: standard deviation 0.032 between clusters.
    rules = make_rules(0.9)
    for margin in (3.0, -3.0):
        draw = benchmark.beta_binomial(0.9 + margin / 100.0, 0.01)
        found = benchmark.clusters(benchmark.Point("", 0.9, margin, rules), draw, n_runs=300, seed=1)
        assert found.median <= 22
        assert (found.passed if margin > 0 else found.failed) >= 99.0


def test_drawn_clusters_have_the_mean_they_say() -> None:
    rng = np.random.default_rng(6)
    for draw in (benchmark.beta_binomial(0.9, 0.05), benchmark.some_worse(0.9, 0.1, 0.15, 0.02)):
        n_agree, n = draw(rng, 200, 300)
        # 60,000 clusters of standard deviation below 0.08: an error of 0.0003.
        assert n_agree.sum() / n.sum() == pytest.approx(0.9, abs=0.0014)


def test_a_missed_goal_is_marked_and_run_again(tmp_path: Path) -> None:
    rules = benchmark.methods(0.97)["95 % interval after each cluster"]
    null = benchmark.Null("naive", rules, benchmark.beta_binomial(0.97, 0.01), 5.0)
    lines, missed = benchmark.error_table([null], n_runs=40, seed=3)
    assert lines[-1].endswith("| 5 **missed** |")
    assert "again with 400 runs and another seed" in missed[0]
    point = benchmark.Point("correlation 0.01", 0.97, 1.0, rules)
    found = [(point, benchmark.Clusters(12.0, 7.0, 30.0, 14.25, 96.0, 1.0))]
    table = benchmark.curve_table(found, "correlation 0.01")
    assert any(line.startswith("| 0.97 |") and "| 12 (7-30) 96 % |" in line for line in table)
    benchmark.write_curve(tmp_path / "curve.csv", found)
    with (tmp_path / "curve.csv").open(encoding="utf-8") as file:
        row = next(csv.DictReader(file))
    assert (row["clusters"], row["median"], row["mean"], row["inconclusive_%"]) == (
        "correlation 0.01",
        "12",
        "14.2",
        "3.0",
    )

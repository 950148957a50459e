"""The breakdown: every part by hand, the Kaplan-Meier estimate against SciPy's, totals against the report's counts."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks import llama_perplexity
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import CensoredData, ecdf
from small_runs import FOUR_AT_A_TIME, ONE_AT_A_TIME, SHORT, make_text

from agreement import ChunkOptions, intervals, load_report, sweep
from agreement.analysis import by_cluster
from agreement.breakdown import (
    PARTS,
    Breakdown,
    Options,
    Positions,
    break_down,
    by_document,
    by_margin,
    by_position,
    delta_p,
    flips,
    kld_quantiles,
    load_positions,
    positions,
    run_lengths,
)
from agreement.breakdown.groups import margin_bins
from agreement.breakdown.results import Place
from agreement.breakdown.streaks import expected_length, kaplan_meier, to_first_difference
from agreement.cli import main
from agreement.errors import StoreError, UsageError
from agreement.recording import load_chunks, stored_scores
from agreement.records import ChunkSet, Counts, PositionScores
from agreement.report.breakdown import render_breakdown
from agreement.report.breakdown_values import CSV_HEADER, breakdown_dict
from agreement.scoring import count_chunk
from agreement.store import RunStore
from agreement.summary import load_counts

OPTIONS = Options()


def make_chunks(targets: np.ndarray, cluster: list[int], names: tuple[str, ...], first: int = 1) -> ChunkSet:
    n_chunks, n_scored = targets.shape
    return ChunkSet(
        tokens=np.zeros((n_chunks, first + n_scored + 1), np.int32),
        targets=targets.astype(np.int32),
        cluster=np.array(cluster, np.int32),
        cluster_names=names,
        first=first,
        last=first + n_scored,
        chunking="document",
        seed=0,
        notes=(),
        fingerprint="",
    )


def make_scores(columns: dict[str, Any]) -> PositionScores:
    floats = {"base_target_logprob", "base_margin", "test_target_logprob", "kld_low", "kld_high"}
    arrays = {name: np.array(v, np.float32 if name in floats else np.int32) for name, v in columns.items()}
    ambiguous = np.zeros(len(arrays["target"]), np.bool_)
    return PositionScores(**{"kld_high": arrays["kld_low"], "ambiguous": ambiguous, **arrays})


# Three chunks of four scored positions, the first at position 1; a.py has two of them, c.py has none.
TARGET = [[10, 11, 12, 13], [14, 15, 16, 17], [18, 19, 20, 21]]
BASE_TOP = [[10, 11, 50, 13], [51, 15, 16, 52], [18, 53, 20, 54]]
TEST_TOP = [[10, 60, 50, 13], [14, 15, 61, 52], [18, 62, 20, 54]]
# agree:    1   0   1   1     0   1   0   1     1   0   1   1
MARGIN = [[0.5, 0.1, 2.0, 3.0], [0.2, 1.0, 0.3, 4.0], [1.5, 0.4, 5.0, 0.6]]
KLD = [[0, 0.5, 0.25, 0.125], [1.0, 0, 2.0, 0], [0.25, 0.75, 0, 0.5]]
TEST_P = [[0.5, 0.25, 0.5, 0.75], [0.5, 0.5, 0.25, 0.5], [0.5, 0.5, 0.5, 0.5]]


def hand(**changed: Any) -> Positions:
    names = ("a.py", "b.py", "c.py")
    scores = [
        make_scores(
            {
                "target": TARGET[i],
                "base_top": BASE_TOP[i],
                "test_top": TEST_TOP[i],
                "base_margin": MARGIN[i],
                "kld_low": KLD[i],
                "base_target_logprob": [math.log(0.5)] * 4,
                "test_target_logprob": np.log(TEST_P[i]),
                **{name: values[i] for name, values in changed.items()},
            }
        )
        for i in range(3)
    ]
    return positions("hand", "experts=6", make_chunks(np.array(TARGET), [0, 0, 1], names), scores)


def random_positions(seed: int, n_chunks: int, n_scored: int, n_names: int) -> tuple[Positions, tuple[Counts, ...]]:
    """Return scores with few different tokens and margins, so that ties are common, and their counts by cluster."""
    rng = np.random.default_rng(seed)
    cluster = rng.integers(n_names, size=n_chunks).tolist()
    targets = rng.integers(3, size=(n_chunks, n_scored))
    scores = []
    for i in range(n_chunks):
        kld = rng.exponential(size=n_scored)
        scores.append(
            make_scores(
                {
                    "target": targets[i],
                    "base_top": rng.integers(3, size=n_scored),
                    "test_top": rng.integers(3, size=n_scored),
                    "base_margin": rng.integers(5, size=n_scored) / 4,
                    "kld_low": kld,
                    "kld_high": kld + rng.integers(2),
                    "base_target_logprob": -rng.exponential(size=n_scored),
                    "test_target_logprob": -rng.exponential(size=n_scored),
                }
            )
        )
    names = tuple(f"document {i}" for i in range(n_names))
    counts = by_cluster([count_chunk(s) for s in scores], cluster, n_names)
    return positions("random", "experts=6", make_chunks(targets, cluster, names), scores), counts


# ---------------------------------------------------------------------------------------------------------- by hand


def test_margin_bins_by_hand() -> None:
    """12 margins in 4 bins: the 3rd, 6th, 9th and 12th smallest are upper edges.

    In order .1 .2 .3 | .4 .5 .6 | 1 1.5 2 | 3 4 5.  The first bin holds (0, 1), (1, 0), (1, 2), all of a.py
    and all different: 0 of 3, KLD (.5 + 1 + 2) / 3.  The second holds (2, 1) different, (0, 0) and (2, 3) not.
    """
    found = by_margin(hand(), 4, OPTIONS)
    assert [b.low for b in found] == [np.float32(x) for x in (0.1, 0.3, 0.6, 2.0)]
    assert [b.high for b in found] == [np.float32(x) for x in (0.3, 0.6, 2.0, 5.0)]
    assert [(b.n_agree, b.n) for b in found] == [(0, 3), (2, 3), (3, 3), (3, 3)]
    assert [b.kld.value for b in found] == pytest.approx([3.5 / 3, 1.25 / 3, 0.5 / 3, 0.125 / 3])
    assert [b.agreement.n_clusters for b in found] == [1, 2, 2, 2]
    assert found[0].agreement.low is None
    assert "one cluster" in found[0].agreement.note
    assert "2 clusters without" in found[0].kld.note
    # The second bin: one of a.py's one position, one of b.py's two, none of c.py.
    expected = intervals.proportion([1, 1, 0], [1, 2, 0], rng=np.random.default_rng(0))
    assert found[1].agreement == expected
    kld = intervals.bounded_mean([0, 1.25, 0], [0, 1.25, 0], [1, 2, 0], rng=np.random.default_rng(0), lower_bound=0.0)
    assert found[1].kld == kld


@pytest.mark.parametrize(
    ("margin", "bins", "edges", "counts"),
    [
        ([3, 1, 2, 4], 2, [1, 2, 4], [2, 2]),
        ([3, 1, 2, 4, 5], 2, [1, 3, 5], [3, 2]),  # ceil(5 / 2) = 3
        ([1, 1, 1, 2], 2, [1, 1, 2], [3, 1]),  # ties stay together: bin 0 is [1, 1]
        ([1, 1, 1, 1], 4, [1, 1], [4]),
        ([0, 0, 0, 5], 4, [0, 0, 5], [3, 1]),
        ([2, 1], 5, [1, 1, 2], [1, 1]),  # more bins than margins
        ([1, math.inf, math.inf], 3, [1, 1, math.inf], [1, 2]),
        ([7], 1, [7, 7], [1]),
    ],
)
def test_margin_edges(margin: list[float], bins: int, edges: list[float], counts: list[int]) -> None:
    found, group = margin_bins(np.array(margin, np.float32), bins)
    assert found == edges
    assert np.bincount(group).tolist() == counts


def test_position_bins_by_hand() -> None:
    """Columns 0-1 agree at 1 0, 0 1, 1 0 and columns 2-3 at 1 1, 0 1, 1 1; column 0 is position 1.

    KLD: (0 + .5 + 1 + 0 + .25 + .75) / 6 and (.25 + .125 + 2 + 0 + 0 + .5) / 6.
    """
    found = by_position(hand(), 2, OPTIONS)
    assert [(b.low, b.high, b.n_agree, b.n) for b in found] == [(1, 3, 3, 6), (3, 5, 5, 6)]
    assert [b.kld.value for b in found] == pytest.approx([2.5 / 6, 2.875 / 6])


def test_position_bins_of_unequal_width() -> None:
    # 4 columns in 3 bins: floor(4 i / 3) = 0, 1, 2, 4.  No more bins than columns.
    assert [(b.low, b.high) for b in by_position(hand(), 3, OPTIONS)] == [(1, 2), (2, 3), (3, 5)]
    assert [(b.low, b.n) for b in by_position(hand(), 99, OPTIONS)] == [(1, 3), (2, 3), (3, 3), (4, 3)]


def test_documents_by_hand() -> None:
    """a.py: 3 + 2 of 8, KLD .875 + 3; b.py: 3 of 4, KLD 1.5; c.py has no chunk and no row."""
    rows = by_document(hand())
    assert [(r.name, r.n, r.n_agree, r.agreement) for r in rows] == [("a.py", 8, 5, 0.625), ("b.py", 4, 3, 0.75)]
    assert [r.kld_low for r in rows] == [r.kld_high for r in rows] == [3.875 / 8, 1.5 / 4]


def test_equal_documents_stand_by_kld_then_by_name() -> None:
    same = np.zeros((3, 2), np.int32)
    scores = [
        make_scores(
            {"target": [0, 0], "base_top": [1, 1], "test_top": [1, 2], "base_margin": [1, 1], "kld_low": [kld, 0]}
            | {"base_target_logprob": [-1, -1], "test_target_logprob": [-1, -1]}
        )
        for kld in (0.5, 1.0, 0.5)
    ]
    chunks = make_chunks(same, [0, 1, 2], ("z", "y", "x"))
    assert [row.name for row in by_document(positions("r", "s", chunks, scores))] == ["y", "x", "z"]


def test_flips_by_hand() -> None:
    """Right to wrong at (0, 1), (1, 2); wrong to right at (1, 0); same wrong token at (0, 2), (1, 3), (2, 3)."""
    found = flips(hand(), OPTIONS)
    assert (found.n_both_right, found.n_right_to_wrong, found.n_wrong_to_right) == (5, 2, 1)
    assert (found.n_wrong_same, found.n_wrong_changed) == (3, 1)
    assert found.base_accuracy.value == 7 / 12
    assert found.test_accuracy.value == 6 / 12
    assert found.right_to_wrong.value == 2 / 12
    assert found.wrong_changed.value == 1 / 12
    assert found.difference.value == pytest.approx(-1 / 12)
    # By cluster: a.py 5 right of 8 before, 4 after; b.py 2 of 4 both times.
    paired = intervals.difference([4, 2, 0], [5, 2, 0], [8, 4, 0], rng=np.random.default_rng(0), limit=1.0)
    assert (found.difference.low, found.difference.high) == (paired.low, paired.high)


def test_flips_that_never_happen_are_bounded_from_one_side() -> None:
    found = flips(hand(test_top=BASE_TOP), OPTIONS)
    assert found.n_right_to_wrong == 0
    assert found.right_to_wrong.low == 0.0
    # 1 - 0.05 ** (1 / 2) of two clusters
    assert found.right_to_wrong.high == pytest.approx(1 - math.sqrt(0.05))
    assert found.right_to_wrong.note == "none seen: one-sided bound from 2 clusters"
    assert found.difference.value == 0.0
    assert found.difference.low is None


def test_delta_p_by_hand() -> None:
    """-.25 at (0, 1) and (1, 2), +.25 at (0, 3), else 0: mean -.25 / 12, mean square 3 / 16 / 12 = 1 / 64.

    In order -.25 -.25 0 (nine times) .25; the quantile q lies at q * 11, between neighbours.
    """
    found = delta_p(hand(), OPTIONS)
    assert found.mean.value == pytest.approx(-0.25 / 12, abs=1e-7)
    assert found.rms.value == pytest.approx(0.125, abs=1e-7)
    assert found.rms.low is not None
    assert found.rms.high is not None
    assert found.rms.low < 0.125 < found.rms.high
    values = {q.share: q.low for q in found.quantiles}
    by_hand = {1.0: 0.25, 0.99: 0.89 * 0.25, 0.95: 0.45 * 0.25, 0.9: 0, 0.5: 0, 0.1: -0.9 * 0.25, 0.05: -0.25, 0: -0.25}
    assert {q: values[q] for q in by_hand} == pytest.approx(by_hand, abs=1e-7)


def test_kld_quantiles_by_hand() -> None:
    """In order 0 (four times) .125 .25 .25 .5 .5 .75 1 2; the quantile q lies at q * 11, between neighbours."""
    found = kld_quantiles(hand(), OPTIONS)
    assert found.mean.value == pytest.approx(5.375 / 12)
    by_hand = [2, 1 + 0.989, 1 + 0.89, 1 + 0.45, 0.75 + 0.9 * 0.25, 0.25]
    assert [q.share for q in found.quantiles] == [1.0, 0.999, 0.99, 0.95, 0.9, 0.5]
    assert [q.low for q in found.quantiles] == pytest.approx(by_hand)
    assert found.worst == Place("a.py", chunk=1, position=3, target=16, base_top=16, test_top=61)


def test_kld_of_a_recording_of_the_top_is_bounds() -> None:
    """One upper bound of .125 + 4 is the largest; the place is that of the largest lower bound."""
    found = kld_quantiles(hand(kld_high=[[0, 0.5, 0.25, 4.125], *KLD[1:]]), OPTIONS)
    assert (found.quantiles[0].low, found.quantiles[0].high) == (2.0, 4.125)
    assert found.worst.chunk == 1
    # Upper bounds in order end in 1 2 4.125: at .95 * 11 = 10.45 lies 2 + .45 * 2.125
    assert found.quantiles[3].high == pytest.approx(2 + 0.45 * 2.125)
    assert found.mean.value == pytest.approx(5.375 / 12)  # of the lower bounds
    (row, _) = by_document(hand(kld_high=[[0, 0.5, 0.25, 4.125], *KLD[1:]]))
    assert (row.kld_low, row.kld_high) == (3.875 / 8, 7.875 / 8)


# ---------------------------------------------------------------------------------------------------------- run lengths


def test_tokens_to_the_first_difference() -> None:
    agree = np.array([[1, 1, 0, 1, 0, 0, 1, 1], [1] * 8, [0] * 8], np.bool_)
    tokens, seen = to_first_difference(agree)
    assert tokens.tolist() == [[3, 2, 1, 2, 1, 1, 2, 1], [8, 7, 6, 5, 4, 3, 2, 1], [1] * 8]
    assert seen.tolist() == [[True] * 6 + [False] * 2, [False] * 8, [True] * 8]


def test_run_lengths_by_hand() -> None:
    """Agree 1 0 1 1, 0 1 0 1, 1 0 1 1 makes (cut: +) 2 1 2+ 1+, 1 2 1 1+, 2 1 2+ 1+.

    From anywhere: of 12 followed for one token 4 differ, 2/3 remain; 3 are cut; of 5 followed for two 3 differ,
    2/3 * 2/5 = 4/15 remain at the end.  Mean at least 1 + 2/3.  After a difference: 2+, 2, 1+, 2+; none of 4 differs at
    one token, 1 of 3 at two: 2/3 remain.
    """
    found = run_lengths(hand(), OPTIONS)
    run = found.anywhere
    assert (run.n_starts, run.n_cut, run.longest, run.open_ended) == (12, 5, 2, True)
    assert run.mean == pytest.approx(5 / 3)
    assert run.quartiles == (1, 2, None)
    after = found.after_difference
    assert after is not None
    assert (after.n_starts, after.n_cut, after.longest, after.open_ended) == (4, 3, 2, True)
    assert after.mean == 2.0
    assert after.quartiles == (2, None, None)
    agreement = intervals.proportion([5, 3, 0], [8, 4, 0], rng=np.random.default_rng(0))
    assert found.expected.value == pytest.approx(12 / 4)
    assert agreement.low is not None
    assert agreement.high is not None
    assert found.expected.low == 1 / (1 - agreement.low)
    assert found.expected.high == 1 / (1 - agreement.high)


def test_run_lengths_that_all_end() -> None:
    """Lengths 3 2 1 2 1 1, then 2 and 1 cut.

    Remaining: 1 - 3/8 = 5/8; times 1 - 2/4 = 5/16; times 1 - 1/1 = 0.  Mean 1 + 5/8 + 5/16.
    """
    tokens, seen = to_first_difference(np.array([[1, 1, 0, 1, 0, 0, 1, 1]], np.bool_))
    run = kaplan_meier(tokens.ravel(), seen.ravel())
    assert run.mean == 1 + 5 / 8 + 5 / 16
    assert not run.open_ended
    assert run.quartiles == (1, 2, 3)


def test_no_difference_at_all() -> None:
    found = run_lengths(hand(test_top=BASE_TOP), OPTIONS)
    assert found.expected.value == found.expected.high == math.inf
    assert found.expected.low == pytest.approx(1 / (1 - math.sqrt(0.05)))  # two clusters
    assert found.after_difference is None
    assert (found.anywhere.n_cut, found.anywhere.mean, found.anywhere.open_ended) == (12, 4.0, True)
    assert found.anywhere.quartiles == (None, None, None)


def test_an_exact_quarter_is_reached() -> None:
    # Of four, one each differs at 1, 2, 3, 4 tokens: a quarter at 1, a half at 2, three quarters at 3.
    run = kaplan_meier(np.array([4, 2, 3, 1]), np.ones(4, np.bool_))
    assert run.quartiles == (1, 2, 3)
    assert run.mean == pytest.approx(2.5)


def test_expected_length_of_one_cluster_has_no_interval() -> None:
    found = expected_length(intervals.proportion([9], [10], rng=np.random.default_rng(0)))
    assert found.value == pytest.approx(10)
    assert (found.low, found.high) == (None, None)


@given(st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=1, max_size=60))
def test_kaplan_meier_is_that_of_scipy(starts: list[tuple[int, bool]]) -> None:
    tokens = np.array([t for t, _ in starts])
    seen = np.array([s for _, s in starts], np.bool_)
    run = kaplan_meier(tokens, seen)
    if not seen.any():
        assert run.mean == run.longest
        return
    curve = ecdf(CensoredData.right_censored(tokens, ~seen)).sf
    remaining = curve.evaluate(np.arange(run.longest + 1))
    assert run.mean == pytest.approx(remaining[:-1].sum())
    assert run.open_ended == (remaining[-1] > 1e-9)
    for quarter, at in zip((0.25, 0.5, 0.75), run.quartiles, strict=True):
        reached = np.flatnonzero(remaining <= 1 - quarter + 1e-9)
        assert at == (reached[0] if reached.size else None)


def test_independent_differences_give_the_expected_length() -> None:
    """Positions that agree with probability 0.8 each: 5 tokens on average, the median 4 (0.8**3 > 1/2 >= 0.8**4)."""
    agree = np.random.default_rng(5).random((400, 100)) < 0.8
    tokens, seen = to_first_difference(agree)
    run = kaplan_meier(tokens.ravel(), seen.ravel())
    assert run.mean == pytest.approx(5, rel=0.03)
    assert run.quartiles == (2, 4, 7)  # 0.8**2 = 0.64 <= 3/4; 0.8**7 = 0.21 <= 1/4 < 0.8**6


# ------------------------------------------------------------------------------------------------------------- totals


@settings(deadline=None, max_examples=40)  # each renders three formats
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 9), st.integers(1, 4), st.integers(1, 7))
def test_parts_add_up_to_the_counts(seed: int, n_chunks: int, n_scored: int, n_names: int, bins: int) -> None:
    scored, counts = random_positions(seed, n_chunks, n_scored, n_names)
    total = sum(counts, Counts())
    found = break_down(scored, bins=bins)
    assert (found.n_positions, found.n_agree) == (total.n, total.n_agree)
    for part in (found.margin, found.position):
        assert part is not None
        assert 1 <= len(part) <= bins
        assert all(b.n > 0 for b in part)
        assert sum(b.n for b in part) == total.n
        assert sum(b.n_agree for b in part) == total.n_agree
        assert sum(b.kld.value * b.n for b in part) == pytest.approx(total.kld_low)
        assert all(a.high == b.low for a, b in pairwise(part))
    assert found.document is not None
    assert {r.name: (r.n, r.n_agree) for r in found.document} == {
        f"document {i}": (c.n, c.n_agree) for i, c in enumerate(counts) if c.n
    }
    assert [r.agreement for r in found.document] == sorted(r.agreement for r in found.document)
    assert found.flips is not None
    f = found.flips
    assert f.n_right_to_wrong == total.n_right_to_wrong
    assert f.n_wrong_to_right == total.n_wrong_to_right
    assert f.n_both_right + f.n_right_to_wrong == total.n_base_right
    assert f.n_both_right + f.n_wrong_to_right == total.n_test_right
    assert f.n_both_right + f.n_wrong_same == total.n_agree
    assert f.n_right_to_wrong + f.n_wrong_to_right + f.n_wrong_changed == total.n - total.n_agree
    assert found.dp is not None
    assert found.dp.mean.value == pytest.approx(total.dp / total.n)
    assert found.dp.rms.value == pytest.approx(math.sqrt(total.dp_squared / total.n))
    assert found.runs is not None
    assert found.runs.anywhere.n_starts == total.n
    for form in ("text", "csv", "json"):
        assert render_breakdown(found, form).endswith("\n")


@given(st.integers(0, 2**32), st.integers(1, 9))
def test_margin_bins_are_in_order_and_keep_ties_together(seed: int, bins: int) -> None:
    rng = np.random.default_rng(seed)
    margin = (rng.integers(12, size=(3, 7)) / 8).astype(np.float32)
    edges, group = margin_bins(margin, bins)
    low, high = np.array(edges[:-1])[group], np.array(edges[1:])[group]
    assert np.all((low < margin) | ((group == 0) & (low <= margin)))
    assert np.all(margin <= high)
    assert edges[0] == margin.min()
    assert edges[-1] == margin.max()


def test_leaving_parts_out_changes_no_number() -> None:
    whole = break_down(hand())
    for part in PARTS:
        one = break_down(hand(), parts=(part,))
        assert getattr(one, part) == getattr(whole, part)
        assert [p for p in PARTS if getattr(one, p) is not None] == [part]


# ---------------------------------------------------------------------------------------------------------- bad input


def test_bad_arguments() -> None:
    with pytest.raises(UsageError, match="`bins` is 0"):
        break_down(hand(), bins=0)
    with pytest.raises(UsageError, match="'class', which is none of margin"):
        break_down(hand(), parts=("class",))  # type: ignore[arg-type]  # that is the test
    with pytest.raises(UsageError, match="`confidence`"):
        break_down(hand(), parts=("document",), confidence=95)
    with pytest.raises(UsageError, match="`most` is 0"):
        render_breakdown(break_down(hand()), most=0)
    with pytest.raises(UsageError, match="format 'html' is none of text, json, csv"):
        render_breakdown(break_down(hand()), "html")  # type: ignore[arg-type]  # that is the test


def test_scores_that_do_not_fit_the_chunks() -> None:
    chunks = make_chunks(np.array(TARGET), [0, 0, 1], ("a.py", "b.py"))
    row = make_scores(
        {"target": TARGET[0], "base_top": BASE_TOP[0], "test_top": TEST_TOP[0], "base_margin": MARGIN[0]}
        | {"kld_low": KLD[0], "base_target_logprob": [-1] * 4, "test_target_logprob": [-1] * 4}
    )
    with pytest.raises(StoreError, match="scores of 1 of 3 chunks"):
        positions("r", "experts=6", chunks, [row])
    with pytest.raises(StoreError, match="chunk 1 are of other tokens"):
        positions("r", "experts=6", chunks, [row, row, row])
    with pytest.raises(UsageError, match="no scored position"):
        positions("r", "experts=6", chunks, [])


# ---------------------------------------------------------------------------------------------------------- rendering


def test_text_by_hand() -> None:
    """The numbers are those of the tests above; the intervals are those of `agreement.intervals`, tested there."""
    lines = render_breakdown(break_down(hand()), "text", most=1).splitlines()
    cells = [line.split() for line in lines]
    head = "hand, experts=6: 12 positions, 3 chunks, 2 clusters; 8 agree (66.67 %; llama-perplexity's Same top p)"
    assert lines[0] == head
    assert ["[0.100,", "0.300]", "3", "1", "0.00", "[-]", "(1)", "1.1667", "[-]", "(1)"] in cells
    assert any(line.startswith("  (0.300, 0.600]          3         2 ") for line in lines)
    assert "by document: the 1 worst of 2, worst first (one cluster each: no interval)" in lines
    assert ["a.py", "8", "62.5", "0.484375"] in cells
    assert not any(line.startswith("  b.py") for line in lines)
    assert ["both", "wrong,", "same", "token", "3"] in cells
    assert ["99.9%", "KLD", "1.989000"] in cells
    assert ["Median", "KLD", "0.250000"] in cells
    assert ["Minimum", "Δp", "-25.000"] in cells
    assert (
        "  the maximum is in a.py, chunk 1, position 3: token 16 became 61, the true next one is 16"
    ) in lines  # fmt: skip
    assert ["measured,", "from", "any", "position", "12", "5", "at", "least", "1.66", "1", "2", ">2"] in cells
    assert ["measured,", "between", "differences", "4", "3", "at", "least", "2.00", "2", ">2", ">2"] in cells
    assert any(line.startswith("(1) one cluster: no interval") for line in lines)
    assert all(line == line.rstrip() for line in lines)


def test_text_where_nothing_differs() -> None:
    same = hand(test_top=BASE_TOP, kld_low=[[0] * 4] * 3, kld_high=[[0] * 4] * 3)
    words = render_breakdown(break_down(same), "text")
    assert "12 agree (100.00 %" in words
    assert "none seen [" in " ".join(words.split())
    assert "both predict token 10, the true next one is 10" in words
    assert "nan" not in words.lower()


def test_text_says_what_is_ambiguous_and_what_is_bounded() -> None:
    found = break_down(hand(kld_high=[[0, 0.5, 0.25, 4.125], *KLD[1:]]))
    words = render_breakdown(replace(found, n_ambiguous=3))
    assert "note: at 3 positions the stored baseline cannot tell its two best tokens apart" in words
    assert "Maximum KLD  2.000000 to 4.125000" in words


def test_json_has_every_number_unrounded() -> None:
    found = break_down(hand(test_top=BASE_TOP))
    data = json.loads(render_breakdown(found, "json"), parse_constant=pytest.fail)
    assert data == json.loads(json.dumps(breakdown_dict(found)))
    assert data["n_positions"] == 12
    assert data["runs"]["expected"]["value"] is None  # infinite
    assert data["runs"]["after_difference"] is None
    assert data["runs"]["anywhere"]["quartiles"] == [None, None, None]
    assert data["margin"][0]["low"] == float(np.float32(0.1))
    assert [d["name"] for d in data["document"]] == ["a.py", "b.py"]  # both agree everywhere; a.py has the higher KLD
    assert len(breakdown_dict(found, most=1)["document"]) == 1
    assert "flips" not in breakdown_dict(break_down(hand(), parts=("dp",)))


def test_csv_reads_back() -> None:
    found = break_down(hand())
    rows = list(csv.DictReader(io.StringIO(render_breakdown(found, "csv"))))
    assert tuple(rows[0]) == CSV_HEADER
    by_key = {(r["part"], r["item"], r["measure"]): r for r in rows}
    assert len(by_key) == len(rows)
    assert found.margin is not None
    row = by_key["margin", "1", "agreement"]
    estimate = found.margin[1].agreement
    assert [float(row[c]) for c in ("value", "low", "high")] == [estimate.value, estimate.low, estimate.high]
    assert (float(row["from"]), float(row["to"])) == (found.margin[1].low, found.margin[1].high)
    assert by_key["flips", "", "n_right_to_wrong"]["value"] == "2"
    assert by_key["kld", "maximum", "document"]["value"] == "a.py"
    assert by_key["kld", "0.999", "quantile"]["value"] == str(kld_quantiles(hand(), OPTIONS).quantiles[1].low)
    assert by_key["runs", "after_difference", "median"]["value"] == ""
    bounded = break_down(hand(kld_high=[[0, 0.5, 0.25, 4.125], *KLD[1:]]), parts=("kld",))
    rows = list(csv.DictReader(io.StringIO(render_breakdown(bounded, "csv"))))
    (most,) = (r for r in rows if (r["item"], r["measure"]) == ("1", "quantile"))
    assert (most["value"], most["low"], most["high"]) == ("", "2.0", "4.125")


# ---------------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, qwen: Path, text_folder: Path) -> dict[str, Path]:
    """Return two finished runs of the same settings, with full logits and with the top alone."""
    folder = tmp_path_factory.mktemp("breakdown")
    for logits in ("full", "top"):
        sweep(
            qwen, text_folder, folder / logits, experts=(6, 2), chunks=SHORT, options=FOUR_AT_A_TIME, in_process=True,
            logits=logits,
        )  # fmt: skip
    return {name: folder / name for name in ("full", "top")}


def whole(run: Path) -> Breakdown:
    return break_down(load_positions(run, "experts=2"))


def test_a_run_adds_up_to_its_report(runs: dict[str, Path]) -> None:
    found = whole(runs["full"])
    row = load_report(runs["full"]).rows[1]
    assert row.setting == found.setting == "experts=2"
    total = sum(load_counts(runs["full"])[0].settings[1].counts, Counts())
    assert (found.n_positions, found.n_agree, found.n_clusters) == (row.n_positions, total.n_agree, row.n_clusters)
    assert 0 < found.n_agree < found.n_positions
    assert found.margin is not None
    assert sum(b.n_agree for b in found.margin) == total.n_agree
    assert found.kld is not None
    assert found.kld.mean == row.kld
    assert found.runs is not None
    assert found.runs.expected.value == pytest.approx(row.run_length)
    assert found.dp is not None
    assert found.dp.mean.value == pytest.approx(total.dp / total.n)
    # The maximum is where it says.
    worst = found.kld.worst
    run = RunStore.open(runs["full"])
    chunks = load_chunks(run)
    scores = stored_scores(run, "experts=2", worst.chunk)
    assert scores.kld_low[worst.position - chunks.first] == found.kld.quantiles[0].low
    assert chunks.cluster_names[chunks.cluster[worst.chunk]] == worst.document
    assert chunks.tokens[worst.chunk, worst.position + 1] == worst.target


def test_the_top_alone_gives_the_same_but_for_kld_bounds(runs: dict[str, Path]) -> None:
    full, top = whole(runs["full"]), whole(runs["top"])
    assert (full.flips, full.dp, full.runs) == (top.flips, top.dp, top.runs)
    assert full.kld is not None
    assert top.kld is not None
    for exact, bounds in zip(full.kld.quantiles, top.kld.quantiles, strict=True):
        assert bounds.low < bounds.high
        # The full recording's own error: 16-bit codes and float32 sums.
        assert bounds.low - 1e-3 <= exact.low <= bounds.high + 1e-3


@pytest.mark.skipif(
    llama_perplexity.built_program() is None, reason="build it: python tests/benchmarks/llama_perplexity.py"
)
def test_the_numbers_are_llama_perplexitys(qwen: Path, tmp_path: Path) -> None:
    """Every line of its tables for Δp and KLD.

    `llama-perplexity -c 64 --chunks 6 -t 1 -b 64 -ub 64`, first with `--kl-divergence-base base.kld`, then with
    `--kl-divergence --override-kv qwen3moe.expert_used_count=int:6`.
    """
    text, base = tmp_path / "text.txt", tmp_path / "base.kld"
    text.write_text(make_text(3, 200), encoding="utf-8")
    alone = ("-t", "1", "-b", "64", "-ub", "64")
    llama_perplexity.run_base(qwen, text, 64, 6, base_file=base, extra=alone)
    six = (*alone, "--override-kv", "qwen3moe.expert_used_count=int:6")
    printed = {k: v.value for k, v in llama_perplexity.run_kld(qwen, base, 64, extra=six).statistics.items()}
    cutting = ChunkOptions(chunking="llama-perplexity", n_ctx=64, n_chunks=6)
    sweep(qwen, text, tmp_path / "run", experts=(6,), chunks=cutting, options=ONE_AT_A_TIME, in_process=True)
    found = break_down(load_positions(tmp_path / "run"))
    assert found.dp is not None
    assert found.kld is not None
    names = {1.0: "Maximum", 0.5: "Median", 0.0: "Minimum"}
    ours = {"Mean Δp": 100 * found.dp.mean.value, "RMS Δp": 100 * found.dp.rms.value, "Mean KLD": found.kld.mean.value}
    ours |= {f"{names.get(q.share, f'{100 * q.share:.1f}%')} Δp": 100 * q.low for q in found.dp.quantiles}
    ours |= {f"{names.get(q.share, f'{100 * q.share:.1f}%')} KLD": q.low for q in found.kld.quantiles}
    ours["Same top p"] = 100 * found.n_agree / found.n_positions
    assert len(ours) == 3 + 13 + 6 + 1
    # It prints percent to 3 digits and nats to 6; its baseline is rounded to 16-bit codes of up to 16 nats / 65535.
    for name, value in ours.items():
        assert value == pytest.approx(printed[name], rel=3e-4, abs=1e-3 if "KLD" not in name else 1e-4), name


def call(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["breakdown", *map(str, arguments)])
    return done.exit_code, done.output


def test_the_command(runs: dict[str, Path]) -> None:
    code, output = call(runs["full"], "--setting", "experts=2")
    assert (code, output) == (0, render_breakdown(whole(runs["full"])))
    code, output = call(runs["full"], "--setting", "experts=2", "--by", "margin", "--by", "runs", "--format", "json")
    data = json.loads(output)
    assert [part for part in PARTS if part in data] == ["margin", "runs"]
    code, output = call(runs["full"], "--setting", "experts=6", "--by", "margin", "--bins", "2", "--format", "csv")
    assert code == 0
    assert len(output.splitlines()) == 1 + 2 * 2  # agreement and KLD of two bins
    assert (
        len(json.loads(call(runs["top"], "--setting", "experts=6", "--most", "2", "--format", "json")[1])["document"])
        == 2
    )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--setting", "experts=5"), 1, "'experts=5' is not in the run; "),
        ((), 1, "has 2 finished settings; name one of experts=6, experts=2"),
        (("--setting", "experts=6", "--by", "mood"), 2, "'mood' is not one of"),
        (("--setting", "experts=6", "--bins", "0"), 2, "--bins"),
        (("--setting", "experts=6", "--confidence", "95"), 1, "`confidence` must lie between 0 and 1"),
    ],
)
def test_the_command_refuses(runs: dict[str, Path], arguments: tuple[str, ...], code: int, message: str) -> None:
    found, output = call(runs["full"], *arguments)
    assert found == code
    assert message in output
    assert "Traceback" not in output


def test_scores_that_were_deleted(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["full"], tmp_path, dirs_exist_ok=True)
    scores = tmp_path / "settings" / "experts=2"
    (scores / "chunk-000001.agr").unlink()
    code, output = call(tmp_path, "--setting", "experts=2")
    assert code == 1
    assert f"{scores / 'chunk-000001.agr'} is missing; run again with --resume" in output
    assert call(tmp_path)[0] == 0  # the only one that is whole
    shutil.rmtree(tmp_path / "settings")
    n = len(list((runs["full"] / "settings" / "experts=6").iterdir()))
    code, output = call(tmp_path)
    assert code == 1
    assert f"experts=6/chunk-000000.agr is missing, and {n - 1} more of experts=6; run again" in output


def test_a_report_has_no_scores(runs: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match=r"report.json is a file; .* give the run's directory"):
        load_positions(runs["full"] / "report.json")


def test_a_setting_that_is_not_finished(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["full"], tmp_path, dirs_exist_ok=True)
    header = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    del header["passes"]["experts=2"]
    (tmp_path / "run.json").write_text(json.dumps(header), encoding="utf-8")
    with pytest.raises(UsageError, match=r"'experts=2' is not finished; .* has experts=6"):
        load_positions(tmp_path, "experts=2")
    del header["passes"]["experts=6"]
    (tmp_path / "run.json").write_text(json.dumps(header), encoding="utf-8")
    with pytest.raises(UsageError, match="0 finished settings; finish one with --resume"):
        load_positions(tmp_path)

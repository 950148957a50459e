"""Counts to estimates to rows: every value by hand; the intervals themselves are tested with `agreement.intervals`."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agreement.analysis import (
    RunCounts,
    SettingCounts,
    by_cluster,
    counts_from_json,
    counts_to_json,
    differences,
    find_setting,
    make_report,
)
from agreement.errors import AgreementError, GateError, StoreError
from agreement.records import Counts

# Three documents of 10, 20 and 10 positions.
SIX = (
    Counts(n=10, n_agree=9, nll_base=20.0, nll_test=21.0, kld_low=0.2, kld_high=0.4, n_base_right=4),
    Counts(n=20, n_agree=17, nll_base=30.0, nll_test=30.5, kld_low=0.2, kld_high=0.2, n_base_right=9),
    Counts(n=10, n_agree=10, nll_base=10.0, nll_test=10.1, kld_low=0.1, kld_high=0.1, n_base_right=5),
)
TWO = tuple(replace(c, n_agree=c.n_agree - k, nll_test=c.nll_test + 2) for c, k in zip(SIX, (3, 7, 4), strict=True))
RUN = RunCounts(
    title="demo",
    facts={"model": "m", "corpus": "c"},
    clusters=("a.py", "b.py", "c.py"),
    settings=(SettingCounts("experts=6", 6, 600, SIX), SettingCounts("experts=2", 2, 200, TWO, ("odd",))),
    notes=("a note",),
    seed=3,
)


def test_the_values_of_a_row() -> None:
    report = make_report(RUN, speeds={"experts=6": 12.5})
    assert (report.title, report.facts, report.notes) == ("demo", RUN.facts, ("a note",))
    assert report.baseline_ppl == pytest.approx(math.exp(60 / 40))  # 20 + 30 + 10 nats over 40 positions
    assert report.baseline_accuracy == 18 / 40  # 4 + 9 + 5
    row = report.rows[0]
    assert (row.setting, row.experts, row.expert_bytes, row.n_positions, row.n_clusters) == ("experts=6", 6, 600, 40, 3)
    assert row.agreement.value == 36 / 40
    assert row.ppl == pytest.approx(math.exp(61.6 / 40))  # 21 + 30.5 + 10.1
    assert row.ppl_ratio.value == pytest.approx(math.exp(1.6 / 40))  # exp of the mean difference of 1.0 + 0.5 + 0.1
    assert row.ppl_delta.value == pytest.approx(math.exp(61.6 / 40) - math.exp(60 / 40))
    assert row.kld.value == pytest.approx(0.5 / 40)  # the lower sums
    assert row.run_length == 40 / 4  # one position in ten differs
    assert row.tokens_per_second == 12.5
    second = report.rows[1]
    assert second.agreement.value == 22 / 40  # 36 - 3 - 7 - 4
    assert second.tokens_per_second is None
    assert second.warnings == ("odd",)


def test_intervals_hold_their_values() -> None:
    for row in make_report(RUN).rows:
        for estimate in (row.agreement, row.ppl_ratio, row.ppl_delta, row.kld):
            assert estimate.low is not None
            assert estimate.high is not None
            assert estimate.low <= estimate.value <= estimate.high
            assert estimate.confidence == 0.95


def test_a_wish_for_confidence_and_method_reaches_the_intervals() -> None:
    narrow, wide = (make_report(RUN, confidence=c).rows[0].agreement for c in (0.8, 0.99))
    assert wide.low < narrow.low < narrow.high < wide.high  # type: ignore[operator]  # three clusters give ends
    row = make_report(RUN, method="score").rows[0]
    assert "score" in row.agreement.method
    assert "score" not in row.kld.method, "the score interval is for shares; means take their default"


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    alone = make_report(replace(RUN, settings=RUN.settings[1:])).rows[0]
    assert alone == make_report(RUN).rows[1]
    assert make_report(RUN) == make_report(RUN)


def test_nothing_differs() -> None:
    same = tuple(replace(c, n_agree=c.n, nll_test=c.nll_base, kld_low=0.0, kld_high=0.0) for c in SIX)
    row = make_report(replace(RUN, settings=(SettingCounts("kv:x=int:1", None, None, same),))).rows[0]
    assert row.agreement.value == 1
    assert row.run_length == math.inf
    assert row.ppl_ratio.value == 1
    assert row.ppl_delta.value == 0
    assert row.kld.value == 0


def test_a_run_without_settings_and_a_setting_without_positions() -> None:
    report = make_report(replace(RUN, settings=()))
    assert report.rows == ()
    assert math.isnan(report.baseline_ppl)
    with pytest.raises(StoreError, match="experts=6 has no scored position; run again with --resume"):
        make_report(replace(RUN, settings=(SettingCounts("experts=6", 6, None, (Counts(),) * 3),)))


def test_differences_are_paired() -> None:
    (difference,) = differences(RUN, "experts=6")
    assert (difference.setting, difference.against) == ("experts=2", "experts=6")
    assert difference.agreement.value == pytest.approx(-14 / 40)  # 22/40 - 36/40
    assert difference.log_ppl.value == pytest.approx(6 / 40)  # two nats more in each of three documents
    assert difference.kld.value == 0
    assert difference.kld.low == difference.kld.high == 0 or difference.kld.note
    (other,) = differences(RUN, "experts=2")
    assert other.agreement.value == -difference.agreement.value
    with pytest.raises(GateError, match="no setting 'experts=5'; it has experts=6, experts=2"):
        differences(RUN, "experts=5")


def test_settings_near_the_noise_floor_are_marked() -> None:
    floor = SettingCounts("experts=8,again", 8, None, SIX)
    like_it = SettingCounts("experts=7", 7, None, SIX)
    far = SettingCounts("experts=1", 1, None, tuple(replace(c, n_agree=k) for c, k in zip(SIX, (1, 2, 1), strict=True)))
    report = make_report(replace(RUN, settings=(like_it, floor, far)))
    marked = [any("noise floor" in w for w in row.warnings) for row in report.rows]
    assert marked == [True, False, False]
    assert "(experts=8,again): the difference in agreement is +0.00 points" in report.rows[0].warnings[0]


def test_find_setting() -> None:
    assert find_setting(RUN, "experts=2") is RUN.settings[1]
    with pytest.raises(GateError, match="it has none"):
        find_setting(replace(RUN, settings=()), "experts=2")


def test_counts_by_cluster() -> None:
    one, two, four = (Counts(n=k, nll_base=k / 2) for k in (1, 2, 4))
    assert by_cluster([one, two, four], [1, 0, 1], 3) == (two, Counts(n=5, nll_base=2.5), Counts())
    with pytest.raises(ValueError, match="shorter"):
        by_cluster([one, two], [0], 1)


SUMS = st.floats(-1e6, 1e6)
COUNTS = st.builds(Counts, n=st.integers(0, 999), n_agree=st.integers(0, 999), nll_base=SUMS, nll_test=SUMS, dp=SUMS)
NAMES = st.text(max_size=8)


@st.composite
def any_run(draw: st.DrawFn) -> RunCounts:
    clusters = tuple(draw(st.lists(NAMES, max_size=3)))
    counts = st.tuples(*[COUNTS] * len(clusters))
    whole = st.none() | st.integers(1, 64)
    settings = st.builds(SettingCounts, NAMES, whole, whole, counts, st.lists(NAMES, max_size=2).map(tuple))
    return RunCounts(
        title=draw(NAMES),
        facts=draw(st.dictionaries(NAMES, NAMES, max_size=2)),
        clusters=clusters,
        settings=tuple(draw(st.lists(settings, max_size=2))),
        notes=tuple(draw(st.lists(NAMES, max_size=2))),
        seed=draw(st.integers(0, 2**63)),
    )


@given(any_run())
def test_counts_come_back_from_json(run: RunCounts) -> None:
    assert counts_from_json(json.loads(json.dumps(counts_to_json(run))), "report.json") == run


def test_a_report_of_another_kind() -> None:
    for data in ({}, {"format": "agreement-report"}, {**counts_to_json(RUN), "format_version": 99}):
        with pytest.raises(StoreError, match=r"x\.json is not a report.json of this version"):
            counts_from_json(data, "x.json")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("clusters",), "a.py"),
        (("clusters",), ["a.py"]),  # three counts, one cluster
        (("settings",), None),
        (("settings", 0), 7),
        (("settings", 0, "counts", "n"), [10, 20]),
        (("settings", 0, "counts", "n"), [10, 20, "10"]),
        (("settings", 0, "counts", "n"), [10, 20, 1.5]),
        (("settings", 0, "counts", "n"), [10, 20, True]),
        (("settings", 0, "counts", "n"), [10, 20, -1]),
        (("settings", 0, "counts", "nll_test"), [1.0, 2.0, math.nan]),
        (("settings", 0, "counts", "nll_test"), [1.0, 2.0, None]),
        (("settings", 0, "warnings"), 5),
        (("facts",), []),
        (("notes",), "a note"),
        (("seed",), "x"),
        (("seed",), None),
        (("seed",), -1),
        (("settings", 0, "experts"), "seven"),
        (("baseline_expert_bytes",), "1 GB"),
    ],
)
def test_a_damaged_report_is_refused(path: tuple[Any, ...], value: Any) -> None:
    data = json.loads(json.dumps(counts_to_json(RUN)))
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(StoreError, match=r"x\.json is damaged"):
        counts_from_json(data, "x.json")


@given(st.data())
def test_a_report_that_lacks_any_one_thing_is_refused(data: st.DataObject) -> None:
    report = json.loads(json.dumps(counts_to_json(RUN)))
    where = data.draw(st.sampled_from([report, report["settings"][0], report["settings"][0]["counts"]]))
    del where[data.draw(st.sampled_from(sorted(where)))]
    with pytest.raises(AgreementError):
        counts_from_json(report, "x.json")

"""Requirements as people write them, and the three answers at, just above and just below every bound."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agreement import gate
from agreement.errors import GateError
from agreement.records import Estimate, Judgement, Metric, Report, Requirement, Row, Verdict
from agreement.report import as_dict

PASS, FAIL, INCONCLUSIVE = Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE
METRICS: tuple[Metric, ...] = ("agreement", "ppl_ratio", "ppl_delta", "kld")

# A bound inside each metric's range, one for each sign where it can have both.
BOUNDS: list[tuple[Metric, float]] = [
    ("agreement", 0.9),
    ("ppl_ratio", 1.02),
    ("ppl_delta", 0.15),
    ("ppl_delta", -0.15),
    ("kld", 0.01),
]


def estimate(
    value: float, low: float | None, high: float | None, *, k: int = 24, confidence: float = 0.95, note: str = ""
) -> Estimate:
    return Estimate(value, low, high, confidence, "studentised bootstrap", k, 100 * k, note=note)


def row(setting: str = "experts=7", **metrics: Estimate) -> Row:
    usual = {
        "agreement": estimate(0.92, 0.88, 0.95),
        "ppl_ratio": estimate(1.02, 1.01, 1.03),
        "ppl_delta": estimate(0.2, 0.1, 0.3),
        "kld": estimate(0.012, 0.01, 0.014),
    }
    return Row(
        setting=setting,
        experts=7,
        n_positions=2400,
        n_clusters=24,
        ppl=12.5,
        run_length=12.5,
        expert_bytes=None,
        **(usual | metrics),
    )


def report(*rows: Row, title: str = "run") -> Report:
    return Report(title, {}, 12.3, 0.4, rows or (row(),))


def above(x: float) -> float:
    return float(np.nextafter(x, math.inf))


def below(x: float) -> float:
    return float(np.nextafter(x, -math.inf))


def verdict(metric: Metric, op: str, bound: float, found: Estimate) -> Verdict:
    requirement = Requirement("experts=7", metric, ">=" if op == ">=" else "<=", bound)
    judged = gate.judge(report(row(**{metric: found})), requirement)
    assert judged.requirement is requirement
    assert judged.estimate is found
    return judged.verdict


# Verdicts


@pytest.mark.parametrize(("metric", "b"), BOUNDS)
@pytest.mark.parametrize(
    ("op", "ends", "expected"),
    [
        # the low end at, just above and just below the bound
        (">=", (0, +1), PASS),
        (">=", (+1, +2), PASS),
        (">=", (-1, +1), INCONCLUSIVE),
        ("<=", (0, +1), INCONCLUSIVE),
        ("<=", (+1, +2), FAIL),
        ("<=", (-1, +1), INCONCLUSIVE),
        # the high end
        (">=", (-2, 0), INCONCLUSIVE),
        (">=", (-2, +1), INCONCLUSIVE),
        (">=", (-2, -1), FAIL),
        ("<=", (-2, 0), PASS),
        ("<=", (-2, +1), INCONCLUSIVE),
        ("<=", (-2, -1), PASS),
        # an interval of one point, on the bound
        (">=", (0, 0), PASS),
        ("<=", (0, 0), PASS),
    ],
)
def test_verdicts_turn_on_one_unit_of_the_last_place(
    metric: Metric, b: float, op: str, ends: tuple[int, int], expected: Verdict
) -> None:
    steps = {-2: below(below(b)), -1: below(b), 0: b, 1: above(b), 2: above(above(b))}
    low, high = steps[ends[0]], steps[ends[1]]
    for value in (low, high):
        assert verdict(metric, op, b, estimate(value, low, high)) is expected


@pytest.mark.parametrize(
    ("found", "text", "expected"),
    [
        # 99.996 % never passes 100 %, whatever a table would round it to
        (estimate(0.99996, 0.99996, 0.99996), "agreement>=100%", FAIL),
        (estimate(0.99996, 0.9999, 1.0), "agreement>=100%", INCONCLUSIVE),
        (estimate(0.99996, 0.9999, below(1.0)), "agreement>=100%", FAIL),
        # all positions agree: one-sided, and no proof of 100 %
        (estimate(1.0, 0.88, 1.0), "agreement>=100%", INCONCLUSIVE),
        (estimate(1.0, 0.88, 1.0), "agreement>=88%", PASS),
        (estimate(1.0, 0.88, 1.0), "agreement>=88.1%", INCONCLUSIVE),
        (estimate(1.0, 0.88, 1.0), "agreement<=87.9%", FAIL),
        (estimate(1.0, 0.88, 1.0), "agreement<=100%", PASS),
        # no position agrees
        (estimate(0.0, 0.0, 0.12), "agreement>=12%", INCONCLUSIVE),
        (estimate(0.0, 0.0, 0.12), "agreement>=12.1%", FAIL),
        # one end only
        (estimate(0.95, 0.91, None), "agreement>=90%", PASS),
        (estimate(0.95, 0.91, None), "agreement<=90%", FAIL),
        (estimate(0.95, None, 0.97), "agreement>=90%", INCONCLUSIVE),
        (estimate(0.95, None, 0.97), "agreement<=97%", PASS),
        # no interval at all: the value alone decides nothing
        (estimate(0.99, None, None, k=1), "agreement>=10%", INCONCLUSIVE),
        (estimate(0.01, None, None, k=1), "agreement>=10%", INCONCLUSIVE),
    ],
)
def test_edges_of_agreement(found: Estimate, text: str, expected: Verdict) -> None:
    judged = gate.judge(report(row(agreement=found)), gate.parse_requirement(f"experts=7 {text}"))
    assert judged.verdict is expected
    if expected is not INCONCLUSIVE:
        assert judged.clusters_needed is None


@given(
    st.sampled_from(METRICS),
    st.sampled_from([">=", "<="]),
    st.lists(st.floats(0.001, 0.999), min_size=3, max_size=3).map(sorted),
    st.floats(0.001, 0.999),
)
def test_a_verdict_is_the_place_of_the_bound(metric: Metric, op: str, ends: list[float], bound: float) -> None:
    low, value, high = ends
    found = verdict(metric, op, bound, estimate(value, low, high))
    if low < bound < high:
        assert found is INCONCLUSIVE
    if found is PASS:
        assert bound <= low if op == ">=" else bound >= high
    if found is FAIL:
        assert bound > high if op == ">=" else bound < low
    # Mirrored in the bound, direction and answer stay the same.
    mirrored = verdict("ppl_delta", "<=" if op == ">=" else ">=", -bound, estimate(-value, -high, -low))
    assert mirrored is found


def test_reasons_say_which_side() -> None:
    def reason(text: str) -> str:
        return gate.judge(report(), gate.parse_requirement(f"experts=7 {text}")).reason

    assert reason("agreement>=80%") == "the whole interval is at or above the bound"
    assert reason("agreement>=96%") == "the whole interval is below the bound"
    assert reason("agreement<=96%") == "the whole interval is at or below the bound"
    assert reason("agreement<=80%") == "the whole interval is above the bound"


def test_one_cluster_is_inconclusive_and_says_why() -> None:
    found = estimate(0.99, None, None, k=1, note="one cluster: no interval")
    judged = gate.judge(report(row(agreement=found)), gate.parse_requirement("experts=7 agreement>=10%"))
    assert judged.verdict is INCONCLUSIVE
    assert judged.clusters_needed is None
    assert judged.reason == "one cluster: no interval; give more text"


# Clusters needed


@pytest.mark.parametrize(
    ("text", "k", "expected"),
    [
        # value 0.92, low 0.88: side 0.04, gap 0.02, so 10 * (0.04 / 0.02)**2 = 40 to pass
        ("agreement>=90%", 10, 40),
        ("agreement>=90%", 25, 100),
        # side 0.04, gap 0.03: 10 * 16 / 9 = 17.8
        ("agreement>=89%", 10, 18),
        # the low end must come above the bound to fail `<=`, and at 40 it is on it
        ("agreement<=90%", 10, 41),
        # high 0.95: side 0.03, gap 0.01: 10 * 9 = 90, on the bound, passes `<=` and does not fail `>=`
        ("agreement<=93%", 10, 90),
        ("agreement>=93%", 10, 91),
        # just inside: 10 * (0.04 / 0.039)**2 = 10.5, so one more than now
        ("agreement>=88.1%", 10, 11),
        # on the end itself: `<=` needs the end to move
        ("agreement<=88%", 10, 11),
        # the estimate is the bound
        ("agreement>=92%", 10, None),
        ("agreement<=92%", 10, None),
    ],
)
def test_clusters_needed(text: str, k: int, expected: int | None) -> None:
    found = estimate(0.92, 0.88, 0.95, k=k)
    judged = gate.judge(report(row(agreement=found)), gate.parse_requirement(f"experts=7 {text}"))
    assert judged.verdict is INCONCLUSIVE
    assert judged.clusters_needed == expected
    if expected is None:
        assert judged.reason == "the estimate is the bound itself; no number of clusters would settle it"
    else:
        assert f"{expected:,} clusters in all, now {k}" in judged.reason


def test_clusters_needed_without_an_end_on_that_side() -> None:
    found = estimate(0.95, None, 0.97)
    judged = gate.judge(report(row(agreement=found)), gate.parse_requirement("experts=7 agreement>=90%"))
    assert judged.clusters_needed is None
    assert judged.reason == "the interval has no end on the side of the bound; give more text"


@given(
    st.sampled_from([">=", "<="]),
    st.lists(st.integers(1, 999), min_size=4, max_size=4, unique=True).map(sorted),
    st.booleans(),
    st.integers(2, 500),
)
def test_that_many_clusters_settle_it_and_one_fewer_does_not(
    op: str, points: list[int], value_first: bool, k: int
) -> None:
    low, first, second, high = (point / 1000 for point in points)
    value, bound = (first, second) if value_first else (second, first)
    requirement = Requirement("experts=7", "ppl_delta", ">=" if op == ">=" else "<=", bound)
    needed = gate.judge(report(row(ppl_delta=estimate(value, low, high, k=k))), requirement).clusters_needed
    assert needed is not None
    assert needed > k

    def settled(clusters: int, slack: float) -> bool:
        shrink = math.sqrt(k / clusters)
        side, gap = (value - low, value - bound) if value > bound else (high - value, bound - value)
        return side * shrink <= gap * (1 + slack)

    assert settled(needed, 1e-9)
    assert needed == k + 1 or not settled(needed - 1, -1e-9)


# Overall


def judged_as(answer: Verdict) -> Judgement:
    return Judgement(Requirement("experts=7", "kld", "<=", 1.0), estimate(0.5, 0.4, 0.6), answer, None, "")


@pytest.mark.parametrize(
    ("answers", "expected", "code"),
    [
        ([PASS], PASS, 0),
        ([PASS, PASS], PASS, 0),
        ([PASS, INCONCLUSIVE], INCONCLUSIVE, 4),
        ([INCONCLUSIVE, FAIL, PASS], FAIL, 3),
        ([FAIL, INCONCLUSIVE], FAIL, 3),
        ([FAIL], FAIL, 3),
    ],
)
def test_overall(answers: list[Verdict], expected: Verdict, code: int) -> None:
    assert gate.overall([judged_as(answer) for answer in answers]) is expected
    assert gate.exit_code(expected) == code


def test_nothing_to_judge_is_an_error() -> None:
    with pytest.raises(GateError, match="no requirement to judge"):
        gate.overall([])


# Requirements in one line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("experts=7 agreement>=90%", Requirement("experts=7", "agreement", ">=", 0.9)),
        ("  experts=7   agreement >= 0.9 ", Requirement("experts=7", "agreement", ">=", 0.9)),
        ("experts=7 agreement>=92.4%", Requirement("experts=7", "agreement", ">=", 0.924)),
        ("experts=7 agreement>=1", Requirement("experts=7", "agreement", ">=", 1.0)),
        ("experts=7 agreement<=100%", Requirement("experts=7", "agreement", "<=", 1.0)),
        ("experts=7 agreement>=90% @95%", Requirement("experts=7", "agreement", ">=", 0.9, 0.95)),
        ("experts=7 agreement>=90%@0.99", Requirement("experts=7", "agreement", ">=", 0.9, 0.99)),
        ("experts=7 ppl_ratio<=1.02", Requirement("experts=7", "ppl_ratio", "<=", 1.02)),
        ("experts=7 ppl_delta>=-1e-3", Requirement("experts=7", "ppl_delta", ">=", -0.001)),
        ("experts=7 kld<=0", Requirement("experts=7", "kld", "<=", 0.0)),
        ("experts=8, again agreement>=99%", Requirement("experts=8, again", "agreement", ">=", 0.99)),
        ("kv:a.kld>=2=str:x y kld<=0.5", Requirement("kv:a.kld>=2=str:x y", "kld", "<=", 0.5)),
    ],
)
def test_parse_requirement(text: str, expected: Requirement) -> None:
    assert gate.parse_requirement(text) == expected


def test_a_given_confidence_holds_where_the_text_has_none() -> None:
    assert gate.parse_requirement("experts=7 kld<=1", confidence=0.9).confidence == 0.9
    assert gate.parse_requirement("experts=7 kld<=1 @99%", confidence=0.9).confidence == 0.99


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read; write it like"),
        ("experts=7", "cannot be read; write it like"),
        ("agreement>=90%", "cannot be read; write it like"),
        ("experts=7 agreement", "cannot be read; write it like"),
        ("experts=7 agreement>=", "cannot be read; write it like"),
        ("experts=7 agreement>=90% 5", "cannot be read; write it like"),
        ("experts=7 agreement>90%", "'>' is neither >= nor <="),
        ("experts=7 agreement=90%", "'=' is neither >= nor <="),
        ("experts=7 agreement=>90%", "'=>' is neither >= nor <="),
        ("experts=7 accuracy>=90%", "unknown metric 'accuracy'; there are agreement, ppl_ratio, ppl_delta, kld"),
        ("experts=7 agreement>=150%", "between 0 and 1, or 0% and 100%, not 150%"),
        ("experts=7 agreement>=90", "not 90; for 90 percent write 90%"),
        ("experts=7 agreement>=-1%", "not -1%"),
        ("experts=7 agreement>=many", "expected a percentage or a fraction, found 'many'"),
        ("experts=7 agreement>=nan", "expected a percentage or a fraction, found 'nan'"),
        ("experts=7 kld<=snan", "kld takes a plain number, found 'snan'"),
        ("experts=7 kld<=inf", "kld takes a plain number, found 'inf'"),
        ("experts=7 kld<=1e999999", "kld takes a plain number, found '1e999999'"),
        ("experts=7 agreement<=1e9999999999999999999%", "expected a percentage or a fraction"),
        ("experts=7 ppl_ratio<=102%", "ppl_ratio takes a plain number, found '102%'"),
        ("experts=7 ppl_ratio<=0", "a ratio of perplexities is above 0, not 0"),
        ("experts=7 kld<=-0.1", "a KL divergence is never below 0, so not -0.1"),
        ("experts=7 kld<=1 @100%", "a confidence of 1.0 is not between 0 and 1"),
        ("experts=7 kld<=1 @95", "a confidence of 95.0 is not between 0 and 1"),
        ("experts=7 kld<=1 @x", "expected a percentage or a fraction, found 'x'"),
    ],
)
def test_a_malformed_requirement_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(GateError, match=re.escape(message)) as error:
        gate.parse_requirement(text)
    assert "\n" not in str(error.value)
    assert repr(text) in str(error.value)


SETTINGS = st.sampled_from(["experts=7", "experts=8, again", "kv:a.b=float:1.5", "experts=4+model=q4 k"])


@given(
    SETTINGS,
    st.one_of(
        st.tuples(st.just("agreement"), st.floats(0, 1)),
        st.tuples(st.just("ppl_ratio"), st.floats(0, 1e300, exclude_min=True)),
        st.tuples(st.just("ppl_delta"), st.floats(-1e300, 1e300)),
        st.tuples(st.just("kld"), st.floats(0, 1e300)),
    ),
    st.sampled_from([">=", "<="]),
    st.none() | st.floats(0, 1, exclude_min=True, exclude_max=True),
)
def test_a_requirement_reads_back_from_its_text(
    setting: str, bound: tuple[Metric, float], op: Any, confidence: float | None
) -> None:
    requirement = Requirement(setting, bound[0], op, bound[1], confidence)
    assert gate.parse_requirement(str(requirement)) == requirement


@given(st.text(max_size=40) | st.from_regex(r"experts=7 \w{1,9}[<>=]{1,2}[\d.e%-]{1,6}", fullmatch=True))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        requirement = gate.parse_requirement(text)
    except GateError:
        return
    assert math.isfinite(requirement.bound)
    assert requirement.metric in METRICS


# Requirements in a file


def written(folder: Path, text: str) -> Path:
    path = folder / "agreement.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_read_requirements_of_both_forms(tmp_path: Path) -> None:
    tables = """
        [other]
        left = "alone"
        [[gate.require]]
        setting = "experts=7"
        metric = "agreement"
        at_least = 0.90
        [[gate.require]]
        setting = "experts=6"
        metric = "ppl_ratio"
        at_most = 1.05
        confidence = "99%"
    """
    assert gate.read_requirements(written(tmp_path, tables)) == (
        Requirement("experts=7", "agreement", ">=", 0.9),
        Requirement("experts=6", "ppl_ratio", "<=", 1.05, 0.99),
    )
    lines = """
        [gate]
        confidence = 0.95
        require = [
            "experts=7 agreement>=90%",
            "experts=6 kld<=0.1 @90%",
            {setting = "experts=4", metric = "agreement", at_least = "70%"},
            {setting = "experts=2", metric = "kld", at_most = 1},
        ]
    """
    assert gate.read_requirements(written(tmp_path, lines), confidence=0.8) == (
        Requirement("experts=7", "agreement", ">=", 0.9, 0.95),
        Requirement("experts=6", "kld", "<=", 0.1, 0.9),
        Requirement("experts=4", "agreement", ">=", 0.7, 0.95),
        Requirement("experts=2", "kld", "<=", 1.0, 0.95),
    )


def test_the_examples_of_the_documentation_are_read(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "docs" / "gate.md").read_text(encoding="utf-8")
    lines = re.findall(r"^```\n(experts=.*?)```", text, re.DOTALL | re.MULTILINE)
    assert [str(gate.parse_requirement(line)) for line in lines[0].splitlines()] == lines[0].splitlines()
    files = [
        gate.read_requirements(written(tmp_path, toml)) for toml in re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    ]
    assert [len(requirements) for requirements in files] == [2, 1]


ENTRY = '[[gate.require]]\nsetting = "experts=7"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[gate", "not TOML"),
        ("", "no requirement; add require"),
        ("[gate]\nrequire = []", "no requirement; add require"),
        ('[gate]\nrequire = "experts=7 kld<=1"', "no requirement; add require"),
        ("gate = 3", "`gate` must be a table"),
        ('[gate]\nrequires = ["experts=7 kld<=1"]', "unknown key gate.requires"),
        ('[gate]\nconfidence = "x"\nrequire = ["experts=7 kld<=1"]', "gate.confidence: expected a percentage"),
        ("[gate]\nrequire = [3]", "requirement 1: expected a text or a table, found 3"),
        ('[gate]\nrequire = ["experts=7 kld<=1", "no"]', "requirement 'no' cannot be read"),
        (ENTRY + "at_least = 0.9", "requirement 1: 'metric' must be a text"),
        ('[[gate.require]]\nmetric = "kld"\nsetting = 7\nat_most = 1', "'setting' must be a text, such as setting ="),
        (ENTRY + 'metric = "kld"', "give one of at_least and at_most, found 0"),
        (ENTRY + 'metric = "kld"\nat_least = 0\nat_most = 1', "give one of at_least and at_most, found 2"),
        (ENTRY + 'metric = "kld"\natmost = 1', "unknown key 'atmost'"),
        (ENTRY + 'metric = "kl"\nat_most = 1', "unknown metric 'kl'"),
        (ENTRY + 'metric = "kld"\nat_most = true', "kld takes a plain number, found True"),
        (ENTRY + 'metric = "kld"\nat_most = nan', "kld takes a plain number, found nan"),
        (ENTRY + 'metric = "kld"\nat_most = [1]', "kld takes a plain number, found [1]"),
        (ENTRY + 'metric = "agreement"\nat_least = 90', "for 90 percent write 90%"),
        (ENTRY + 'metric = "kld"\nat_most = 1\nconfidence = 95', "a confidence of 95.0 is not between 0 and 1"),
    ],
)
def test_a_malformed_file_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(GateError, match=re.escape(message)) as error:
        gate.read_requirements(written(tmp_path, text))
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(GateError, match="cannot be read"):
        gate.read_requirements(tmp_path / "none.toml")
    (tmp_path / "agreement.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(GateError, match="not TOML"):
        gate.read_requirements(tmp_path / "agreement.toml")


# What the run does not have


def test_an_unknown_setting_names_those_that_are_there() -> None:
    two = report(row("experts=7"), row("experts=6"))
    with pytest.raises(GateError, match="no setting 'experts=5'; it has experts=7, experts=6"):
        gate.judge(two, gate.parse_requirement("experts=5 kld<=1"))
    with pytest.raises(GateError, match="no setting 'experts=5'; it has none"):
        gate.judge(replace(two, rows=()), gate.parse_requirement("experts=5 kld<=1"))


def test_a_confidence_above_the_interval_s_is_refused() -> None:
    with pytest.raises(GateError, match=r"has confidence 0\.95, below 0\.99; make the table again"):
        gate.judge(report(), gate.parse_requirement("experts=7 kld<=1 @99%"))
    # A wider interval than asked for still holds what it says.
    assert gate.judge(report(), gate.parse_requirement("experts=7 kld<=1 @90%")).verdict is PASS
    assert gate.judge(report(), gate.parse_requirement("experts=7 kld<=1 @95%")).verdict is PASS


@pytest.mark.parametrize("ends", [(math.nan, 0.1, 0.2), (math.inf, 0.1, math.inf), (0.1, math.nan, 0.2)])
def test_what_is_no_number_is_not_judged(ends: tuple[float, float, float]) -> None:
    with pytest.raises(GateError, match="is not a number; score the pass again"):
        gate.judge(report(row(kld=estimate(*ends))), gate.parse_requirement("experts=7 kld<=1"))


# Against an earlier report


def compare(metric: Metric, now: Estimate, then: Estimate, margin: float) -> Judgement:
    earlier = as_dict(report(row(**{metric: then}), title="last week"))
    (judged,) = gate.not_worse(report(row(**{metric: now})), earlier, metric, margin)
    return judged


def test_the_change_has_an_interval_of_both_runs() -> None:
    # Down from -0.01 by the root of (0.91 - 0.88)**2 + (0.96 - 0.92)**2, which is 0.05;
    # up from it by the root of (0.97 - 0.91)**2 + (0.92 - 0.84)**2, which is 0.10.
    judged = compare("agreement", estimate(0.91, 0.88, 0.97), estimate(0.92, 0.84, 0.96), 0.06)
    assert judged.estimate.value == -0.01
    assert judged.estimate.low == pytest.approx(-0.06, abs=1e-15)
    assert judged.estimate.high == pytest.approx(0.09, abs=1e-15)
    assert judged.estimate.n_clusters == 24
    assert str(judged.requirement) == "experts=7 agreement change>=-6% against last week"


@pytest.mark.parametrize(
    ("metric", "now", "then", "margin", "expected"),
    [
        # change -0.01, interval [-0.06, 0.09] as above
        ("agreement", estimate(0.91, 0.88, 0.97), estimate(0.92, 0.84, 0.96), 0.0601, PASS),
        ("agreement", estimate(0.91, 0.88, 0.97), estimate(0.92, 0.84, 0.96), 0.0599, INCONCLUSIVE),
        # change -0.2, sides sqrt(0.03**2 + 0.04**2) = 0.05: [-0.25, -0.15]
        ("agreement", estimate(0.7, 0.67, 0.73), estimate(0.9, 0.86, 0.94), 0.1499, FAIL),
        ("agreement", estimate(0.7, 0.67, 0.73), estimate(0.9, 0.86, 0.94), 0.1501, INCONCLUSIVE),
        ("agreement", estimate(0.7, 0.67, 0.73), estimate(0.9, 0.86, 0.94), 0.2501, PASS),
        # more agreement is never worse
        ("agreement", estimate(0.9, 0.87, 0.93), estimate(0.7, 0.66, 0.74), 0.0, PASS),
        # less is better for the others: change +0.2, [0.15, 0.25]
        ("kld", estimate(0.9, 0.87, 0.93), estimate(0.7, 0.66, 0.74), 0.1499, FAIL),
        ("kld", estimate(0.9, 0.87, 0.93), estimate(0.7, 0.66, 0.74), 0.1501, INCONCLUSIVE),
        ("ppl_ratio", estimate(1.9, 1.87, 1.93), estimate(1.7, 1.66, 1.74), 0.2501, PASS),
        ("ppl_delta", estimate(0.7, 0.67, 0.73), estimate(0.9, 0.86, 0.94), 0.0, PASS),
    ],
)
def test_not_worse(metric: Metric, now: Estimate, then: Estimate, margin: float, expected: Verdict) -> None:
    assert compare(metric, now, then, margin).verdict is expected


def test_clusters_needed_leave_the_earlier_run_as_it_is() -> None:
    # change 0; own side 0.04, earlier 0.03, margin 0.045: k * 0.04**2 / (0.045**2 - 0.03**2) = 24 * 1.4222 = 34.1
    judged = compare("agreement", estimate(0.9, 0.86, 0.94), estimate(0.9, 0.87, 0.93), 0.045)
    assert judged.verdict is INCONCLUSIVE
    assert judged.clusters_needed == 35
    # By hand the low end, -0.01 - sqrt(0.03**2 + 0.04**2), is the bound; in float64 it is one unit below, and the
    # 24 clusters that the formula then gives are no more than there are.
    judged = compare("agreement", estimate(0.5, 0.47, 0.51), estimate(0.51, 0.5, 0.55), 0.06)
    assert judged.clusters_needed == 25
    # The earlier side alone is wider than the margin: nothing now helps.
    judged = compare("agreement", estimate(0.9, 0.86, 0.94), estimate(0.9, 0.87, 0.93), 0.03)
    assert judged.clusters_needed is None
    assert judged.reason.startswith("the interval holds the bound; the earlier report alone is too unsure")


def test_no_interval_in_either_run_is_inconclusive() -> None:
    full, bare = estimate(0.9, 0.86, 0.94), estimate(0.9, None, None, k=1, note="one cluster: no interval")
    judged = compare("agreement", bare, full, 0.5)
    assert (judged.verdict, judged.clusters_needed) == (INCONCLUSIVE, None)
    assert judged.reason == "one cluster: no interval; give more text"
    judged = compare("agreement", full, bare, 0.5)
    assert judged.reason == "earlier report: one cluster: no interval; give more text"


def test_every_setting_of_the_earlier_report_is_compared() -> None:
    both = report(row("experts=7"), row("experts=6"))
    judged = gate.not_worse(both, as_dict(both), "agreement", 0.1)
    assert [j.requirement.setting for j in judged] == ["experts=7", "experts=6"]
    assert [j.estimate.value for j in judged] == [0.0, 0.0]
    (only,) = gate.not_worse(report(row("experts=6")), as_dict(both), "agreement", 0.1, settings=["experts=6"])
    assert only.requirement.setting == "experts=6"
    with pytest.raises(GateError, match="the run has no setting 'experts=7'; it has experts=6"):
        gate.not_worse(report(row("experts=6")), as_dict(both), "agreement", 0.1)
    with pytest.raises(GateError, match="run has no setting 'experts=5'; it has experts=7, experts=6"):
        gate.not_worse(both, as_dict(both), "agreement", 0.1, settings=["experts=5"])
    with pytest.raises(GateError, match="no setting to compare"):
        gate.not_worse(both, as_dict(replace(both, rows=())), "agreement", 0.1)


def test_unequal_confidence_is_refused() -> None:
    with pytest.raises(GateError, match=r"confidence 0\.95 now and 0\.9 in last week; make both tables with the same"):
        compare("kld", estimate(0.1, 0.05, 0.2), estimate(0.1, 0.05, 0.2, confidence=0.9), 0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": None}, "no list of rows with settings"),
        ({"rows": [3]}, "no list of rows with settings"),
        ({"rows": [{"setting": 7}]}, "no list of rows with settings"),
        ({"rows": [{"setting": "experts=7"}]}, "run: experts=7 kld: there is no such estimate"),
        ({"rows": [{"setting": "experts=7", "kld": {}}]}, "value None, confidence None"),
        ({"rows": [{"setting": "experts=7", "kld": {"value": "1"}}]}, "value is '1', not a number"),
        (
            {"rows": [{"setting": "experts=7", "kld": {"value": 1, "confidence": 0.95, "low": True}}]},
            "low is True, not a number",
        ),
        (
            {"rows": [{"setting": "experts=7", "kld": {"value": 1, "confidence": 0.95, "low": math.nan}}]},
            "is not a number",
        ),
    ],
)
def test_a_malformed_earlier_report_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(GateError, match=re.escape(message)):
        gate.not_worse(report(), as_dict(report()) | change, "kld", 0.1)


def test_margins_out_of_range_are_refused() -> None:
    for margin in (-0.1, math.nan, math.inf):
        with pytest.raises(GateError, match="must be 0 or more"):
            gate.not_worse(report(), as_dict(report()), "kld", margin)
    with pytest.raises(GateError, match="for agreement at most 1"):
        gate.not_worse(report(), as_dict(report()), "agreement", 1.5)


def test_parse_margin() -> None:
    assert gate.parse_margin("agreement 1%") == ("agreement", 0.01)
    assert gate.parse_margin("agreement=1%") == ("agreement", 0.01)
    assert gate.parse_margin(" agreement = 0.01 ") == ("agreement", 0.01)
    assert gate.parse_margin("kld=0.002") == ("kld", 0.002)
    for text, message in (
        ("agreement", "cannot be read; write it like"),
        ("agreement 1% 2%", "cannot be read; write it like"),
        ("", "cannot be read; write it like"),
        ("accuracy=1%", "unknown metric 'accuracy'"),
        ("kld=1%", "kld takes a plain number, found '1%'"),
        ("kld=-1", "must be 0 or more"),
        ("agreement=150%", "for agreement at most 1"),
    ):
        with pytest.raises(GateError, match=re.escape(message)):
            gate.parse_margin(text)


@given(
    st.lists(st.floats(0.01, 0.99), min_size=3, max_size=3).map(sorted),
    st.lists(st.floats(0.01, 0.99), min_size=3, max_size=3).map(sorted),
)
def test_a_change_is_never_surer_than_either_run(now: list[float], then: list[float]) -> None:
    assume(now[0] < now[2])
    found = compare("agreement", estimate(now[1], now[0], now[2]), estimate(then[1], then[0], then[2]), 0.1).estimate
    assert found.low is not None
    assert found.high is not None
    assert found.low <= found.value <= found.high
    # Each side is at least as long as that of either run, so the whole is too.
    assert found.high - found.low >= max(now[2] - now[0], then[2] - then[0]) * (1 - 1e-9)

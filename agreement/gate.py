"""Requirements and reports flow in, verdicts flow out; pure. What a requirement looks like is in `requirements`.

Every comparison is of the numbers themselves, never of what a table shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from agreement.errors import GateError
from agreement.records import Estimate, Judgement, Metric, Report, Requirement, Row, Verdict
from agreement.requirements import (
    EXAMPLE,
    METRICS,
    check_margin,
    parse_margin,
    parse_requirement,
    read_requirements,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "EXIT_CODES",
    "METRICS",
    "Judgement",
    "Requirement",
    "exit_code",
    "judge",
    "not_worse",
    "overall",
    "parse_margin",
    "parse_requirement",
    "read_requirements",
]

EXIT_CODES = {Verdict.PASS: 0, Verdict.FAIL: 3, Verdict.INCONCLUSIVE: 4}

# Whether more is better, so which way a change is for the worse.
_MORE_IS_BETTER: dict[Metric, bool] = {"agreement": True, "ppl_ratio": False, "ppl_delta": False, "kld": False}

DIFFERENCE_METHOD = "difference of independent runs, square-and-add"


def judge(report: Report, requirement: Requirement) -> Judgement:
    """Hold a requirement against a report.

    The whole interval on the good side, the bound included, is a pass; the whole interval on the bad side is a fail;
    an interval that holds the bound, or none at all, is inconclusive.

    Raises:
        GateError: The report has no such setting, its interval has a lower confidence than required, or its number is
            none.
    """
    estimate = _estimate(_row(report, requirement.setting), requirement.metric)
    asked = requirement.confidence
    if asked is not None and estimate.confidence < asked:
        raise GateError(
            f"requirement '{requirement}': the run's interval has confidence {estimate.confidence!r}, below {asked!r}; "
            "make the table again with that confidence"
        )
    _check_numbers(estimate, str(requirement))
    return _judged(requirement, estimate, _Sides.of(estimate))


def _row(report: Report, setting: str) -> Row:
    """Return the row of a setting."""
    for row in report.rows:
        if row.setting == setting:
            return row
    raise GateError(f"the run has no setting {setting!r}; it has {_listed([row.setting for row in report.rows])}")


def _listed(names: Sequence[str]) -> str:
    """Return names for a message."""
    return ", ".join(names) or "none"


def _estimate(row: Row, metric: Metric) -> Estimate:
    """Return the row's estimate of a metric."""
    found: Estimate = getattr(row, metric)
    return found


def _check_numbers(estimate: Estimate, what: str) -> None:
    """Refuse an estimate that holds what is not a number."""
    ends = (estimate.low, estimate.high)
    if not math.isfinite(estimate.value) or any(end is not None and math.isnan(end) for end in ends):
        raise GateError(f"'{what}': the run's value {estimate.value!r} {ends!r} is not a number; score the pass again")


@dataclass(frozen=True)
class _Sides:
    """How far an interval reaches on each side.

    Attributes:
        low: Distance from the value down to the low end as far as more clusters shrink it; None without such an end.
        high: The same up to the high end.
        fixed_low: What more clusters leave as it is; the whole distance is the root of the sum of squares.
        fixed_high: The same of `high`.
    """

    low: Fraction | None
    high: Fraction | None
    fixed_low: Fraction = Fraction(0)
    fixed_high: Fraction = Fraction(0)

    @classmethod
    def of(cls, estimate: Estimate) -> _Sides:
        """Return the sides of an estimate that more clusters shrink as a whole."""
        return cls(_distance(estimate.value, estimate.low), _distance(estimate.value, estimate.high))


def _distance(a: float, b: float | None) -> Fraction | None:
    """Return the distance of two numbers as they are written, or None without a second."""
    return None if b is None or math.isinf(b) else abs(_fraction(a) - _fraction(b))


def _fraction(x: float) -> Fraction:
    """Return the shortest decimal that reads back as `x`: 0.92 - 0.88 is then 0.04 and not a little less or more."""
    return Fraction(repr(float(x)))


def _judged(requirement: Requirement, estimate: Estimate, sides: _Sides) -> Judgement:
    """Return the verdict on an estimate whose numbers were checked."""
    bound, at_least = requirement.bound, requirement.op == ">="
    low = -math.inf if estimate.low is None else estimate.low
    high = math.inf if estimate.high is None else estimate.high
    good, bad = ("at or above", "below") if at_least else ("at or below", "above")
    if low >= bound if at_least else high <= bound:
        return Judgement(requirement, estimate, Verdict.PASS, None, f"the whole interval is {good} the bound")
    if high < bound if at_least else low > bound:
        return Judgement(requirement, estimate, Verdict.FAIL, None, f"the whole interval is {bad} the bound")
    if estimate.low is None and estimate.high is None:
        why = estimate.note or "there is no interval"
        reason = f"{why}; give more text"
        return Judgement(requirement, estimate, Verdict.INCONCLUSIVE, None, reason)
    needed = _clusters_needed(estimate, bound, sides, at_least=at_least)
    if needed is not None:
        reason = (
            f"the interval holds the bound; {needed:,} clusters in all, now {estimate.n_clusters:,}, "
            "would settle it at the present estimate"
        )
    elif estimate.value == bound:
        reason = "the estimate is the bound itself; no number of clusters would settle it"
    elif requirement.against:
        reason = "the interval holds the bound; the earlier report alone is too unsure, make it again from more text"
    else:
        reason = "the interval has no end on the side of the bound; give more text"
    return Judgement(requirement, estimate, Verdict.INCONCLUSIVE, needed, reason)


def _clusters_needed(estimate: Estimate, bound: float, sides: _Sides, *, at_least: bool) -> int | None:
    """Return how many clusters in all bring the interval's end to the bound, if its side shrinks as 1 / sqrt(k).

    With a side `s` that shrinks, one `f` that does not, and a gap `g` from value to bound, the end is at the bound
    where `s**2 * k / k_new + f**2 = g**2`.
    """
    gap = _fraction(estimate.value) - _fraction(bound)
    side, fixed = (sides.low, sides.fixed_low) if gap > 0 else (sides.high, sides.fixed_high)
    room = gap**2 - fixed**2
    if gap == 0 or side is None or room <= 0:
        return None
    exact = estimate.n_clusters * side**2 / room
    # An end on the bound passes, but does not fail: that takes one more.
    passes = (gap > 0) == at_least
    return max(math.ceil(exact) if passes else math.floor(exact) + 1, estimate.n_clusters + 1)


def overall(judgements: Sequence[Judgement]) -> Verdict:
    """Return the verdict of all: one fail fails, else one inconclusive leaves it open.

    Raises:
        GateError: There is no judgement.
    """
    if not judgements:
        raise GateError(f"no requirement to judge; {EXAMPLE}")
    for verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE):
        if any(judgement.verdict is verdict for judgement in judgements):
            return verdict
    return Verdict.PASS


def exit_code(verdict: Verdict) -> int:
    """Return the process's exit code: 0 pass, 3 fail, 4 inconclusive."""
    return EXIT_CODES[verdict]


def not_worse(
    now: Report,
    earlier: Mapping[str, Any],
    metric: Metric,
    margin: float,
    *,
    settings: Sequence[str] | None = None,
    paired: Mapping[str, Estimate] | None = None,
) -> tuple[Judgement, ...]:
    """Hold a report against an earlier one: no setting may have become worse by more than a margin.

    The change of a setting is its value now minus its value then. Its interval treats both runs as independent and
    adds the sides of theirs in squares (Zou and Donner 2008, "Construction of confidence limits about effect
    measures: a general approach", Statistics in Medicine 27): for values `v`, ends `l` and `u`, now 1 and earlier 2,
    from `v1 - v2 - sqrt((v1 - l1)**2 + (u2 - v2)**2)` to `v1 - v2 + sqrt((u1 - v1)**2 + (v2 - l2)**2)`. For runs over
    the same chunks that is wider than it need be: then give the paired changes, see `agreement.analysis.changes`.

    Args:
        now: The report to judge.
        earlier: The earlier report as `report.json` holds it.
        metric: What to compare. More is better for agreement, less for the others.
        margin: Worsening that is allowed, not negative; for agreement as a fraction.
        settings: What to compare; None for every setting of the earlier report.
        paired: Changes estimated cluster by cluster, by setting; where there is one it is used.

    Returns:
        One judgement a setting, its estimate the change.

    Raises:
        GateError: A setting that one of the reports lacks, intervals of unequal confidence, a margin out of range, or
            an earlier report that is malformed.
    """
    if metric not in METRICS:
        raise GateError(f"unknown metric {metric!r}; there are {', '.join(METRICS)}")
    check_margin(metric, margin)
    rows = _earlier_rows(earlier)
    name = str(earlier.get("title") or "the earlier report")
    judgements: list[Judgement] = []
    for setting in rows if settings is None else settings:
        if setting not in rows:
            raise GateError(f"{name} has no setting {setting!r}; it has {_listed(list(rows))}")
        present = _estimate(_row(now, setting), metric)
        _check_numbers(present, f"{setting} {metric}")
        past = _earlier_estimate(rows[setting], metric, f"{name}: {setting} {metric}")
        if present.confidence != past.confidence:
            raise GateError(
                f"{setting} {metric}: confidence {present.confidence!r} now and {past.confidence!r} in {name}; "
                "make both tables with the same"
            )
        better = _MORE_IS_BETTER[metric]
        bound = -margin if better else margin
        requirement = Requirement(setting, metric, ">=" if better else "<=", bound, against=name)
        change = None if paired is None else paired.get(setting)
        sides = _change(present, past) if change is None else (change, _Sides.of(change))
        judgements.append(_judged(requirement, *sides))
    if not judgements:
        raise GateError(f"{name} has no setting to compare with; name a report that has rows")
    return tuple(judgements)


def _change(now: Estimate, then: Estimate) -> tuple[Estimate, _Sides]:
    """Return the change and its interval, with the earlier run's part of each side as what cannot shrink."""
    value = float(_fraction(now.value) - _fraction(then.value))
    own, past = _Sides.of(now), _Sides.of(then)
    complete = None not in (own.low, own.high, past.low, past.high)
    sides = _Sides(own.low, own.high, past.high or Fraction(0), past.low or Fraction(0))
    estimate = Estimate(
        value=value,
        low=value - math.hypot(own.low or 0, sides.fixed_low) if complete else None,
        high=value + math.hypot(own.high or 0, sides.fixed_high) if complete else None,
        confidence=now.confidence,
        method=DIFFERENCE_METHOD,
        n_clusters=now.n_clusters,
        n_positions=now.n_positions,
        note="" if complete else (now.note or then.note or "there is no interval"),
    )
    return estimate, sides


def _earlier_rows(earlier: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the rows of an earlier report by setting."""
    rows = earlier.get("rows")
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and isinstance(row.get("setting"), str) for row in rows
    ):
        raise GateError("the earlier report has no list of rows with settings; name a report.json of `agreement table`")
    return {row["setting"]: row for row in rows}


def _earlier_estimate(row: Mapping[str, Any], metric: Metric, where: str) -> Estimate:
    """Return what a comparison needs of an earlier estimate."""
    data = row.get(metric)
    if not isinstance(data, dict):
        raise GateError(f"{where}: there is no such estimate; make the earlier report again")

    def number(key: str) -> float | None:
        value = data.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise GateError(f"{where}: {key} is {value!r}, not a number; make the earlier report again")
        return None if value is None else float(value)

    value, confidence = number("value"), number("confidence")
    if value is None or confidence is None or not math.isfinite(value):
        raise GateError(f"{where}: value {value!r}, confidence {confidence!r}; make the earlier report again")
    note = f"earlier report: {data.get('note') or 'no interval'}"
    estimate = Estimate(value, number("low"), number("high"), confidence, "", 0, 0, note=note)
    _check_numbers(estimate, where)
    return estimate

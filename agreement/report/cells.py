"""One table for people: a `Report` flows in, cells of text flow out, and every renderer lays out the same cells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from agreement.report import numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agreement.records import Estimate, Metric, Report, Row

NO_INTERVAL = "no interval is given"


@dataclass(frozen=True)
class MetricStyle:
    """How one metric is shown.

    Attributes:
        label: Its name for people.
        unit: What follows the value, with a space before it where there is one.
        shift: Power of ten between the metric's own unit and the one shown.
        least: Fewest digits after the point.
        default: Digits after the point where no interval says how many.
        limits: Values that only they themselves may look like.
    """

    label: str
    unit: str = ""
    shift: int = 0
    least: int = 0
    default: int = 4
    limits: tuple[float, ...] = ()


METRIC_STYLES: dict[Metric, MetricStyle] = {
    "agreement": MetricStyle("agreement", " %", shift=2, least=1, default=2, limits=(0.0, 1.0)),
    "ppl_ratio": MetricStyle("PPL ratio", least=2, limits=(1.0,)),
    "ppl_delta": MetricStyle("PPL delta", least=2, limits=(0.0,)),
    "kld": MetricStyle("KLD", " nats", least=2, limits=(0.0,)),
}

# The metrics that have a column; the PPL delta is in CSV, JSON and the gate.
_SHOWN: tuple[Metric, ...] = ("agreement", "ppl_ratio", "kld")


@dataclass(frozen=True)
class Column:
    """Head of a column.

    Attributes:
        title: Its name.
        align: Where its cells sit.
    """

    title: str
    align: Literal["left", "right"] = "right"


@dataclass(frozen=True)
class Table:
    """What every format for people shows, in order.

    Attributes:
        title: The run's name.
        facts: `(name, value)` pairs of the head.
        columns: Heads of the columns.
        rows: One tuple of cells a setting, as long as `columns`.
        footnotes: `(mark, text)` pairs that cells refer to.
        methods: How the intervals were formed, one line each.
        notes: Warnings of rows and remarks on the run, one line each.
    """

    title: str
    facts: tuple[tuple[str, str], ...]
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    footnotes: tuple[tuple[str, str], ...]
    methods: tuple[str, ...]
    notes: tuple[str, ...]


def table(report: Report) -> Table:
    """Return the cells of the report's table, each number rounded so that it never claims more than it holds."""
    marks: dict[str, str] = {}
    columns: list[Column] = [Column("setting", "left")]
    cells: list[list[str]] = [[one_line(row.setting) for row in report.rows]]

    def add(title: str, column: Sequence[str]) -> None:
        columns.append(Column(title))
        cells.append(list(column))

    estimates = {metric: [estimate_of(row, metric) for row in report.rows] for metric in _SHOWN}
    add("agreement", _intervals("agreement", estimates["agreement"], marks))
    add("tokens to first divergence", [numbers.tokens(row.run_length, row.agreement.low) for row in report.rows])
    add("PPL ratio", _intervals("ppl_ratio", estimates["ppl_ratio"], marks))
    add("KLD, nats", _intervals("kld", estimates["kld"], marks))
    if any(row.expert_bytes is not None for row in report.rows):
        add("expert bytes per token", [expert_bytes(row, report.baseline_expert_bytes) for row in report.rows])
    if any(row.tokens_per_second is not None for row in report.rows):
        add("tokens/s", [_speed(row) for row in report.rows])
    add("positions", [numbers.count(row.n_positions) for row in report.rows])
    add("clusters", [numbers.count(row.n_clusters) for row in report.rows])
    return Table(
        title=one_line(report.title),
        facts=(*((one_line(k), one_line(v)) for k, v in report.facts.items()), ("baseline", _baseline(report))),
        columns=tuple(columns),
        rows=tuple(zip(*cells, strict=True)),
        footnotes=tuple((mark, text) for text, mark in marks.items()),
        methods=_methods(report, estimates),
        notes=(
            *(f"{one_line(row.setting)}: {one_line(warning)}" for row in report.rows for warning in row.warnings),
            *(one_line(note) for note in report.notes),
        ),
    )


def estimate_of(row: Row, metric: Metric) -> Estimate:
    """Return the row's estimate of a metric."""
    found: dict[Metric, Estimate] = {
        "agreement": row.agreement,
        "ppl_ratio": row.ppl_ratio,
        "ppl_delta": row.ppl_delta,
        "kld": row.kld,
    }
    return found[metric]


def shown(metric: Metric, estimate: Estimate, places: int, *, apart: tuple[float, ...] = ()) -> str:
    """Return `value [low, high]`, low rounded down and high rounded up; a missing end is `-`.

    Args:
        metric: Says the unit and the limits.
        estimate: The numbers.
        places: Digits after the point.
        apart: Further values, such as a gate's bound, that no other number may look like.
    """
    style = METRIC_STYLES[metric]

    def number(x: float, rounding: numbers.Rounding) -> str:
        return numbers.fixed(x, places, rounding=rounding, shift=style.shift, limits=(*style.limits, *apart))

    unit = style.unit if metric == "agreement" else ""
    value = number(estimate.value, "nearest") + unit
    if estimate.low is None and estimate.high is None:
        return f"{value} [-]"
    low = "-" if estimate.low is None else number(estimate.low, "down")
    high = "-" if estimate.high is None else number(estimate.high, "up")
    return f"{value} [{low}, {high}]"


def places_for(metric: Metric, estimate: Estimate) -> int:
    """Return the digits after the point for an estimate of one metric."""
    style = METRIC_STYLES[metric]
    ends = (estimate.low, estimate.high)
    width = 0.0 if ends[0] is None or ends[1] is None else (ends[1] - ends[0]) / 2
    return numbers.decimals(width, shift=style.shift, least=style.least, default=style.default)


def expert_bytes(row: Row, baseline: int | None) -> str:
    """Return the expert bytes per token in human units, and as a share of the baseline's if that is known."""
    if row.expert_bytes is None:
        return "-"
    if not baseline:
        return numbers.size(row.expert_bytes)
    share = numbers.fixed(row.expert_bytes / baseline, 0, rounding="up", shift=2, limits=(1.0,))
    return f"{numbers.size(row.expert_bytes)} ({share} %)"


def one_line(text: str) -> str:
    """Return the text with every run of white space, line ends included, as one space."""
    return " ".join(text.split())


def _intervals(metric: Metric, estimates: Sequence[Estimate], marks: dict[str, str]) -> list[str]:
    """Return the cells of a column; notes go into `marks`, text to mark, equal texts under one mark."""
    cells: list[str] = []
    for estimate in estimates:
        note = one_line(estimate.note)
        if not note and (estimate.low is None or estimate.high is None):
            note = NO_INTERVAL
        mark = f" ({marks.setdefault(note, _letters(len(marks)))})" if note else ""
        cells.append(shown(metric, estimate, places_for(metric, estimate)) + mark)
    return cells


def _letters(index: int) -> str:
    """Return a, b, ..., z, aa, ab, ... for 0, 1, ..."""
    head, last = divmod(index, 26)
    return (_letters(head - 1) if head else "") + chr(ord("a") + last)


def _speed(row: Row) -> str:
    """Return the tokens per second, rounded down."""
    return "-" if row.tokens_per_second is None else numbers.significant(row.tokens_per_second, rounding="down")


def _baseline(report: Report) -> str:
    """Return what the baseline itself reaches on the text."""
    ppl = numbers.significant(report.baseline_ppl, 4)
    accuracy = numbers.fixed(report.baseline_accuracy, 1, shift=2, limits=(0.0, 1.0))
    return f"PPL {ppl}, next-token accuracy {accuracy} %"


def _methods(report: Report, estimates: dict[Metric, list[Estimate]]) -> tuple[str, ...]:
    """Return one line a way of forming intervals, then one a setting on what its positions are worth."""
    groups: dict[tuple[str, float, int], dict[str, list[str]]] = {}
    for metric, column in estimates.items():
        for row, estimate in zip(report.rows, column, strict=True):
            if estimate.low is not None or estimate.high is not None:
                key = (estimate.method, estimate.confidence, estimate.n_clusters)
                label = METRIC_STYLES[metric].label
                groups.setdefault(key, {}).setdefault(label, []).append(one_line(row.setting))
    lines = [
        f"{_listed(by_label, len(report.rows))}: {percent(confidence)} interval ({one_line(method)}) "
        f"over {numbers.count(n)} cluster{'' if n == 1 else 's'}"
        for (method, confidence, n), by_label in groups.items()
    ]
    for i, row in enumerate(report.rows):
        worth = [
            f"like {numbers.count(int(e.effective_n))} for {METRIC_STYLES[metric].label} "
            f"(design effect {numbers.significant(e.design_effect, rounding='up')})"
            for metric, column in estimates.items()
            if (e := column[i]).design_effect and e.effective_n is not None
        ]
        if worth:
            head = f"{one_line(row.setting)}: {numbers.count(row.n_positions)} positions count "
            lines.append(head + ", ".join(worth))
    return tuple(lines)


def _listed(by_label: dict[str, list[str]], n_rows: int) -> str:
    """Return the metrics of a group, each with its settings unless it is all of them."""
    parts = [
        label if len(settings) == n_rows else f"{label} of {', '.join(settings)}"
        for label, settings in by_label.items()
    ]
    return "; ".join(parts)


def percent(fraction: float) -> str:
    """Return every digit of a fraction in percent, such as `95 %`."""
    return f"{numbers.exact(fraction, 2).normalize():f} %"

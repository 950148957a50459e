"""A breakdown for people and programs: a `Breakdown` flows in, text, JSON or CSV flows out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from rich.cells import cell_len

from agreement.errors import UsageError
from agreement.records import Estimate
from agreement.report import numbers
from agreement.report.breakdown_values import breakdown_csv, breakdown_json
from agreement.report.cells import NO_INTERVAL, one_line, percent

if TYPE_CHECKING:
    from agreement.breakdown.results import (
        Bin,
        Breakdown,
        DeltaP,
        Flips,
        KldQuantiles,
        Quantile,
        RunLength,
        RunLengths,
    )

BreakdownFormat = Literal["text", "json", "csv"]
BREAKDOWN_FORMATS: tuple[BreakdownFormat, ...] = get_args(BreakdownFormat)

DEFAULT_MOST = 10


def render_breakdown(
    found: Breakdown,
    format: BreakdownFormat = "text",  # noqa: A002 - the option's name
    *,
    most: int | None = None,
) -> str:
    """Return the breakdown, ending with a line end.

    Args:
        found: What to show; parts that are None are left out.
        format: `text` rounds for people; `json` and `csv` round nothing.
        most: Documents to show, worst first; None is `DEFAULT_MOST` for text and all otherwise.

    Raises:
        UsageError: Another format, or `most` below 1.
    """
    if most is not None and most < 1:
        raise UsageError(f"`most` is {most}; show at least 1 document")
    if format == "text":
        return _text(found, DEFAULT_MOST if most is None else most)
    if format == "json":
        return breakdown_json(found, most=most)
    if format == "csv":
        return breakdown_csv(found, most=most)
    raise UsageError(f"format {format!r} is none of {', '.join(BREAKDOWN_FORMATS)}")


@dataclass
class _Notes:
    """Remarks that cells refer to, equal ones under one number, and the methods that were used.

    Attributes:
        marks: Remark to number.
        methods: Method to the measures it was used for, both in order of use.
    """

    marks: dict[str, int] = field(default_factory=dict)
    methods: dict[str, dict[str, None]] = field(default_factory=dict)

    def cell(
        self, measure: str, estimate: Estimate, *, shift: int = 0, least: int, default: int, limits: tuple[float, ...]
    ) -> str:
        """Return `value [low, high]`, the low end rounded down, the high end up, with the number of its remark."""
        low, high = estimate.low, estimate.high
        width = math.nan if low is None or high is None else (high - low) / 2
        places = numbers.decimals(width, shift=shift, least=least, default=default)

        def number(x: float | None, rounding: numbers.Rounding) -> str:
            return "-" if x is None else numbers.fixed(x, places, rounding=rounding, shift=shift, limits=limits)

        if low is not None or high is not None:
            self.methods.setdefault(estimate.method, {})[measure] = None
        ends = "-" if low is None and high is None else f"{number(low, 'down')}, {number(high, 'up')}"
        return f"{number(estimate.value, 'nearest')} [{ends}]{self.mark(estimate)}"

    def mark(self, estimate: Estimate) -> str:
        """Return ` (1)` for an estimate with a remark."""
        note = one_line(estimate.note)
        if not note and (estimate.low is None or estimate.high is None):
            note = NO_INTERVAL
        return f" ({self.marks.setdefault(note, len(self.marks) + 1)})" if note else ""

    def share(self, measure: str, estimate: Estimate, *limits: float) -> str:
        """Return a fraction in percent, or a difference of fractions in points; `limits` as in `numbers.fixed`."""
        return self.cell(measure, estimate, shift=2, least=1, default=2, limits=limits or (0.0, 1.0))

    def kld(self, estimate: Estimate) -> str:
        """Return a KL divergence in nats."""
        return self.cell("KLD", estimate, least=2, default=4, limits=(0.0,))


def _text(found: Breakdown, most: int) -> str:
    notes = _Notes()
    blocks = [_head(found)]
    if found.margin is not None:
        title = "by baseline margin: its top-1 minus top-2 log-prob, nats, in quantile bins (low, high]"
        first = found.margin[0]
        labels = [f"{'[' if b is first else '('}{_edge(b.low)}, {_edge(b.high)}]" for b in found.margin]
        blocks.append(_section(title, _bin_grid("margin", labels, found.margin, notes)))
    if found.position is not None:
        labels = [f"[{b.low:.0f}, {b.high:.0f})" for b in found.position]
        blocks.append(_section("by position in the chunk", _bin_grid("position", labels, found.position, notes)))
    if found.document is not None:
        blocks.append(_documents(found, most))
    if found.flips is not None:
        blocks.append(_flips(found.flips, notes))
    if found.dp is not None:
        blocks.append(_delta_p(found.dp, notes))
    if found.kld is not None:
        blocks.append(_kld(found.kld, notes))
    if found.runs is not None:
        blocks.append(_runs(found.runs, notes))
    foot = [f"({number}) {note}" for note, number in notes.marks.items()]
    foot += [
        f"{percent(found.confidence)} interval by clusters ({one_line(method)}): {', '.join(measures)}"
        for method, measures in notes.methods.items()
    ]
    if found.n_ambiguous:
        count = numbers.count(found.n_ambiguous)
        foot.append(f"note: at {count} positions the stored baseline cannot tell its two best tokens apart")
    blocks.append("\n".join(foot))
    return "\n\n".join(block for block in blocks if block) + "\n"


def _head(found: Breakdown) -> str:
    agreement = numbers.fixed(found.n_agree / found.n_positions, 2, shift=2, limits=(0.0, 1.0))
    sizes = ", ".join(
        f"{numbers.count(n)} {word}{'' if n == 1 else 's'}"
        for n, word in ((found.n_positions, "position"), (found.n_chunks, "chunk"), (found.n_clusters, "cluster"))
    )
    agrees = f"{numbers.count(found.n_agree)} agree ({agreement} %; llama-perplexity's Same top p)"
    return f"{one_line(found.title)}, {one_line(found.setting)}: {sizes}; {agrees}"


def _section(title: str, body: str) -> str:
    return f"{title}\n{body}"


def _grid(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Return rows in columns, the first `left` columns flush left and the others right, two spaces between."""
    widths = [max(cell_len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def padded(cell: str, i: int) -> str:
        room = " " * (widths[i] - cell_len(cell))
        return cell + room if i < left else room + cell

    return "\n".join("  " + "  ".join(padded(cell, i) for i, cell in enumerate(row)).rstrip() for row in rows)


def _apart(cell: str) -> tuple[str, str]:
    """Return a value and its interval as two cells, so that the values of a column stand below each other."""
    value, _, interval = cell.partition(" ")
    return value, interval


def _edge(x: float) -> str:
    return numbers.significant(x) if x > 0 else numbers.fixed(x, 0)


def _bin_grid(name: str, labels: Sequence[str], bins: Sequence[Bin], notes: _Notes) -> str:
    rows: list[Sequence[str]] = [(name, "positions", "clusters", "agreement, %", "KLD, nats")]
    for label, b in zip(labels, bins, strict=True):
        sizes = (numbers.count(b.n), numbers.count(b.agreement.n_clusters))
        rows.append((label, *sizes, notes.share("agreement", b.agreement), notes.kld(b.kld)))
    return _grid(rows)


def _documents(found: Breakdown, most: int) -> str:
    documents = found.document or ()
    shown = documents[:most]
    rows: list[Sequence[str]] = [("document", "positions", "agreement, %", "KLD, nats")]
    for d in shown:
        agreement = numbers.fixed(d.agreement, 1, shift=2, limits=(0.0, 1.0))
        rows.append((one_line(d.name), numbers.count(d.n), agreement, _between(d.kld_low, d.kld_high)))
    some = f"the {len(shown)} worst of {len(documents)}" if len(shown) < len(documents) else f"all {len(documents)}"
    return _section(f"by document: {some}, worst first (one cluster each: no interval)", _grid(rows))


def _flips(flips: Flips, notes: _Notes) -> str:
    counts = (
        ("both right", flips.n_both_right, None),
        ("right to wrong", flips.n_right_to_wrong, flips.right_to_wrong),
        ("wrong to right", flips.n_wrong_to_right, flips.wrong_to_right),
        ("both wrong, same token", flips.n_wrong_same, None),
        ("both wrong, changed", flips.n_wrong_changed, flips.wrong_changed),
    )
    rows: list[Sequence[str]] = [("answer on the true next token", "positions", "share, %")]
    rows += [
        (name, numbers.count(n), "" if estimate is None else notes.share("flips", estimate))
        for name, n, estimate in counts
    ]
    rows.append(("accuracy of the baseline", "", notes.share("accuracy", flips.base_accuracy)))
    rows.append(("accuracy of the setting", "", notes.share("accuracy", flips.test_accuracy)))
    change = notes.share("accuracy difference", flips.difference, 0.0)
    rows.append(("setting minus baseline, paired by cluster, points", "", change))
    return _section("flips", _grid(rows))


def _delta_p(dp: DeltaP, notes: _Notes) -> str:
    rows: list[Sequence[str]] = [
        ("Mean Δp", *_apart(notes.share("mean Δp", dp.mean, 0.0))),
        ("RMS Δp", *_apart(notes.share("RMS Δp", dp.rms, 0.0))),
    ]
    rows += [(f"{_quantile_name(q)} Δp", numbers.fixed(q.low, 3, shift=2, limits=(0.0,)), "") for q in dp.quantiles]
    title = "Δp: change of the true token's probability, points (percentiles over positions: no interval)"
    return _section(title, _grid(rows))


def _kld(kld: KldQuantiles, notes: _Notes) -> str:
    rows: list[Sequence[str]] = [("Mean KLD", *_apart(notes.kld(kld.mean)))]
    rows += [(f"{_quantile_name(q)} KLD", _between(q.low, q.high), "") for q in kld.quantiles]
    worst = kld.worst
    tops = (
        f"both predict token {worst.base_top}"
        if worst.base_top == worst.test_top
        else f"token {worst.base_top} became {worst.test_top}"
    )
    place = (
        f"  the maximum is in {one_line(worst.document)}, chunk {worst.chunk}, position {worst.position}: {tops}, "
        f"the true next one is {worst.target}"
    )
    title = "KLD quantiles, nats (over positions: no interval)"
    return _section(title, _grid(rows) + "\n" + place)


def _runs(runs: RunLengths, notes: _Notes) -> str:
    expected = runs.expected
    low, high = expected.low, expected.high
    interval, remark = "-", notes.mark(expected)
    if low is not None and high is not None:
        notes.methods.setdefault(expected.method, {})["1/(1 - agreement)"] = None
        interval = f"{numbers.significant(low, rounding='down')}, {numbers.significant(high, rounding='up')}"
    rows: list[Sequence[str]] = [
        ("", "starts", "cut", "mean", "", "25 %", "median", "75 %"),
        ("expected, 1/(1 - agreement)", "", "", _length(expected.value), f"[{interval}]{remark}", "", "", ""),
        ("measured, from any position", *_run_cells(runs.anywhere)),
    ]
    if runs.after_difference is not None:
        rows.append(("measured, between differences", *_run_cells(runs.after_difference)))
    title = "tokens to the first divergence, that token counted (measured: no interval; cut: the chunk ended before)"
    return _section(title, _grid(rows))


def _length(tokens: float) -> str:
    return numbers.significant(tokens, rounding="down") if math.isfinite(tokens) else "none seen"


def _run_cells(run: RunLength) -> tuple[str, ...]:
    mean = ("at least " if run.open_ended else "") + numbers.significant(run.mean, rounding="down")
    quartiles = (f">{numbers.count(run.longest)}" if q is None else numbers.count(q) for q in run.quartiles)
    return (numbers.count(run.n_starts), numbers.count(run.n_cut), mean, "", *quartiles)


def _quantile_name(quantile: Quantile) -> str:
    """Return a quantile's name as llama-perplexity prints it."""
    names = {1.0: "Maximum", 0.5: "Median", 0.0: "Minimum"}
    return names.get(quantile.share) or f"{100 * quantile.share:.1f}%"


def _between(low: float, high: float) -> str:
    """Return one number, or two bounds where only the top was recorded."""
    if low == high:
        return numbers.fixed(low, 6, limits=(0.0,))
    ends = (numbers.fixed(low, 6, rounding="down"), numbers.fixed(high, 6, rounding="up", limits=(0.0,)))
    return " to ".join(ends)

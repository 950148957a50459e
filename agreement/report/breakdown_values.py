"""A breakdown for programs, nothing rounded: a `Breakdown` flows in, strict JSON or CSV flows out."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from agreement.records import Estimate
from agreement.report.machine import estimate_dict, json_text

if TYPE_CHECKING:
    from agreement.breakdown.results import Bin, Breakdown, DeltaP, DocumentRow, Flips, KldQuantiles, RunLengths

FORMAT_VERSION = 1

CSV_HEADER = (
    "part",
    "item",
    "from",
    "to",
    "measure",
    "value",
    "low",
    "high",
    "confidence",
    "method",
    "n_positions",
    "n_clusters",
    "note",
)

CsvRow = Sequence[object]


def breakdown_json(found: Breakdown, *, most: int | None = None) -> str:
    """Return `breakdown_dict` as strict JSON, indented."""
    return json_text(breakdown_dict(found, most=most))


def breakdown_dict(found: Breakdown, *, most: int | None = None) -> dict[str, Any]:
    """Return the breakdown as plain values that JSON can hold; a number that is not finite is None.

    Args:
        found: The breakdown; parts that are None are left out.
        most: Documents to keep, worst first; None keeps all.
    """
    parts = {name: _plain(value) for name, value in vars(found).items() if value is not None}
    if found.document is not None:
        parts["document"] = [{**_plain(d), "agreement": d.agreement} for d in found.document[:most]]
    return {"format_version": FORMAT_VERSION, **parts}


def _plain(value: Any) -> Any:
    """Return a record, and the records and tuples in it, as plain values."""
    if isinstance(value, Estimate):
        return estimate_dict(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def breakdown_csv(found: Breakdown, *, most: int | None = None) -> str:
    """Return one line a number under `CSV_HEADER`.

    An estimate has its interval in `low` and `high`; a count or quantile has a value alone; a number that is known
    only within bounds has no value, the bounds in `low` and `high`, and a note that says so.
    """
    rows: list[Iterator[CsvRow]] = [
        _bins("margin", found.margin or ()),
        _bins("position", found.position or ()),
        _documents((found.document or ())[:most]),
    ]
    if found.flips is not None:
        rows.append(_flips(found.flips, found.n_positions))
    if found.dp is not None:
        rows.append(_delta_p(found.dp, found.n_positions))
    if found.kld is not None:
        rows.append(_kld(found.kld, found.n_positions))
    if found.runs is not None:
        rows.append(_runs(found.runs))
    sink = io.StringIO()
    lines = csv.writer(sink, lineterminator="\n")
    lines.writerow(CSV_HEADER)
    lines.writerows(chain.from_iterable(rows))
    return sink.getvalue()


def _bins(part: str, bins: Sequence[Bin]) -> Iterator[CsvRow]:
    for i, b in enumerate(bins):
        yield _estimate(part, str(i), "agreement", b.agreement, b.low, b.high)
        yield _estimate(part, str(i), "kld", b.kld, b.low, b.high)


def _documents(documents: Sequence[DocumentRow]) -> Iterator[CsvRow]:
    for d in documents:
        yield _value("document", d.name, "agreement", d.agreement, n=d.n)
        yield _bounds("document", d.name, "kld", d.kld_low, d.kld_high, n=d.n)


def _flips(flips: Flips, n: int) -> Iterator[CsvRow]:
    for name, value in vars(flips).items():
        if isinstance(value, Estimate):
            yield _estimate("flips", "", name, value)
        else:
            yield _value("flips", "", name, value, n=n)


def _delta_p(dp: DeltaP, n: int) -> Iterator[CsvRow]:
    yield _estimate("dp", "", "mean", dp.mean)
    yield _estimate("dp", "", "rms", dp.rms)
    for q in dp.quantiles:
        yield _value("dp", f"{q.share:g}", "quantile", q.low, n=n)


def _kld(kld: KldQuantiles, n: int) -> Iterator[CsvRow]:
    yield _estimate("kld", "", "mean", kld.mean)
    for q in kld.quantiles:
        yield _bounds("kld", f"{q.share:g}", "quantile", q.low, q.high, n=n)
    for name, value in vars(kld.worst).items():
        yield _value("kld", "maximum", name, value)


def _runs(runs: RunLengths) -> Iterator[CsvRow]:
    yield _estimate("runs", "expected", "mean", runs.expected)
    for item, run in (("anywhere", runs.anywhere), ("after_difference", runs.after_difference)):
        if run is None:
            continue
        for name in ("n_starts", "n_cut", "longest", "mean", "open_ended"):
            yield _value("runs", item, name, getattr(run, name))
        for quarter, tokens in zip(("25%", "median", "75%"), run.quartiles, strict=True):
            yield _value("runs", item, quarter, tokens)


def _estimate(
    part: str, item: str, measure: str, e: Estimate, start: float | None = None, stop: float | None = None
) -> CsvRow:
    ends = (e.value, e.low, e.high)
    return (part, item, start, stop, measure, *ends, e.confidence, e.method, e.n_positions, e.n_clusters, e.note)


def _value(part: str, item: str, measure: str, value: object, *, n: int | None = None) -> CsvRow:
    return (part, item, None, None, measure, value, None, None, None, None, n, None, "")


def _bounds(part: str, item: str, measure: str, low: float, high: float, *, n: int) -> CsvRow:
    value, note = (low, "") if low == high else (None, "low and high are bounds of the number, not an interval")
    return (part, item, None, None, measure, value, low, high, None, None, n, None, note)

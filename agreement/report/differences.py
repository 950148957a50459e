"""Paired differences between settings.

In: `Difference` records.  Out: one string, or plain values for JSON.
"""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from agreement.report.machine import json_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agreement.records import Difference, Estimate
    from agreement.report import Format

_HEAD = ("setting", "agreement, points", "log PPL", "KLD, nats")


def differences_text(rows: Sequence[Difference], form: Format) -> str:
    """Return one line a setting: its difference from the setting it is held against, with intervals.

    Args:
        rows: The differences, at least one, all against the same setting.
        form: `markdown` gives a Markdown table, `csv` and `json` full precision, anything else aligned text.
    """
    if form == "json":
        return json_text([difference_as_dict(row) for row in rows])
    if form == "csv":
        sink = io.StringIO()
        table = csv.writer(sink, lineterminator="\n")
        table.writerow(["setting", "against", "metric", "value", "low", "high", "confidence", "note"])
        for row in rows:
            for metric, e in _metrics(row).items():
                table.writerow([row.setting, row.against, metric, e.value, e.low, e.high, e.confidence, e.note])
        return sink.getvalue()
    against = rows[0].against
    cells = [_HEAD, *((row.setting, _points(row.agreement), _plain(row.log_ppl), _plain(row.kld)) for row in rows)]
    title = f"minus {against}, paired by cluster:"
    if form == "markdown":
        lines = ["| " + " | ".join(line) + " |" for line in cells]
        return "\n".join(["", title, "", lines[0], "|---|---:|---:|---:|", *lines[1:]]) + "\n"
    widths = [max(len(line[i]) for line in cells) for i in range(len(_HEAD))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    return "\n".join(["", title, "", *lines]) + "\n"


def _metrics(row: Difference) -> dict[str, Estimate]:
    return {"agreement": row.agreement, "log_ppl": row.log_ppl, "kld": row.kld}


def difference_as_dict(row: Difference) -> dict[str, object]:
    """Return a difference as plain values that JSON can hold."""
    found: dict[str, object] = {"setting": row.setting, "against": row.against}
    for metric, e in _metrics(row).items():
        found[metric] = {"value": e.value, "low": e.low, "high": e.high, "confidence": e.confidence, "note": e.note}
    return found


def _points(e: Estimate) -> str:
    return _bracket(100 * e.value, None if e.low is None else 100 * e.low, None if e.high is None else 100 * e.high, 2)


def _plain(e: Estimate) -> str:
    return _bracket(e.value, e.low, e.high, 5)


def _bracket(value: float, low: float | None, high: float | None, digits: int) -> str:
    if low is None or high is None:
        return f"{value:+.{digits}f} [no interval]"
    return f"{value:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"

"""Results for people and programs: a `Report` or judgements flow in, one string flows out; nothing is printed here."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Literal, get_args

from agreement.errors import UsageError
from agreement.report.differences import difference_as_dict
from agreement.report.differences import differences_text as render_differences
from agreement.report.judgements import JUDGEMENT_FORMATS, JudgementFormat, render_judgements
from agreement.report.machine import as_csv, as_dict, as_json, json_text, read_report
from agreement.report.markdown import markdown
from agreement.report.page import page
from agreement.report.text import text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agreement.records import Difference, Report

Format = Literal["text", "markdown", "csv", "json", "html"]
FORMATS: tuple[Format, ...] = get_args(Format)

__all__ = [
    "FORMATS",
    "JUDGEMENT_FORMATS",
    "Format",
    "JudgementFormat",
    "as_dict",
    "read_report",
    "render",
    "render_differences",
    "render_judgements",
    "render_many",
    "render_paired",
]


def render(report: Report, format: Format = "text", *, width: int | None = None) -> str:  # noqa: A002 - the option's name
    """Return the report in one of `FORMATS`, always ending with a line end.

    Args:
        report: What to show.
        format: `text`, `markdown`, `csv`, `json` or `html`; all show the same rows.
        width: For `text`, columns to stay within; None where there is no such limit, as in a pipe.

    Raises:
        UsageError: Another format.
    """
    if format == "text":
        return text(report, width)
    if format == "markdown":
        return markdown(report)
    if format == "csv":
        return as_csv(report)
    if format == "json":
        return as_json(report)
    if format == "html":
        return page(report)
    raise UsageError(f"format {format!r} is none of {', '.join(FORMATS)}")


def render_many(reports: Sequence[Report], format: Format = "text", *, width: int | None = None) -> str:  # noqa: A002 - the option's name
    """Return several reports in one output: tables one below the other, one JSON object, or one CSV with all rows.

    Raises:
        UsageError: `html`, which is one page a report.
    """
    if format == "html":
        raise UsageError("html takes one run at a time; give one, or use --format markdown")
    if format == "json":
        return json_text({"reports": [as_dict(report) for report in reports]})
    if format == "csv":
        return _joined_csv([(report.title, as_csv(report)) for report in reports])
    return "\n".join(render(report, format, width=width) for report in reports)


def render_paired(
    reports: Sequence[Report],
    paired: Sequence[Sequence[Difference]],
    format: Format = "text",  # noqa: A002 - the option's name
    *,
    width: int | None = None,
) -> str:
    """Return reports and the paired differences of each in one output.

    JSON is the object of `render` or `render_many` with a list `differences` in each report.  CSV, which is one table,
    is the differences alone.  Otherwise each report is followed by its differences.

    Raises:
        UsageError: `html`, which shows no differences.
    """
    both = list(zip(reports, paired, strict=True))
    if format == "html":
        raise UsageError("html shows no differences; use --format markdown")
    if format == "json":
        found = [{**as_dict(report), "differences": [difference_as_dict(row) for row in rows]} for report, rows in both]
        return json_text(found[0] if len(found) == 1 else {"reports": found})
    if format == "csv":
        tables = [(report.title, render_differences(rows, format)) for report, rows in both]
        return tables[0][1] if len(tables) == 1 else _joined_csv(tables)
    return "\n".join(render(report, format, width=width) + render_differences(rows, format) for report, rows in both)


def _joined_csv(tables: Sequence[tuple[str, str]]) -> str:
    """Return titled CSV tables of the same columns as one, with a column `run` in front."""
    sink = io.StringIO()
    lines = csv.writer(sink, lineterminator="\n")
    for index, (title, table) in enumerate(tables):
        header, *rows = csv.reader(io.StringIO(table))
        lines.writerows([["run", *header]] if index == 0 else [])
        lines.writerows([title, *row] for row in rows)
    return sink.getvalue()

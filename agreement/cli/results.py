"""`agreement table`: reading what runs found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from agreement.cli.output import show_reports

if TYPE_CHECKING:
    from agreement.intervals import Method
    from agreement.records import Difference
    from agreement.report import Format

_FORMATS = ["text", "markdown", "csv", "json", "html"]
_METHODS = ["auto", "studentised", "score", "percentile", "bca", "t"]


@click.command("table")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(_FORMATS), default="text", show_default=True, help="Output format.")
@click.option("--confidence", type=float, default=0.95, show_default=True, help="Confidence of every interval.")
@click.option("--method", type=click.Choice(_METHODS), default="auto", show_default=True, help="Interval method.")
@click.option(
    "--against",
    metavar="SETTING",
    help="Also show every other setting minus this one, paired by document; in csv, that alone.",
)
def table_command(runs: tuple[Path, ...], form: Format, confidence: float, method: Method, against: str | None) -> None:
    """Print the agreement-vs-experts table of one or more runs, or of report.json files.

    \b
    agreement table runs/code
    agreement table runs/code runs/prose --format markdown
    """
    from agreement.errors import StoreError
    from agreement.summary import load_report

    if against is not None and form == "html":
        raise click.UsageError("--format html shows no differences; leave out --against, or use --format markdown")
    reports = [load_report(run, confidence=confidence, method=method) for run in runs]
    for run, report in zip(runs, reports, strict=True):
        if not report.rows:
            raise StoreError(f"{run}: no setting has finished; add one with `agreement compare`, or --resume the sweep")
    # Worked out before anything is shown: a table cut off by an error would look complete.
    paired = None if against is None else [_differences(run, against, confidence) for run in runs]
    show_reports(reports, form, paired)


def _differences(run: Path, against: str, confidence: float) -> tuple[Difference, ...]:
    """Return a run's differences; an error names the run."""
    from agreement.analysis import differences
    from agreement.errors import GateError
    from agreement.summary import load_counts

    try:
        return differences(load_counts(run)[0], against, confidence=confidence)
    except GateError as error:
        raise GateError(f"{run}: {error}") from error

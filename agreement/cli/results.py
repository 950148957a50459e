"""`agreement table` and `agreement gate`: reading what a run found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from agreement.cli.output import show_reports

if TYPE_CHECKING:
    from agreement.intervals import Method
    from agreement.records import Requirement
    from agreement.report import Format, JudgementFormat

_FORMATS = ["text", "markdown", "csv", "json", "html"]
_METHODS = ["auto", "studentised", "score", "percentile", "bca", "t"]


@click.command("table")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(_FORMATS), default="text", show_default=True, help="Output format.")
@click.option("--confidence", type=float, default=0.95, show_default=True, help="Confidence of every interval.")
@click.option("--method", type=click.Choice(_METHODS), default="auto", show_default=True, help="Interval method.")
@click.option("--against", metavar="SETTING", help="Also show every other setting minus this one, paired by document.")
def table_command(runs: tuple[Path, ...], form: Format, confidence: float, method: Method, against: str | None) -> None:
    """Print the agreement-vs-experts table of one or more runs, or of report.json files.

    \b
    agreement table runs/code
    agreement table runs/code runs/prose --format markdown
    """
    from agreement.analysis import differences
    from agreement.report import render_differences
    from agreement.summary import load_counts, load_report

    reports = [load_report(run, confidence=confidence, method=method) for run in runs]
    show_reports(reports, form)
    if against is not None:
        for run in runs:
            counts, _ = load_counts(run)
            click.echo(render_differences(differences(counts, against, confidence=confidence), form), nl=False)


@click.command("gate")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--require", "requirements", multiple=True, metavar="TEXT", help='E.g. "experts=7 agreement>=90%". Repeatable.'
)
@click.option(
    "--config", type=click.Path(path_type=Path), help="Requirements file.  [default: agreement.toml if there]"
)
@click.option("--against", type=click.Path(path_type=Path), help="An earlier run or report.json to be no worse than.")
@click.option(
    "--margin",
    "margins",
    multiple=True,
    metavar="TEXT",
    help='How much worse than --against is allowed, e.g. "agreement 1%", "kld 0.005". Repeatable.',
)
@click.option("--confidence", type=float, default=0.95, show_default=True, help="Confidence of every interval.")
@click.option("--format", "form", type=click.Choice(["text", "json", "junit"]), default="text", help="Output format.")
@click.pass_context
def gate_command(
    ctx: click.Context,
    run: Path,
    requirements: tuple[str, ...],
    config: Path | None,
    against: Path | None,
    margins: tuple[str, ...],
    confidence: float,
    form: JudgementFormat,
) -> None:
    """Judge a run against requirements: exit 0 passed, 3 failed, 4 inconclusive.

    A requirement passes only if its whole interval is on the good side of the bound.

    \b
    agreement gate runs/code --require "experts=7 agreement>=90%" --require "experts=6 kld<=0.05"
    agreement gate runs/code --against reports/last.json --margin "agreement 1%"
    """
    from agreement.analysis import changes
    from agreement.gate import exit_code, judge, not_worse, overall, parse_margin, parse_requirement, read_requirements
    from agreement.report import as_dict, render_judgements
    from agreement.summary import load_counts, load_report

    wanted = [parse_requirement(text) for text in requirements]
    default = Path("agreement.toml")
    if config is not None or (not wanted and against is None and default.exists()):
        wanted += read_requirements(config or default)
    if not wanted and against is None:
        raise click.UsageError('nothing to require: give --require "experts=7 agreement>=90%" or an agreement.toml')
    if (against is None) != (not margins):
        raise click.UsageError("--against and --margin go together")
    reports = {level: load_report(run, confidence=level) for level in {confidence, *_levels(wanted)}}
    judgements = [judge(reports[r.confidence or confidence], r) for r in wanted]
    if against is not None:
        earlier = as_dict(load_report(against, confidence=confidence))
        (now, _), (then, _) = load_counts(run), load_counts(against)
        for text in margins:
            metric, margin = parse_margin(text)
            paired = changes(now, then, metric, confidence=confidence)
            judgements += not_worse(reports[confidence], earlier, metric, margin, paired=paired)
    verdict = overall(judgements)
    click.echo(render_judgements(judgements, verdict, form), nl=False)
    ctx.exit(exit_code(verdict))


def _levels(requirements: list[Requirement]) -> list[float]:
    """Return the confidences that requirements name themselves."""
    return [r.confidence for r in requirements if r.confidence is not None]

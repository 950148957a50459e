"""`agreement breakdown`: where one setting's changes are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

_PARTS = ["margin", "position", "document", "flips", "dp", "kld", "runs"]


@click.command("breakdown")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--setting", metavar="SETTING", help="The setting's row, e.g. experts=6.  [default: the only one]")
@click.option(
    "--by",
    "parts",
    multiple=True,
    type=click.Choice([*_PARTS, "all"]),
    default=("all",),
    help="What to show. Repeatable.  [default: all]",
)
@click.option(
    "--bins", type=click.IntRange(min=1), default=4, show_default=True, help="Bins of margin and of position."
)
@click.option(
    "--most", type=click.IntRange(min=1), metavar="N", help="Documents to show.  [default: 10 in text, else all]"
)
@click.option("--confidence", type=float, default=0.95, show_default=True, help="Confidence of every interval.")
@click.option("--format", "form", type=click.Choice(["text", "json", "csv"]), default="text", help="Output format.")
def breakdown_command(
    run: Path, setting: str | None, parts: tuple[str, ...], bins: int, most: int | None, confidence: float, form: Any
) -> None:
    """Show where a setting's changes are: by margin, position and document; flips, KLD quantiles, run lengths.

    Reads the scores that a run has stored; no engine runs.

    \b
    agreement breakdown runs/code --setting experts=6
    agreement breakdown runs/code --setting experts=6 --by margin --bins 8
    agreement breakdown runs/code --setting experts=6 --by document --most 20 --format csv
    """
    from agreement.breakdown import PARTS, break_down, load_positions
    from agreement.report.breakdown import render_breakdown

    chosen = tuple(part for part in PARTS if "all" in parts or part in parts)
    scored = load_positions(run, setting)
    found = break_down(scored, parts=chosen, bins=bins, confidence=confidence)
    click.echo(render_breakdown(found, form, most=most), nl=False)

"""Showing reports: as wide as the terminal where there is one, else one line a setting."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agreement.records import Difference, Report
    from agreement.report import Format


def show_reports(reports: Sequence[Report], form: Format, paired: Sequence[Sequence[Difference]] | None = None) -> None:
    """Print one report, or several in one output; with paired differences of each where they are given."""
    from agreement.report import render, render_many, render_paired

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    if paired is not None:
        text = render_paired(reports, paired, form, width=width)
    elif len(reports) == 1:
        text = render(reports[0], form, width=width)
    else:
        text = render_many(reports, form, width=width)
    click.echo(text, nl=False)

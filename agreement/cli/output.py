"""Showing reports: as wide as the terminal where there is one, else one line a setting."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agreement.records import Report
    from agreement.report import Format


def show_reports(reports: Sequence[Report], form: Format) -> None:
    """Print one report, or several in one output."""
    from agreement.report import render, render_many

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    text = render(reports[0], form, width=width) if len(reports) == 1 else render_many(reports, form, width=width)
    click.echo(text, nl=False)

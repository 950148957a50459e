"""The table for terminals and pipes: plain ASCII apart from what names bring along, no colour."""

from __future__ import annotations

import io
import textwrap
from typing import TYPE_CHECKING

from rich.box import Box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from agreement.report.cells import Table, table

if TYPE_CHECKING:
    from agreement.records import Report

# One rule under the heads and nothing else, so that a row can be cut, grepped and pasted. The lines are: top, head,
# head rule, middle, row, foot rule, foot, bottom; the rule's columns are joined by spaces.
_RULE = Box("    \n    \n -  \n    \n    \n    \n    \n    \n", ascii=True)

# Spaces between columns; the narrow gap where it saves a table.
_GAP = 2
_NARROW_GAP = 1
_SETTING_WIDTH = 32
_LEAST_WIDTH = 40


def text(report: Report, width: int | None = None) -> str:
    """Return the report as text that ends with a line end.

    Args:
        report: What to show.
        width: Columns to stay within: a table too wide is laid out as several, each with the settings in front. None
            for a pipe or file: one table, as wide as it is.
    """
    if width is not None:
        width = max(width, _LEAST_WIDTH)
    cells = table(report)
    parts = [cells.title, _facts(cells, width)]
    parts += _tables(cells, width)
    foot = [(f"({mark}) ", words) for mark, words in cells.footnotes]
    foot += [("", line) for line in cells.methods]
    parts.append("\n".join(_wrapped(head, words, width) for head, words in foot))
    parts.append("\n".join(_wrapped("note: ", line, width) for line in cells.notes))
    return "\n\n".join(part for part in parts if part) + "\n"


def _facts(cells: Table, width: int | None) -> str:
    """Return the head: names and values in two columns."""
    longest = max((cell_len(name) for name, _ in cells.facts), default=0)
    return "\n".join(_wrapped(f"{name}: ".ljust(longest + _GAP), value, width) for name, value in cells.facts)


def _wrapped(head: str, words: str, width: int | None) -> str:
    """Return a paragraph that hangs from its head; numbers and names are never cut."""
    if width is None:
        return head + words
    return textwrap.fill(
        words,
        width,
        initial_indent=head,
        subsequent_indent=" " * cell_len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _tables(cells: Table, width: int | None) -> list[str]:
    """Return the table, or the fewest that keep within the width."""
    limit = None if width is None else _SETTING_WIDTH
    widths = [_column_width(cells, i, limit if i == 0 else None) for i in range(len(cells.columns))]
    if width is None:
        return [_drawn(cells, list(range(len(widths))), widths, _GAP)]
    wide, narrow = _split(widths, width, _GAP), _split(widths, width, _NARROW_GAP)
    chosen, gap = (narrow, _NARROW_GAP) if len(narrow) < len(wide) else (wide, _GAP)
    return [_drawn(cells, columns, widths, gap) for columns in chosen]


def _split(widths: list[int], width: int, gap: int) -> list[list[int]]:
    """Return the columns of each table to draw; the settings, column 0, lead every one."""
    tables: list[list[int]] = [[0]]
    for i in range(1, len(widths)):
        needed = sum(widths[j] + gap for j in tables[-1]) + widths[i]
        if needed > width and len(tables[-1]) > 1:
            tables.append([0])
        tables[-1].append(i)
    return tables


def _column_width(cells: Table, i: int, limit: int | None) -> int:
    """Return the width of column `i` with its head wrapped at spaces and its cells, if there is a limit, folded."""
    head = max(cell_len(word) for word in cells.columns[i].title.split())
    body = max((cell_len(row[i]) for row in cells.rows), default=0)
    return max(head, body if limit is None else min(body, limit))


def _drawn(cells: Table, chosen: list[int], widths: list[int], gap: int) -> str:
    """Return one table of the chosen columns, each exactly as wide as `widths` says."""
    grid = RichTable(box=_RULE, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0), safe_box=False)
    for i in chosen:
        column = cells.columns[i]
        grid.add_column(Text(column.title), justify=column.align, vertical="bottom", overflow="fold", width=widths[i])
    for row in cells.rows:
        grid.add_row(*(Text(row[i]) for i in chosen))
    sink = io.StringIO()
    # Room for every column, so that rich squeezes none; a single column wider than asked for sticks out uncut.
    room = sum(widths[i] + gap for i in chosen)
    # In a notebook rich would show the table itself and leave the string empty.
    console = Console(
        file=sink, width=room, color_system=None, force_terminal=False, force_jupyter=False, legacy_windows=False
    )
    console.print(grid)
    return "\n".join(line.rstrip() for line in sink.getvalue().splitlines() if line.strip())

"""The table as GitHub-flavoured Markdown."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from agreement.report.cells import table

if TYPE_CHECKING:
    from agreement.records import Report

# What starts markup inside a line; `_` does so only at the edge of a word.
_SPECIAL = re.compile(r"[\\`*<>|\[\]~&]|(?<![^\W_])_|_(?![^\W_])")
_LEADING = re.compile(r"(?=[#+-])|(?<=\d)(?=[.)])")


def markdown(report: Report) -> str:
    """Return the report as a Markdown section that ends with a line end."""
    cells = table(report)
    lines = [f"## {_escaped(cells.title)}", ""]
    lines += [f"- {_escaped(name)}: {_escaped(value)}" for name, value in cells.facts]
    lines += ["", _line(_cell(column.title) for column in cells.columns)]
    lines.append(_line("---" if column.align == "left" else "---:" for column in cells.columns))
    lines += [_line(_cell(cell) for cell in row) for row in cells.rows]
    foot = [f"({mark}) {_escaped(words)}" for mark, words in cells.footnotes]
    foot += [_escaped(line) for line in cells.methods]
    foot += [f"**Note:** {_escaped(line)}" for line in cells.notes]
    if foot:
        lines += ["", *(f"- {line}" for line in foot)]
    return "\n".join(lines) + "\n"


def _line(cells: object) -> str: ...

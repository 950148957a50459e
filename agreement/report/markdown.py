"""The table as GitHub-flavoured Markdown."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from agreement.report.cells import table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agreement.records import Report

# What is markup inside a line; `_` is so only at the edge of a word, `#` only at the end of a heading.
_SPECIAL = re.compile(r"[\\`*<>|\[\]~&$]|(?<![^\W_])_|_(?![^\W_])|#(?=#*$)")
# What starts a block at the head of a line: a heading, a list, a rule.
_BLOCK = re.compile(r"^(\d*)([#+=-]|(?<=\d)[.)])")


def markdown(report: Report) -> str:
    """Return the report as a Markdown section that ends with a line end."""
    cells = table(report)
    lines = [f"## {_escaped(cells.title)}", ""]
    lines += [f"- {_escaped(name)}: {_escaped(value)}" for name, value in cells.facts]
    lines += ["", _line(column.title for column in cells.columns)]
    lines.append(_line("---" if column.align == "left" else "---:" for column in cells.columns))
    # Only the setting can hold markup: the other cells are numbers, and brackets of numbers make no link.
    lines += [_line((_escaped(row[0]), *row[1:])) for row in cells.rows]
    foot = [f"({mark}) {_escaped(words)}" for mark, words in cells.footnotes]
    foot += [_escaped(line) for line in cells.methods]
    foot += [f"**Note:** {_escaped(line)}" for line in cells.notes]
    if foot:
        lines += ["", *(f"- {line}" for line in foot)]
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    """Return one line of a table."""
    return f"| {' | '.join(cells)} |"


def _escaped(words: str) -> str:
    """Return one line of plain text with every sign that Markdown would read escaped."""
    escaped = _SPECIAL.sub(lambda match: "\\" + match[0], words)
    return _BLOCK.sub(lambda match: match[1] + "\\" + match[2], escaped)

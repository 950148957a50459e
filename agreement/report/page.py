"""The table as one HTML page that needs nothing else: no script, no picture, no other address."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from agreement.report.cells import table

if TYPE_CHECKING:
    from agreement.records import Report

_STYLE = """\
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 80rem; margin: 2rem auto; padding: 0 1rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; }
dt { font-weight: 600; }
dd { margin: 0; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #8886; }
thead th { vertical-align: bottom; white-space: normal; border-bottom: 2px solid #888; }
.left { text-align: left; }
"""


def page(report: Report) -> str:
    """Return the report as a page that ends with a line end."""
    cells = table(report)
    title = escape(cells.title)
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>\n" for name, value in cells.facts)
    sides = [' class="left"' if column.align == "left" else "" for column in cells.columns]
    heads = "".join(
        f'<th scope="col"{side}>{escape(column.title)}</th>' for column, side in zip(cells.columns, sides, strict=True)
    )
    rows = "".join(
        f'<tr><th scope="row" class="left">{escape(row[0])}</th>'
        + "".join(f"<td{side}>{escape(cell)}</td>" for cell, side in zip(row[1:], sides[1:], strict=True))
        + "</tr>\n"
        for row in cells.rows
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        f"<dl>\n{facts}</dl>\n"
        f'<div class="wide">\n<table>\n<thead>\n<tr>{heads}</tr>\n</thead>\n<tbody>\n{rows}</tbody>\n</table>\n</div>\n'
        + "".join(f"<p>({mark}) {escape(words)}</p>\n" for mark, words in cells.footnotes)
        + _list("Intervals", cells.methods)
        + _list("Notes", cells.notes)
        + "</body>\n</html>\n"
    )


def _list(title: str, lines: tuple[str, ...]) -> str:
    """Return a headed list, or nothing if there are no lines."""
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>\n" for line in lines)
    return f"<h2>{title}</h2>\n<ul>\n{items}</ul>\n"

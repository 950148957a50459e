"""The table in every format: gold files, each number read back by another parser, and the rules of rounding.

`AGREEMENT_UPDATE_GOLD=1 pytest tests/test_report.py` writes the gold files anew; read the difference before keeping it.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from dataclasses import replace
from decimal import Decimal
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from agreement import gate
from agreement.errors import StoreError, UsageError
from agreement.records import Estimate, Metric, Report, Row, Verdict
from agreement.report import FORMATS, JUDGEMENT_FORMATS, as_dict, numbers, read_report, render, render_judgements
from agreement.report.cells import METRIC_STYLES, places_for, shown, table
from agreement.report.machine import CSV_HEADER

if TYPE_CHECKING:
    from collections.abc import Callable

    from agreement.report import JudgementFormat

GOLD = Path(__file__).parent / "gold" / "report"
METRICS: tuple[Metric, ...] = ("agreement", "ppl_ratio", "ppl_delta", "kld")

BOOTSTRAP = "studentised bootstrap"
SCORE = "score, effective sample size"


def estimate(
    value: float,
    low: float | None,
    high: float | None,
    method: str = BOOTSTRAP,
    *,
    n: int = 6144,
    k: int = 24,
    effect: float | None = None,
    note: str = "",
) -> Estimate:
    return Estimate(value, low, high, 0.95, method, k, n, effect, note)


def plain_row() -> Row:
    return Row(
        setting="experts=7",
        experts=7,
        n_positions=6144,
        n_clusters=24,
        # 6144 / 14.98 = 410.1: "6,144 positions count like 410"
        agreement=estimate(0.9243, 0.910234, 0.936123, SCORE, effect=14.98),
        ppl=12.498,
        ppl_ratio=estimate(1.01234, 1.01012, 1.01451),
        ppl_delta=estimate(0.1523, 0.1249, 0.1791),
        kld=estimate(0.01253, 0.01191, 0.0132, effect=20.5),
        run_length=1 / (1 - 0.9243),
        expert_bytes=123_456_789,
        tokens_per_second=41.27,
    )


def gold_report() -> Report:
    near = Row(
        setting="experts=6",
        experts=6,
        n_positions=6144,
        n_clusters=24,
        agreement=estimate(0.99996, 0.99712, 0.999993, SCORE, effect=2.1),
        ppl=12.346,
        ppl_ratio=estimate(1.000031, 0.99991, 1.000152),
        ppl_delta=estimate(0.00038, -0.00111, 0.00188),
        kld=estimate(0.000004, 0.0000031, 0.0000052),
        run_length=25000.0,
        expert_bytes=105_820_105,
        tokens_per_second=None,
        warnings=("expert weights are not renormalised on this architecture",),
    )
    alike = "no interval: every cluster has the same mean, nothing shows how clusters differ"
    again = Row(
        setting="experts=8, again",
        experts=8,
        n_positions=6144,
        n_clusters=24,
        agreement=estimate(1.0, 0.8826, 1.0, "exact, by clusters", note="all positions agree: one-sided bound"),
        ppl=12.3456,
        ppl_ratio=estimate(1.0, None, None, "none", note=alike),
        ppl_delta=estimate(0.0, None, None, "none", note=alike),
        kld=estimate(0.0, None, None, "none", note=alike),
        run_length=math.inf,
        expert_bytes=141_093_473,
        tokens_per_second=39.996,
    )
    one = "one cluster: no interval, nothing shows how clusters differ"
    hostile = Row(
        setting="kv:x.y=str:<b>|`[bold]*_a_*",
        experts=None,
        n_positions=255,
        n_clusters=1,
        agreement=estimate(0.5, None, None, "none", n=255, k=1, note=one),
        ppl=3.1e12,
        ppl_ratio=estimate(2.5123e11, None, None, "none", n=255, k=1, note=one),
        ppl_delta=estimate(3.1e12, None, None, "none", n=255, k=1, note=one),
        kld=estimate(4.25, None, None, "none", n=255, k=1),
        run_length=2.0,
        expert_bytes=None,
        warnings=('a "quoted" & <i>marked</i> | warning', "two\nlines"),
    )
    return Report(
        title="demo <run> & [red]more[/red]",
        facts={"model": "tiny_moe_q8 (qwen3moe)", "corpus": "heldout-code, 24 documents", "chunking": "document | 512"},
        baseline_ppl=12.3456,
        baseline_accuracy=0.40123,
        rows=(plain_row(), near, again, hostile),
        notes=("speeds are not comparable across machines",),
        baseline_expert_bytes=141_093_473,
    )


def gold_judgements(report: Report) -> tuple[gate.Judgement, ...]:
    asked = (
        "experts=7 agreement>=90%",
        "experts=7 agreement>=92% @95%",
        "experts=6 agreement>=100%",
        "experts=7 kld<=0.0119",
        "kv:x.y=str:<b>|`[bold]*_a_* agreement>=40%",
    )
    judged = [gate.judge(report, gate.parse_requirement(text)) for text in asked]
    return (*judged, *gate.not_worse(report, as_dict(report), "ppl_ratio", 0.005, settings=["experts=7"]))


def check_gold(name: str, text: str) -> None:
    path = GOLD / name
    if os.environ.get("AGREEMENT_UPDATE_GOLD") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")
    assert text == path.read_text(encoding="utf-8")


class Reader(HTMLParser):
    """The cells of every table row, the other words, and what a page would load or run."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.words: list[str] = []
        self.tags: set[str] = set()
        self.order: list[str] = []
        self.attributes: set[str] = set()
        self.cell: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.order.append(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.cell = []

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self.rows[-1].append("".join(self.cell or []))
            self.cell = None

    def handle_data(self, data: str) -> None:
        (self.words if self.cell is None else self.cell).append(data)


def read_html(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    return reader


def test_gold_text() -> None:
    check_gold("table.txt", render(gold_report(), "text"))


@pytest.mark.parametrize("width", [80, 140])
def test_gold_text_of_a_terminal(width: int) -> None:
    text = render(gold_report(), "text", width=width)
    check_gold(f"table-{width}.txt", text)
    assert max(len(line) for line in text.splitlines()) <= width


def test_gold_markdown() -> None:
    check_gold("table.md", render(gold_report(), "markdown"))


def test_gold_csv() -> None:
    check_gold("table.csv", render(gold_report(), "csv"))


def test_gold_json() -> None:
    check_gold("table.json", render(gold_report(), "json"))


def test_gold_html() -> None:
    check_gold("table.html", render(gold_report(), "html"))


@pytest.mark.parametrize(("format_", "name"), [("text", "gate.txt"), ("json", "gate.json"), ("junit", "gate.xml")])
def test_gold_judgements(format_: JudgementFormat, name: str) -> None:
    judgements = gold_judgements(gold_report())
    check_gold(name, render_judgements(judgements, gate.overall(judgements), format_, title="demo <run>"))


def test_every_format_ends_with_one_line_end() -> None:
    for format_ in FORMATS:
        text = render(gold_report(), format_)
        assert text.endswith("\n")
        assert not text.endswith("\n\n")


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(UsageError, match="'yaml' is none of text, markdown, csv, json, html"):
        render(gold_report(), "yaml")
    with pytest.raises(UsageError, match="'html' is none of text, json, junit"):
        render_judgements((), Verdict.PASS, "html")


def test_csv_holds_every_number_of_the_rows() -> None:
    lines = list(csv.DictReader(io.StringIO((GOLD / "table.csv").read_text(encoding="utf-8"))))
    rows = gold_report().rows
    assert len(lines) == len(rows)

    def number(text: str) -> None:
        return None if text == "" else float(text)

    for line, row in zip(lines, rows, strict=True):
        assert tuple(line) == CSV_HEADER
        assert line["setting"] == row.setting
        assert number(line["experts"]) == row.experts
        assert int(line["n_positions"]) == row.n_positions
        assert int(line["n_clusters"]) == row.n_clusters
        for metric in METRICS:
            found = getattr(row, metric)
            assert number(line[metric]) == found.value
            assert number(line[f"{metric}_low"]) == found.low
            assert number(line[f"{metric}_high"]) == found.high
            assert number(line[f"{metric}_confidence"]) == found.confidence
            assert number(line[f"{metric}_design_effect"]) == found.design_effect
            assert number(line[f"{metric}_effective_n"]) == found.effective_n
            assert line[f"{metric}_method"] == found.method
            assert line[f"{metric}_note"] == found.note
        assert number(line["ppl"]) == row.ppl
        assert float(line["run_length"]) == row.run_length
        assert number(line["expert_bytes"]) == row.expert_bytes
        assert number(line["tokens_per_second"]) == row.tokens_per_second
        assert line["warnings"] == "; ".join(row.warnings)


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is not strict JSON")


def test_json_is_strict_and_holds_every_number_of_the_rows() -> None:
    data = json.loads((GOLD / "table.json").read_text(encoding="utf-8"), parse_constant=refuse)
    report = gold_report()
    assert data["title"] == report.title
    assert list(data["facts"].items()) == list(report.facts.items())
    assert data["baseline_ppl"] == report.baseline_ppl
    assert data["baseline_accuracy"] == report.baseline_accuracy
    assert data["baseline_expert_bytes"] == report.baseline_expert_bytes
    assert data["notes"] == list(report.notes)
    for line, row in zip(data["rows"], report.rows, strict=True):
        for key in ("setting", "experts", "n_positions", "n_clusters", "ppl", "expert_bytes", "tokens_per_second"):
            assert line[key] == getattr(row, key)
        assert line["run_length"] == (None if math.isinf(row.run_length) else row.run_length)
        assert line["warnings"] == list(row.warnings)
        for metric in METRICS:
            found = getattr(row, metric)
            names = ("value", "low", "high", "confidence", "method", "n_clusters", "n_positions", "design_effect")
            assert line[metric] == {name: getattr(found, name) for name in (*names, "effective_n", "note")}


def test_json_reads_back_as_the_same_report() -> None:
    report = gold_report()
    assert read_report(render(report, "json")) == report


def test_numbers_of_numpy_are_written_as_plain_numbers() -> None:
    row = plain_row()
    odd = replace(
        row,
        experts=np.int64(7),
        n_positions=np.int64(6144),
        agreement=replace(row.agreement, value=np.float64(0.9243), low=np.float64(0.910234)),
        expert_bytes=np.int64(123_456_789),
    )
    for format_ in FORMATS:
        report = replace(gold_report(), rows=(row,))
        assert render(replace(report, rows=(odd,)), format_) == render(report, format_)


def test_json_holds_null_for_what_is_not_finite() -> None:
    row = replace(plain_row(), ppl=math.nan, kld=estimate(math.nan, -math.inf, math.inf))
    data = json.loads(render(replace(gold_report(), rows=(row,)), "json"), parse_constant=refuse)
    assert data["rows"][0]["ppl"] is None
    assert [data["rows"][0]["kld"][key] for key in ("value", "low", "high")] == [None, None, None]


def broken(change: Callable[[dict[str, Any]], object]) -> str:
    data = as_dict(gold_report())
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "runs/x is not JSON"),
        ("[]", "format version None, this program reads 1"),
        (broken(lambda d: d.update(format_version=2)), "format version 2, this program reads 1"),
        (broken(lambda d: d.pop("rows")), "missing or malformed 'rows'"),
        (broken(lambda d: d.update(rows=[3])), "missing or malformed"),
        (broken(lambda d: d.update(facts=[3])), "missing or malformed"),
        (broken(lambda d: d.update(notes="a")), "notes: 'a' is not a list of texts"),
        (broken(lambda d: d["rows"][0].update(setting=7)), "setting: 7 is not a text"),
        (broken(lambda d: d["rows"][0].update(n_positions=1.5)), "n_positions: 1.5 is not a whole number"),
        (broken(lambda d: d["rows"][0].update(n_clusters=None)), "n_clusters: missing a whole number"),
        (broken(lambda d: d["rows"][0]["kld"].update(low="1")), "low: '1' is not a number"),
        (broken(lambda d: d["rows"][0]["kld"].update(value=True)), "value: True is not a number"),
    ],
)
def test_a_malformed_report_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(StoreError, match=re.escape(message)) as error:
        read_report(text, "runs/x")
    assert "\n" not in str(error.value)


def test_html_shows_the_cells_and_needs_nothing_else() -> None:
    cells = table(gold_report())
    page = render(gold_report(), "html")
    reader = read_html(page)
    assert reader.rows[0] == [column.title for column in cells.columns]
    assert [tuple(row) for row in reader.rows[1:]] == list(cells.rows)
    assert not reader.tags & {"script", "img", "link", "iframe", "b", "i"}
    assert not reader.attributes & {"src", "href", "onload", "style"}
    assert "http" not in page
    assert "url(" not in page
    words = "".join(reader.words)
    for line in (*cells.methods, *cells.notes, *(text for _, text in cells.footnotes)):
        assert line in words


def test_markdown_shows_the_cells_to_an_independent_reader() -> None:
    cells = table(gold_report())
    reader = read_html(MarkdownIt("commonmark").enable("table").render(render(gold_report(), "markdown")))
    assert reader.rows[0] == [column.title for column in cells.columns]
    assert [tuple(row) for row in reader.rows[1:]] == list(cells.rows)
    assert reader.tags == {"h2", "ul", "li", "table", "thead", "tbody", "tr", "th", "td", "strong"}
    words = "".join(reader.words)
    assert gold_report().title in words
    for line in (*cells.methods, *cells.notes, *(f"{name}: {value}" for name, value in cells.facts)):
        assert line in words


@pytest.mark.parametrize(
    "words",
    [
        "# a",
        "- a",
        "+ a",
        "* a",
        "1. a",
        "23) a",
        "> a",
        "---",
        "===",
        "```",
        "    zq",
        "<!-- a",
        "zq #",
        "##",
        "&amp;",
    ],
)
def test_markdown_takes_no_text_for_a_block(words: str) -> None:
    report = replace(gold_report(), title=words, facts={words: words}, notes=(words,), rows=(plain_row(),))
    plain = replace(gold_report(), title="a", facts={"a": "a"}, notes=("a",), rows=(plain_row(),))
    found, usual = (
        read_html(MarkdownIt("commonmark").enable("table").render(render(r, "markdown"))) for r in (report, plain)
    )
    assert found.order == usual.order
    assert "".join(found.words).count(words.strip()) == 4


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=30))
def test_no_name_can_break_a_format(name: str) -> None:
    report = replace(gold_report(), title=name, rows=(replace(plain_row(), setting=name, warnings=(name,)),))
    setting = table(report).rows[0][0]
    assert read_html(render(report, "html")).rows[1][0] == setting
    markdown = MarkdownIt("commonmark").enable("table").render(render(report, "markdown"))
    assert read_html(markdown).rows[1][0] == setting.strip()
    (line,) = csv.DictReader(io.StringIO(render(report, "csv"), newline=""))
    assert line["setting"] == name
    assert read_report(render(report, "json")) == report
    assert "92.4 % [91.0, 93.7]" in render(report, "text")


def test_text_of_a_pipe_has_one_line_a_setting_and_shows_every_cell() -> None:
    cells = table(gold_report())
    lines = render(gold_report(), "text").splitlines()
    for row in cells.rows:
        (line,) = [line for line in lines if line.startswith(f"{row[0]}  ")]
        assert line.split(row[0], 1)[1].split() == " ".join(row[1:]).split()


@given(st.integers(1, 200))
def test_text_never_cuts_a_number(width: int) -> None:
    text = render(gold_report(), "text", width=width)
    for row in table(gold_report()).rows:
        for cell in row[1:]:
            assert cell in text


def test_a_long_setting_is_folded_not_cut() -> None:
    name = "kv:deepseek2.expert_weights_scale=float:2.5+model=some-very-long-file-name"
    text = render(replace(gold_report(), rows=(replace(plain_row(), setting=name),)), "text", width=80)
    body = [line for line in text.splitlines() if not line.startswith(("kv:", "note"))]
    assert max(map(len, text.splitlines())) <= 80
    # 32 characters a line: the second piece stands alone in the first column.
    assert name[32:64] in [line.split("  ")[0].strip() for line in body]


def test_columns_nobody_measured_are_left_out() -> None:
    bare = replace(plain_row(), expert_bytes=None, tokens_per_second=None)
    titles = [column.title for column in table(replace(gold_report(), rows=(bare,))).columns]
    assert titles == [
        "setting",
        "agreement",
        "tokens to first divergence",
        "PPL ratio",
        "KLD, nats",
        "positions",
        "clusters",
    ]


def test_a_report_without_rows_is_still_a_report() -> None:
    report = replace(gold_report(), rows=())
    for format_ in FORMATS:
        assert render(report, format_)
    assert read_report(render(report, "json")) == report


def test_what_the_positions_are_worth_is_said() -> None:
    methods = table(gold_report()).methods
    # 6144 / 14.98 = 410.15 and 6144 / 20.5 = 299.7, both rounded down
    assert (
        "experts=7: 6,144 positions count like 410 for agreement (design effect 15.0), "
        "like 299 for KLD (design effect 20.5)"
    ) in methods
    assert "agreement of experts=7, experts=6: 95 % interval (score, effective sample size) over 24 clusters" in methods


def test_equal_notes_share_a_footnote_and_a_missing_interval_has_one() -> None:
    cells = table(gold_report())
    assert [mark for mark, _ in cells.footnotes] == ["a", "b", "c", "d"]
    by_setting = {row[0]: row for row in cells.rows}
    assert by_setting["experts=8, again"][3] == "1.0000 [-] (c)"
    assert by_setting["experts=8, again"][4] == "0.0000 [-] (c)"
    assert cells.footnotes[3] == ("d", "no interval is given")


def test_footnote_marks_go_on_after_z() -> None:
    rows = tuple(
        replace(plain_row(), setting=f"experts={i}", agreement=estimate(0.5, None, None, note=f"note {i}"))
        for i in range(28)
    )
    marks = [mark for mark, _ in table(replace(gold_report(), rows=rows)).footnotes]
    assert marks[:2] + marks[-3:] == ["a", "b", "z", "aa", "ab"]


# Rounding


@pytest.mark.parametrize(
    ("x", "places", "rounding", "shift", "limits", "expected"),
    [
        (0.99996, 2, "nearest", 2, (0.0, 1.0), "99.996"),
        (0.99996, 2, "down", 2, (0.0, 1.0), "99.99"),
        (0.99996, 2, "up", 2, (0.0, 1.0), "99.996"),
        (1.0, 2, "nearest", 2, (0.0, 1.0), "100.00"),
        (1 - 2**-53, 1, "nearest", 2, (0.0, 1.0), "99.99999999999999"),
        (0.00004, 1, "nearest", 2, (0.0, 1.0), "0.004"),
        (0.0, 2, "nearest", 2, (0.0, 1.0), "0.00"),
        # 0.29 and 0.55 are no exact binary fractions; their shortest decimals are what counts.
        (0.29, 2, "down", 2, (), "29.00"),
        (0.55, 2, "up", 2, (), "55.00"),
        (0.910239, 2, "down", 2, (), "91.02"),
        (0.936101, 2, "up", 2, (), "93.62"),
        (1.00004, 3, "nearest", 0, (1.0,), "1.00004"),
        (0.99996, 3, "nearest", 0, (1.0,), "0.99996"),
        (-0.0001, 2, "nearest", 0, (0.0,), "-0.0001"),
        (-0.00019, 2, "down", 0, (), "-0.01"),
        (-0.0, 2, "nearest", 0, (), "0.00"),
        (1.2345e-12, 4, "nearest", 0, (0.0,), "1.234e-12"),
        (1.2345e-12, 4, "down", 0, (0.0,), "1.234e-12"),
        (1.2345e-12, 4, "up", 0, (0.0,), "0.0001"),
        (-1.2345e-12, 4, "up", 0, (0.0,), "-1.234e-12"),
        (9.9999e11, 2, "up", 0, (), "1.000e+12"),
        (-9.9991e11, 2, "down", 0, (), "-1.000e+12"),
        (5e-324, 2, "nearest", 0, (0.0,), "5.000e-324"),
        (1.7976931348623157e308, 2, "down", 0, (), "1.797e+308"),
        (math.inf, 2, "up", 0, (), "inf"),
        (-math.inf, 2, "down", 0, (), "-inf"),
        (math.nan, 2, "nearest", 0, (), "not a number"),
    ],
)
def test_fixed(x: float, places: int, rounding: str, shift: int, limits: tuple[float, ...], expected: str) -> None:
    assert numbers.fixed(x, places, rounding=rounding, shift=shift, limits=limits) == expected


RANGES = {
    "agreement": st.floats(0.0, 1.0),
    "ppl_ratio": st.floats(1e-300, 1e300),
    "ppl_delta": st.floats(-1e300, 1e300),
    "kld": st.floats(0.0, 1e300),
}
NEAR = {
    "agreement": st.integers(0, 200).map(lambda i: 1 - i * 2**-53),
    "ppl_ratio": st.floats(-1e-9, 1e-9).map(lambda x: 1 + x),
    "ppl_delta": st.floats(-1e-9, 1e-9),
    "kld": st.floats(0, 1e-9),
}


@given(st.data(), st.sampled_from(METRICS), st.integers(0, 9))
def test_no_end_claims_more_and_no_limit_is_faked(data: st.DataObject, metric: Metric, places: int) -> None:
    number = RANGES[metric] | NEAR[metric]
    low, value, high = sorted(data.draw(st.tuples(number, number, number)))
    style = METRIC_STYLES[metric]
    text = shown(metric, estimate(value, low, high), places)
    match = re.fullmatch(r"(\S+)(?: %)? \[(\S+), (\S+)\]", text)
    assert match
    value_shown, low_shown, high_shown = (Decimal(part) for part in match.groups())
    scale = Decimal(10) ** style.shift
    # repr is the shortest decimal that reads back as the float
    true_value, true_low, true_high = (Decimal(repr(x)) * scale for x in (value, low, high))
    assert low_shown <= true_low
    assert high_shown >= true_high
    assert low_shown <= value_shown <= high_shown
    # half a unit of the last place, or of the fourth significant digit where there is an exponent
    assert abs(value_shown - true_value) <= max(Decimal(10) ** -places / 2, abs(true_value) / 2000)
    for limit in style.limits:
        for number_shown, x in ((value_shown, value), (low_shown, low), (high_shown, high)):
            assert (number_shown == Decimal(repr(limit)) * scale) == (x == limit)


@given(st.floats(1e-300, 1e300), st.sampled_from(["down", "nearest", "up"]))
def test_significant_keeps_three_digits(x: float, rounding: str) -> None:
    text = numbers.significant(x, rounding=rounding)
    seen, true = Decimal(text.replace(",", "")), Decimal(repr(x))
    assert abs(seen - true) <= true / 100
    assert not (rounding == "down" and seen > true)
    assert not (rounding == "up" and seen < true)


@pytest.mark.parametrize(
    ("width", "options", "expected"),
    [
        (0.0129, {"shift": 2, "least": 1}, 1),  # 1.29 points: 1 and 2 get a second digit
        (0.0329, {"shift": 2}, 0),  # 3.29 points: one digit will do
        (0.0329, {"shift": 2, "least": 1}, 1),
        (0.00129, {"shift": 2, "least": 1}, 2),
        (0.0022, {}, 4),
        (0.00061, {}, 4),
        (0.0, {"default": 3}, 3),
        (math.inf, {"default": 3}, 3),
        (math.nan, {"default": 3}, 3),
        (1e-30, {}, 9),
        (1e5, {}, 0),
    ],
)
def test_decimals(width: float, options: dict[str, int], expected: int) -> None:
    assert numbers.decimals(width, **options) == expected


@given(st.floats(1e-8, 1e6))
def test_decimals_show_the_width(width: float) -> None:
    # One unit of the last place, the most that an end is moved, is at most a third of the half-width.
    assert 10.0 ** -numbers.decimals(width) <= width / 3 * (1 + 1e-12) or width >= 3


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (1001, "1.01 kB"),
        (123_456_789, "124 MB"),
        (999_999, "1.00 MB"),
        (4_210_000_000, "4.21 GB"),
        (32_000_000_000_000, "32.0 TB"),
        (5 * 10**18, "5,000 PB"),
    ],
)
def test_size(n: int, expected: str) -> None:
    assert numbers.size(n) == expected


@given(st.integers(0, 10**16))
def test_size_is_never_below(n: int) -> None:
    number, unit = numbers.size(n).split()
    shown_bytes = Decimal(number.replace(",", "")) * 1000 ** ["B", "kB", "MB", "GB", "TB", "PB"].index(unit)
    assert n <= shown_bytes <= Decimal(n) * Decimal("1.01")


@pytest.mark.parametrize(
    ("run_length", "low", "expected"),
    [
        (13.999, 0.9, "13.9"),  # rounded down
        (1.0, 0.0, "1.00"),
        (25000.7, 0.9, "25,000"),
        (math.inf, 0.9, ">10.0"),  # 1 / (1 - 0.9), exactly: in binary it is a little less
        (math.inf, 0.8826, ">8.51"),  # 1 / 0.1174 = 8.518
        (math.inf, 1.0, "none seen"),
        (math.inf, None, "none seen"),
    ],
)
def test_tokens_to_first_divergence(run_length: float, low: float | None, expected: str) -> None:
    assert numbers.tokens(run_length, low) == expected


def test_expert_bytes_are_set_against_the_baseline() -> None:
    by_setting = {row[0]: row for row in table(gold_report()).rows}
    assert by_setting["experts=7"][5] == "124 MB (88 %)"  # 123456789 / 141093473 = 0.87500: up, never down to 87
    assert by_setting["experts=8, again"][5] == "142 MB (100 %)"
    near = replace(plain_row(), expert_bytes=141_000_000)  # 141000000 / 141093473 = 0.99934: not 100 %
    assert table(replace(gold_report(), rows=(near,))).rows[0][5] == "141 MB (99.94 %)"


# Judgements


def test_judgement_numbers_stand_apart_from_the_bound() -> None:
    report = gold_report()
    # 99.996 % against a bound of 100 %
    text = render_judgements(
        (gate.judge(report, gate.parse_requirement("experts=6 agreement>=99.999%")),), Verdict.FAIL
    )
    assert "99.996 % [99.7" in text
    # value 0.9243 against a bound of 92.4 %: not shown as 92.4
    judged = gate.judge(report, gate.parse_requirement("experts=7 agreement>=92.4%"))
    assert "92.43 % [91.0, 93.7]" in render_judgements((judged,), judged.verdict)


def test_judgement_json_is_strict_and_unrounded() -> None:
    report = gold_report()
    judgements = gold_judgements(report)
    data = json.loads((GOLD / "gate.json").read_text(encoding="utf-8"), parse_constant=refuse)
    assert data["verdict"] == "fail"
    for line, judged in zip(data["judgements"], judgements, strict=True):
        assert line["requirement"] == str(judged.requirement)
        assert line["bound"] == judged.requirement.bound
        assert line["verdict"] == judged.verdict.value
        assert line["clusters_needed"] == judged.clusters_needed
        for key in ("value", "low", "high", "confidence", "n_clusters"):
            assert line["estimate"][key] == getattr(judged.estimate, key)


def test_junit_counts_failures_and_errors() -> None:
    judgements = gold_judgements(gold_report())
    root = ET.parse(GOLD / "gate.xml").getroot()
    (suite,) = root.findall("testsuite")
    cases = suite.findall("testcase")
    assert [case.get("name") for case in cases] == [str(judged.requirement) for judged in judgements]
    for case, judged in zip(cases, judgements, strict=True):
        tags = {Verdict.PASS: "system-out", Verdict.FAIL: "failure", Verdict.INCONCLUSIVE: "error"}
        assert [child.tag for child in case] == [tags[judged.verdict]]
    for element in (root, suite):
        assert element.get("tests") == str(len(cases))
        assert element.get("failures") == str(len(suite.findall("testcase/failure")))
        assert element.get("errors") == str(len(suite.findall("testcase/error")))


@given(st.text(min_size=1, max_size=30))
def test_junit_holds_any_name(name: str) -> None:
    report = replace(gold_report(), rows=(replace(plain_row(), setting=name),))
    judged = gate.judge(report, gate.Requirement(name, "agreement", ">=", 0.9))
    for format_ in JUDGEMENT_FORMATS:
        render_judgements((judged,), judged.verdict, format_, title=name)
    text = render_judgements((judged,), judged.verdict, "junit", title=name)
    (case,) = ET.fromstring(text.encode()).iter("testcase")
    assert case.get("name").endswith("agreement>=90%")


def test_digits_follow_the_interval() -> None:
    assert places_for("agreement", estimate(0.5, 0.4, 0.6)) == 1
    assert places_for("agreement", estimate(0.9, 0.899, 0.901)) == 2  # half-width 0.1 points
    assert places_for("agreement", estimate(0.5, None, None)) == 2
    assert places_for("kld", estimate(0.01253, 0.01191, 0.0132)) == 4  # half-width 0.00065


def test_a_usual_table_fits_usual_terminals() -> None:
    rows = tuple(replace(plain_row(), setting=f"experts={n}", experts=n) for n in (7, 6, 4, 2))
    report = replace(gold_report(), rows=rows)
    for width, tables in ((140, 1), (80, 2)):
        lines = render(report, "text", width=width).splitlines()
        assert sum(line.startswith("---") for line in lines) == tables
        assert sum(line.startswith("experts=7 ") for line in lines) == tables

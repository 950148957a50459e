"""The table for programs, nothing rounded: a `Report` flows in, CSV or strict JSON flows out, and JSON flows back."""

from __future__ import annotations

import csv
import io
import json
import math
from typing import TYPE_CHECKING, Any

from agreement.errors import StoreError
from agreement.records import Estimate, Metric, Report, Row
from agreement.report.cells import estimate_of

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT_VERSION = 1

_METRICS: tuple[Metric, ...] = ("agreement", "ppl_ratio", "ppl_delta", "kld")

_ESTIMATE_COLUMNS = ("", "_low", "_high", "_confidence", "_method", "_design_effect", "_effective_n", "_note")

CSV_HEADER: tuple[str, ...] = (
    "setting",
    "experts",
    "n_positions",
    "n_clusters",
    *(metric + part for metric in _METRICS for part in _ESTIMATE_COLUMNS),
    "ppl",
    "run_length",
    "expert_bytes",
    "tokens_per_second",
    "warnings",
)


def as_csv(report: Report) -> str:
    """Return one line a setting under `CSV_HEADER`.

    Agreement is a fraction, KLD is in nats, an infinite run length is `inf`, and what is not known is empty.
    """
    sink = io.StringIO()
    lines = csv.writer(sink, lineterminator="\n")
    lines.writerow(CSV_HEADER)
    for row in report.rows:
        estimates = [value for metric in _METRICS for value in _estimate_values(estimate_of(row, metric))]
        lines.writerow(
            [
                row.setting,
                _integer(row.experts),
                int(row.n_positions),
                int(row.n_clusters),
                *estimates,
                _float(row.ppl),
                _float(row.run_length),
                _integer(row.expert_bytes),
                _float(row.tokens_per_second),
                "; ".join(row.warnings),
            ]
        )
    return sink.getvalue()


def _estimate_values(estimate: Estimate) -> list[float | str | None]:
    """Return the values of one estimate in the order of `_ESTIMATE_COLUMNS`."""
    return [
        _float(estimate.value),
        _float(estimate.low),
        _float(estimate.high),
        _float(estimate.confidence),
        estimate.method,
        _float(estimate.design_effect),
        _float(estimate.effective_n),
        estimate.note,
    ]


def json_text(value: object) -> str:
    """Return plain values as strict JSON, indented, with a line end."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def as_json(report: Report) -> str:
    """Return `as_dict` as strict JSON, indented."""
    return json_text(as_dict(report))


def as_dict(report: Report) -> dict[str, Any]:
    """Return the report as plain values that JSON can hold: a number that is not finite is None."""
    return {
        "format_version": FORMAT_VERSION,
        "title": report.title,
        "facts": dict(report.facts),
        "baseline_ppl": _finite(report.baseline_ppl),
        "baseline_accuracy": _finite(report.baseline_accuracy),
        "baseline_expert_bytes": _integer(report.baseline_expert_bytes),
        "rows": [_row_dict(row) for row in report.rows],
        "notes": list(report.notes),
    }


def _row_dict(row: Row) -> dict[str, Any]:
    """Return one row as plain values."""
    return {
        "setting": row.setting,
        "experts": _integer(row.experts),
        "n_positions": int(row.n_positions),
        "n_clusters": int(row.n_clusters),
        **{metric: estimate_dict(estimate_of(row, metric)) for metric in _METRICS},
        "ppl": _finite(row.ppl),
        "run_length": _finite(row.run_length),
        "expert_bytes": _integer(row.expert_bytes),
        "tokens_per_second": _finite(row.tokens_per_second),
        "warnings": list(row.warnings),
    }


def estimate_dict(estimate: Estimate) -> dict[str, Any]:
    """Return an estimate as plain values that JSON can hold."""
    return {
        "value": _finite(estimate.value),
        "low": _finite(estimate.low),
        "high": _finite(estimate.high),
        "confidence": float(estimate.confidence),
        "method": estimate.method,
        "n_clusters": int(estimate.n_clusters),
        "n_positions": int(estimate.n_positions),
        "design_effect": _finite(estimate.design_effect),
        "effective_n": _finite(estimate.effective_n),
        "note": estimate.note,
    }


def _float(x: float | None) -> float | None:
    """Return a plain float: numpy's own print with their type's name."""
    return None if x is None else float(x)


def _finite(x: float | None) -> float | None:
    """Return a plain float, or None for what strict JSON cannot hold."""
    return None if x is None or not math.isfinite(x) else float(x)


def _integer(n: int | None) -> int | None:
    """Return a plain int."""
    return None if n is None else int(n)


def read_report(text: str, name: str = "report.json") -> Report:
    """Return the report that `as_json` wrote, equal in every finite number.

    Args:
        text: The JSON text.
        name: What to call it in a message.

    Raises:
        StoreError: Not JSON, of another format version, or something is missing or of the wrong type.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise StoreError(f"{name} is not JSON ({error}); make the table again") from error
    version = data.get("format_version") if isinstance(data, dict) else None
    if version != FORMAT_VERSION:
        raise StoreError(f"{name}: format version {version!r}, this program reads {FORMAT_VERSION}; make it again")
    try:
        return Report(
            title=_text(data, "title"),
            facts={k: _text(data["facts"], k) for k in data["facts"]},
            baseline_ppl=_number(data, "baseline_ppl"),
            baseline_accuracy=_number(data, "baseline_accuracy"),
            rows=tuple(_row(row) for row in data["rows"]),
            notes=_texts(data, "notes"),
            baseline_expert_bytes=_whole_or_none(data, "baseline_expert_bytes"),
        )
    except (LookupError, TypeError, AttributeError) as error:
        raise StoreError(f"{name}: missing or malformed {error}; make the table again") from error


def _row(data: Mapping[str, Any]) -> Row:
    """Return one row from plain values."""
    run_length = _optional(data, "run_length")
    return Row(
        setting=_text(data, "setting"),
        experts=_whole_or_none(data, "experts"),
        n_positions=_whole(data, "n_positions"),
        n_clusters=_whole(data, "n_clusters"),
        agreement=_estimate(data["agreement"]),
        ppl=_number(data, "ppl"),
        ppl_ratio=_estimate(data["ppl_ratio"]),
        ppl_delta=_estimate(data["ppl_delta"]),
        kld=_estimate(data["kld"]),
        run_length=math.inf if run_length is None else run_length,
        expert_bytes=_whole_or_none(data, "expert_bytes"),
        tokens_per_second=_optional(data, "tokens_per_second"),
        warnings=_texts(data, "warnings"),
    )


def _estimate(data: Mapping[str, Any]) -> Estimate:
    """Return an estimate from plain values; the effective sample size follows from the rest."""
    return Estimate(
        value=_number(data, "value"),
        low=_optional(data, "low"),
        high=_optional(data, "high"),
        confidence=_number(data, "confidence"),
        method=_text(data, "method"),
        n_clusters=_whole(data, "n_clusters"),
        n_positions=_whole(data, "n_positions"),
        design_effect=_optional(data, "design_effect"),
        note=_text(data, "note"),
    )


def _text(data: Mapping[str, Any], key: str) -> str:
    value = data[key]
    if not isinstance(value, str):
        raise TypeError(f"{key}: {value!r} is not a text")
    return value


def _texts(data: Mapping[str, Any], key: str) -> tuple[str, ...]:
    values = data[key]
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError(f"{key}: {values!r} is not a list of texts")
    return tuple(values)


def _optional(data: Mapping[str, Any], key: str) -> float | None:
    value = data[key]
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{key}: {value!r} is not a number")
    return float(value)


def _number(data: Mapping[str, Any], key: str) -> float:
    value = _optional(data, key)
    return math.nan if value is None else value


def _whole_or_none(data: Mapping[str, Any], key: str) -> int | None:
    value = data[key]
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError(f"{key}: {value!r} is not a whole number")
    return value


def _whole(data: Mapping[str, Any], key: str) -> int:
    value = _whole_or_none(data, key)
    if value is None:
        raise TypeError(f"{key}: missing a whole number")
    return value

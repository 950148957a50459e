"""Requirements of a gate: one line of text or an `agreement.toml` flows in, checked `Requirement`s flow out."""

from __future__ import annotations

import math
import re
import tomllib
from decimal import Decimal
from typing import TYPE_CHECKING, get_args

from agreement.errors import GateError
from agreement.records import Metric, Requirement

if TYPE_CHECKING:
    from pathlib import Path

METRICS: tuple[Metric, ...] = get_args(Metric)

EXAMPLE = 'write it like "experts=7 agreement>=90%"'

# Greedy: the last thing that looks like a metric is it, so that names of settings may hold spaces and signs.
_REQUIREMENT = re.compile(
    r"(?P<setting>.+)\s(?P<metric>\w+)\s*(?P<op>[<>=]+)\s*(?P<bound>[^\s<>=@]+)\s*(?:@\s*(?P<confidence>\S+))?",
)

_MARGIN = re.compile(r"(?P<metric>\w+)(?:\s+|\s*=\s*)(?P<value>[^\s=]+)")

_TABLE_KEYS = {"setting", "metric", "at_least", "at_most", "confidence"}
_KEY_EXAMPLES = {"setting": '"experts=7"', "metric": '"agreement"'}


def parse_requirement(text: str, *, confidence: float | None = None) -> Requirement:
    """Parse `SETTING METRIC>=BOUND` or `SETTING METRIC<=BOUND`, with `@95%` behind it if wanted.

    Args:
        text: For example `experts=7 agreement>=90%`. Agreement's bound is a percentage or a fraction; the bounds of
            `ppl_ratio`, `ppl_delta` and `kld` are plain numbers.
        confidence: What to require where the text does not say.

    Raises:
        GateError: Not of that form, an unknown metric, or a bound or confidence out of its range.
    """
    match = _REQUIREMENT.fullmatch(text.strip())
    if not match:
        raise GateError(f"requirement {text!r} cannot be read; {EXAMPLE}")
    if match["op"] not in (">=", "<="):
        raise GateError(f"requirement {text!r}: {match['op']!r} is neither >= nor <=; {EXAMPLE}")
    asked = confidence if match["confidence"] is None else _share(match["confidence"], f"requirement {text!r}")
    return _requirement(
        match["setting"].strip(), match["metric"], match["op"], match["bound"], asked, f"requirement {text!r}"
    )


def _requirement(
    setting: str,
    metric: str,
    op: str,
    bound: str | float,
    confidence: float | None,
    where: str,
) -> Requirement:
    """Return the checked requirement; `where` begins a message."""
    name = _metric(metric, where)
    value = _bound(name, bound, where)
    if confidence is not None and not 0.0 < confidence < 1.0:
        raise GateError(f"{where}: a confidence of {confidence!r} is not between 0 and 1; 0.95 or 95% is usual")
    return Requirement(setting, name, ">=" if op == ">=" else "<=", value, confidence)


def _metric(text: str, where: str) -> Metric:
    """Return the metric of that name."""
    for metric in METRICS:
        if text == metric:
            return metric
    raise GateError(f"{where}: unknown metric {text!r}; there are {', '.join(METRICS)}")


def _bound(metric: Metric, bound: str | float, where: str) -> float:
    """Return a bound in the metric's own unit, within its range."""
    if metric == "agreement":
        value = _share(bound, where)
        if not 0.0 <= value <= 1.0:
            hint = f"; for {bound} percent write {bound}%" if 1.0 < value <= 100.0 else ""
            raise GateError(f"{where}: agreement lies between 0 and 1, or 0% and 100%, not {bound}{hint}")
        return value
    value = _plain(bound, where, f"{metric} takes a plain number")
    if metric == "ppl_ratio" and value <= 0.0:
        raise GateError(f"{where}: a ratio of perplexities is above 0, not {bound}")
    if metric == "kld" and value < 0.0:
        raise GateError(f"{where}: a KL divergence is never below 0, so not {bound}")
    return value


def _share(text: str | float, where: str) -> float:
    """Return a fraction from `0.9`, `90%` or a number; exactly the float nearest to what is written."""
    if isinstance(text, str) and text.endswith("%"):
        return _plain(text[:-1], where, "expected a percentage or a fraction", shift=-2)
    return _plain(text, where, "expected a percentage or a fraction")


def _plain(text: str | float, where: str, expected: str, *, shift: int = 0) -> float:
    """Return a finite float."""
    try:
        value = float(Decimal(str(text)).scaleb(shift))
    except (ArithmeticError, ValueError):  # no decimal at all, an exponent out of reach, or a signalling NaN
        value = math.nan
    if isinstance(text, bool) or not math.isfinite(value):
        raise GateError(f"{where}: {expected}, found {text!r}")
    return value


def read_requirements(path: Path, *, confidence: float | None = None) -> tuple[Requirement, ...]:
    """Read the requirements of an `agreement.toml`.

    `gate.require` is a list of one-line requirements, of tables with `setting`, `metric`, `at_least` or `at_most` and
    perhaps `confidence`, or of both. `gate.confidence` holds for those that do not say. What stands outside `gate` is
    left alone.

    Args:
        path: The file.
        confidence: What to require where the file does not say.

    Raises:
        GateError: The file cannot be read or is no TOML, holds no requirement, or one is malformed or has a key
            that is not known.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise GateError(f"{path}: cannot be read ({error.strerror}); name a TOML file with [gate] require") from error
    except ValueError as error:
        raise GateError(f"{path}: not TOML: {_first_line(error)}") from error
    gate = data.get("gate", {})
    if not isinstance(gate, dict):
        raise GateError(f"{path}: `gate` must be a table, [gate]")
    if unknown := sorted(set(gate) - {"require", "confidence"}):
        raise GateError(f"{path}: unknown key gate.{unknown[0]}; there are require and confidence")
    if "confidence" in gate:
        confidence = _share(gate["confidence"], f"{path}: gate.confidence")
    require = gate.get("require", [])
    if not isinstance(require, list) or not require:
        raise GateError(f'{path}: no requirement; add require = ["experts=7 agreement>=90%"] under [gate]')
    return tuple(_entry(entry, confidence, f"{path}: requirement {i}") for i, entry in enumerate(require, 1))


def _entry(entry: object, confidence: float | None, where: str) -> Requirement:
    """Return one entry of `gate.require`."""
    if isinstance(entry, str):
        return parse_requirement(entry, confidence=confidence)
    if not isinstance(entry, dict):
        raise GateError(f"{where}: expected a text or a table, found {entry!r}")
    if unknown := sorted(set(entry) - _TABLE_KEYS):
        raise GateError(f"{where}: unknown key {unknown[0]!r}; there are {', '.join(sorted(_TABLE_KEYS))}")
    for key in ("setting", "metric"):
        if not isinstance(entry.get(key), str):
            raise GateError(f"{where}: {key!r} must be a text, such as {key} = {_KEY_EXAMPLES[key]}")
    given = [key for key in ("at_least", "at_most") if key in entry]
    if len(given) != 1:
        raise GateError(f"{where}: give one of at_least and at_most, found {len(given)}")
    if "confidence" in entry:
        confidence = _share(entry["confidence"], where)
    op = ">=" if given == ["at_least"] else "<="
    return _requirement(entry["setting"].strip(), entry["metric"], op, entry[given[0]], confidence, where)


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(error).splitlines() or [""])[0]


def parse_margin(text: str) -> tuple[Metric, float]:
    """Parse how much worse than an earlier report is still allowed, such as `agreement 1%` or `kld=0.002`.

    Returns:
        The metric, and the margin in its own unit: 1 % of agreement is 0.01, one percentage point.

    Raises:
        GateError: Not of that form, an unknown metric, or a margin that is negative or out of the metric's range.
    """
    where = f"margin {text!r}"
    match = _MARGIN.fullmatch(text.strip())
    if not match:
        raise GateError(f'{where} cannot be read; write it like "agreement 1%"')
    metric, value = _metric(match["metric"], where), match["value"]
    margin = _share(value, where) if metric == "agreement" else _plain(value, where, f"{metric} takes a plain number")
    return metric, check_margin(metric, margin)


def check_margin(metric: Metric, margin: float) -> float:
    """Return the margin, or raise GateError for one that is negative, not finite or out of the metric's range."""
    if not math.isfinite(margin) or margin < 0.0 or (metric == "agreement" and margin > 1.0):
        most = ", for agreement at most 1 (100%)" if metric == "agreement" else ""
        raise GateError(f"margin of {metric}: {margin!r} must be 0 or more{most}; the sign is understood")
    return margin

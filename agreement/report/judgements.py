"""A gate's answers for people and for continuous integration: judgements flow in, text, JSON or JUnit XML flows out."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal, get_args
from xml.sax.saxutils import escape, quoteattr

from agreement.errors import UsageError
from agreement.records import Verdict
from agreement.report.cells import METRIC_STYLES, one_line, percent, places_for, shown
from agreement.report.machine import estimate_dict, json_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agreement.records import Judgement

JudgementFormat = Literal["text", "json", "junit"]
JUDGEMENT_FORMATS: tuple[JudgementFormat, ...] = get_args(JudgementFormat)

# Characters that XML 1.0 cannot hold even escaped (section 2.2 of its specification).
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render_judgements(
    judgements: Sequence[Judgement],
    verdict: Verdict,
    format: JudgementFormat = "text",  # noqa: A002 - the option's name
    *,
    title: str = "agreement gate",
) -> str:
    """Return the answers of a gate, ending with a line end.

    Args:
        judgements: One a requirement.
        verdict: That of all together.
        format: `text`, `json`, or `junit` for JUnit XML, in which an inconclusive requirement is an error, not a
            failure: neither is a success.
        title: Name of the run.

    Raises:
        UsageError: Another format.
    """
    if format == "text":
        return _text(judgements, verdict)
    if format == "json":
        return _json(judgements, verdict, title)
    if format == "junit":
        return _junit(judgements, title)
    raise UsageError(f"format {format!r} is none of {', '.join(JUDGEMENT_FORMATS)}")


def found(judgement: Judgement) -> str:
    """Return the estimate in words, with digits enough that nothing looks like the bound that is not."""
    metric, estimate = judgement.requirement.metric, judgement.estimate
    places = places_for(metric, estimate)
    numbers = shown(metric, estimate, places, apart=(judgement.requirement.bound,))
    unit = METRIC_STYLES[metric].unit if metric == "kld" else ""
    n = estimate.n_clusters
    return f"{numbers}{unit} at {percent(estimate.confidence)} from {n:,} cluster{'' if n == 1 else 's'}"


def _tally(judgements: Sequence[Judgement]) -> dict[Verdict, int]:
    """Return how often each answer was given."""
    return {verdict: sum(j.verdict is verdict for j in judgements) for verdict in Verdict}


def _text(judgements: Sequence[Judgement], verdict: Verdict) -> str:
    """Return three lines a requirement and one for all."""
    width = max(len(v.value) for v in Verdict) + 2
    lines: list[str] = []
    for judgement in judgements:
        lines.append(f"{judgement.verdict.value.upper():<{width}}{one_line(str(judgement.requirement))}")
        lines.append(f"{'':<{width}}{found(judgement)}")
        lines.append(f"{'':<{width}}{one_line(judgement.reason)}")
    counts = ", ".join(f"{n} {v.value}" for v, n in _tally(judgements).items() if n)
    lines.append(f"gate: {verdict.value} ({counts})")
    return "\n".join(lines) + "\n"


def _json(judgements: Sequence[Judgement], verdict: Verdict, title: str) -> str:
    """Return strict JSON with every number unrounded."""
    data = {
        "title": title,
        "verdict": verdict.value,
        "judgements": [_judgement_dict(judgement) for judgement in judgements],
    }
    return json_text(data)


def _judgement_dict(judgement: Judgement) -> dict[str, Any]:
    """Return one judgement as plain values."""
    requirement = judgement.requirement
    return {
        "requirement": str(requirement),
        "setting": requirement.setting,
        "metric": requirement.metric,
        "op": requirement.op,
        "bound": float(requirement.bound),
        "confidence": requirement.confidence,
        "against": requirement.against or None,
        "verdict": judgement.verdict.value,
        "estimate": estimate_dict(judgement.estimate),
        "clusters_needed": judgement.clusters_needed,
        "reason": judgement.reason,
    }


def _junit(judgements: Sequence[Judgement], title: str) -> str:
    """Return JUnit XML as common servers read it: one suite, one case a requirement, no times."""
    tally = _tally(judgements)
    sums = f'tests="{len(judgements)}" failures="{tally[Verdict.FAIL]}" errors="{tally[Verdict.INCONCLUSIVE]}"'
    name = _attribute(title)
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f"<testsuites {sums}>",
        f'  <testsuite name={name} {sums} skipped="0">',
    ]
    for judgement in judgements:
        head = f"    <testcase classname={name} name={_attribute(str(judgement.requirement))}"
        words = f"{found(judgement)}: {judgement.reason}"
        if judgement.verdict is Verdict.PASS:
            lines += [f"{head}>", f"      <system-out>{escape(_xml(words))}</system-out>", "    </testcase>"]
        else:
            tag = "failure" if judgement.verdict is Verdict.FAIL else "error"
            kind = f'type="{judgement.verdict.value}"'
            lines += [f"{head}>", f"      <{tag} {kind} message={_attribute(words)}/>", "    </testcase>"]
    lines += ["  </testsuite>", "</testsuites>"]
    return "\n".join(lines) + "\n"


def _xml(words: str) -> str:
    """Return one line of text without characters that XML cannot hold."""
    return _NOT_XML.sub("\ufffd", one_line(words))


def _attribute(words: str) -> str:
    """Return the text as a quoted attribute."""
    return quoteattr(_xml(words))

"""Estimates, rows, reports and verdicts: what flows from `intervals` to `report` and `gate`."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import Literal


@dataclass(frozen=True)
class Estimate:
    """A number and how sure we are.

    Attributes:
        value: The point estimate over all clusters.
        low: Lower end of the interval, or None where no interval can be given.
        high: Upper end, or None.
        confidence: Nominal coverage, e.g. 0.95.
        method: Name of the interval's method, e.g. `studentised bootstrap`.
        n_clusters: Clusters with at least one scored position.
        n_positions: Scored positions.
        design_effect: Variance of the estimate over that of as many independent positions; None if not defined.
        note: Why there is no interval, or why it is one-sided; empty otherwise.
    """

    value: float
    low: float | None
    high: float | None
    confidence: float
    method: str
    n_clusters: int
    n_positions: int
    design_effect: float | None = None
    note: str = ""

    @property
    def effective_n(self) -> float | None:
        """Independent positions that would be worth as much."""
        return None if not self.design_effect else self.n_positions / self.design_effect


class Verdict(Enum):
    """A gate's answer."""

    PASS = "pass"  # noqa: S105  # a verdict, not a password
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


Metric = Literal["agreement", "ppl_ratio", "ppl_delta", "kld"]


@dataclass(frozen=True)
class Requirement:
    """What a gate asks of one number of one setting.

    Attributes:
        setting: Name of the row, e.g. `experts=7`.
        metric: Which estimate of the row.
        op: `>=` or `<=`; the bound itself is on the good side.
        bound: In the metric's own unit, agreement as a fraction.
        confidence: Least nominal coverage that the interval must have; None takes whatever the report has.
        against: Empty, or the name of an earlier report: then `bound` is for the change since that report.
    """

    setting: str
    metric: Metric
    op: Literal[">=", "<="]
    bound: float
    confidence: float | None = None
    against: str = ""

    def __str__(self) -> str:
        """Return it in the form that `gate.parse_requirement` reads, or for a change in one for people."""
        bound = _percent(self.bound) if self.metric == "agreement" else repr(float(self.bound))
        change = " change" if self.against else ""
        confidence = "" if self.confidence is None else f" @{_percent(self.confidence)}"
        against = f" against {self.against}" if self.against else ""
        return f"{self.setting} {self.metric}{change}{self.op}{bound}{confidence}{against}"


def _percent(fraction: float) -> str:
    """Return every digit of the fraction as a percentage: 0.9 is `90%`."""
    return f"{Decimal(repr(float(fraction))).scaleb(2).normalize():f}%"


@dataclass(frozen=True)
class Judgement:
    """A requirement held against an estimate.

    Attributes:
        requirement: What was asked.
        estimate: What the run has; for a requirement against an earlier report, the change since then.
        verdict: The answer.
        clusters_needed: If inconclusive, how many clusters in all would settle it at the present estimate; None if
            settled, or if no number of clusters would, or none can be told.
        reason: One clause for people, without numbers that were rounded.
    """

    requirement: Requirement
    estimate: Estimate
    verdict: Verdict
    clusters_needed: int | None
    reason: str


@dataclass(frozen=True)
class Row:
    """One setting of the agreement-vs-experts table.

    Attributes:
        setting: The setting's name, e.g. `experts=7`.
        experts: Experts used per token, None where the file keeps one value a layer.
        n_positions: Scored positions.
        n_clusters: Clusters with at least one scored position.
        agreement: Top-1 agreement with the baseline, a fraction.
        ppl: Perplexity of the setting over the scored positions.
        ppl_ratio: Perplexity over the baseline's.
        ppl_delta: Perplexity minus the baseline's.
        kld: Mean KL divergence baseline‖setting, nats; where only the top was recorded, `low` and `high` also hold
            the truncation: low comes from the lower bounds, high from the upper bounds, value from the lower.
        run_length: Tokens to the first divergence when decoding greedily, `1 / (1 - agreement)`; inf if none differed.
        expert_bytes: Bytes of routed experts read per token, None if not known.
        tokens_per_second: Tokens decoded per second in this pass, None if not measured; not comparable across machines.
        warnings: What a reader of this row must know.
    """

    setting: str
    experts: int | None
    n_positions: int
    n_clusters: int
    agreement: Estimate
    ppl: float
    ppl_ratio: Estimate
    ppl_delta: Estimate
    kld: Estimate
    run_length: float
    expert_bytes: int | None
    tokens_per_second: float | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Difference:
    """One setting minus another over the same positions, paired by cluster.

    Attributes:
        setting: The setting.
        against: What it is compared with.
        agreement: Difference of the two agreements with the baseline, a fraction.
        log_ppl: Difference of log perplexities, nats a token: `log(PPL of setting / PPL of against)`.
        kld: Difference of the mean KL divergences, nats (the lower bounds of truncated recordings).
    """

    setting: str
    against: str
    agreement: Estimate
    log_ppl: Estimate
    kld: Estimate


@dataclass(frozen=True)
class Report:
    """What the table and the gate read.

    Attributes:
        title: The run's name.
        facts: What was run, as ordered `name: value` pairs for the head of a report (model, corpus, chunking, ...).
        baseline_ppl: Perplexity of the baseline over the scored positions.
        baseline_accuracy: Share of positions where the baseline's argmax is the true next token.
        rows: One a setting, in the order asked for.
        notes: Warnings and remarks that belong to the whole run.
        baseline_expert_bytes: Bytes of routed experts read per token by the baseline, None if not known.
    """

    title: str
    facts: dict[str, str]
    baseline_ppl: float
    baseline_accuracy: float
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    baseline_expert_bytes: int | None = None

"""From a run directory to a report: position scores to counts by cluster, counts to estimates, estimates to rows.

In: a finished (or partly finished) run.  Out: `RunCounts`, small enough to keep in `report.json`, and `Report`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from agreement import intervals
from agreement.errors import GateError, StoreError
from agreement.records import Counts, Difference, Estimate, Float64Array, Metric, Report, Row
from agreement.settings import AGAIN

DEFAULT_CONFIDENCE = 0.95
REPORT_FORMAT = "agreement-report"
REPORT_VERSION = 1


@dataclass(frozen=True)
class SettingCounts:
    """One setting's sums, one `Counts` a cluster, clusters in the order of `RunCounts.clusters`.

    Attributes:
        setting: Its name.
        experts: Experts used per token, or None.
        expert_bytes: Bytes of routed experts read per token, or None.
        counts: One a cluster.
        warnings: What a reader must know.
    """

    setting: str
    experts: int | None
    expert_bytes: int | None
    counts: tuple[Counts, ...]
    warnings: tuple[str, ...] = ()

    def column(self, name: str) -> Float64Array:
        """Return one field of the counts, (n_clusters,) float64."""
        return np.array([getattr(c, name) for c in self.counts], np.float64)


@dataclass(frozen=True)
class RunCounts:
    """Everything that the table, the gate and a later comparison need of a run.

    Attributes:
        title: The run's name.
        facts: What was run, for the head of a report.
        clusters: Names of the clusters.
        settings: One a setting.
        notes: Warnings and remarks that belong to the whole run.
        seed: Seeds the resampling.
        baseline_expert_bytes: Bytes of routed experts that the baseline reads per token, or None.
        chunks_fingerprint: Digest of the token windows: runs with the same one can be compared cluster by cluster.
    """

    title: str
    facts: dict[str, str]
    clusters: tuple[str, ...]
    settings: tuple[SettingCounts, ...]
    notes: tuple[str, ...]
    seed: int
    baseline_expert_bytes: int | None = None
    chunks_fingerprint: str = ""


def make_report(
    run: RunCounts,
    *,
    confidence: float = DEFAULT_CONFIDENCE,
    method: intervals.Method = "auto",
    speeds: dict[str, float] | None = None,
) -> Report:
    """Return the table of a run.

    Args:
        run: Its counts.
        confidence: Nominal coverage of every interval.
        method: Interval method; see `agreement.intervals`.
        speeds: Tokens per second by setting, where measured.
    """
    near = _near_the_floor(run, confidence)
    rows = []
    for s in run.settings:
        row = _row(s, run.seed, confidence, method, speeds or {})
        rows.append(replace(row, warnings=(*row.warnings, near[s.setting])) if s.setting in near else row)
    total = sum(run.settings[0].counts, Counts()) if run.settings else Counts()
    return Report(
        title=run.title,
        facts=run.facts,
        baseline_ppl=math.exp(total.nll_base / total.n) if total.n else math.nan,
        baseline_accuracy=total.n_base_right / total.n if total.n else math.nan,
        rows=tuple(rows),
        notes=run.notes,
        baseline_expert_bytes=run.baseline_expert_bytes,
    )


def _row(s: SettingCounts, seed: int, confidence: float, method: intervals.Method, speeds: dict[str, float]) -> Row:
    total = sum(s.counts, Counts())
    if total.n == 0:
        raise StoreError(f"{s.setting} has no scored position; run again with --resume")
    n = s.column("n")
    # The score interval is for shares only; where it is asked for by name, means take their own default.
    for_means: intervals.Method = "auto" if method == "score" else method

    # Each estimate has a generator of its own, so that a table with fewer settings shows the same numbers.
    def rng(metric: int) -> np.random.Generator:
        return np.random.default_rng([seed, metric])

    agreement = intervals.proportion(s.column("n_agree"), n, rng=rng(0), confidence=confidence, method=method)
    nll_base, nll_test = s.column("nll_base"), s.column("nll_test")
    kld = intervals.bounded_mean(
        s.column("kld_low"),
        s.column("kld_high"),
        n,
        rng=rng(3),
        lower_bound=0.0,
        confidence=confidence,
        method=for_means,
    )
    disagree = total.n - total.n_agree
    return Row(
        setting=s.setting,
        experts=s.experts,
        n_positions=total.n,
        n_clusters=agreement.n_clusters,
        agreement=agreement,
        ppl=math.exp(total.nll_test / total.n),
        ppl_ratio=intervals.exp_mean(nll_test - nll_base, n, rng=rng(1), confidence=confidence, method=for_means),
        ppl_delta=intervals.ppl_delta(nll_base, nll_test, n, rng=rng(2), confidence=confidence, method=for_means),
        kld=kld,
        run_length=total.n / disagree if disagree else math.inf,
        expert_bytes=s.expert_bytes,
        tokens_per_second=speeds.get(s.setting),
        warnings=s.warnings,
    )


def differences(run: RunCounts, against: str, *, confidence: float = DEFAULT_CONFIDENCE) -> tuple[Difference, ...]:
    """Return every other setting of a run minus `against`, each with an interval of its own.

    Two intervals that overlap say nothing about their difference: documents that are hard for one setting are hard
    for the other, so the difference is estimated document by document.

    Raises:
        GateError: The run has no such setting, or no other.
    """
    reference = find_setting(run, against)
    if len(run.settings) == 1:
        raise GateError(f"{against} is the only setting of the run; there is none to hold against it")
    result = []
    for s in run.settings:
        if s.setting == against:
            continue
        n = s.column("n")
        estimates: list[Estimate] = []
        for metric, limit in (("n_agree", 1.0), ("nll_test", None), ("kld_low", None)):
            a, b = (x.column(metric) for x in (s, reference))
            rng = np.random.default_rng([run.seed, 10 + len(estimates)])
            estimates.append(intervals.difference(a, b, n, rng=rng, limit=limit, confidence=confidence))
        result.append(Difference(s.setting, against, *estimates))
    return tuple(result)


def changes(
    now: RunCounts, earlier: RunCounts, metric: Metric, *, confidence: float = DEFAULT_CONFIDENCE
) -> dict[str, Estimate]:
    """Return the change of a metric since an earlier run over the same chunks, by setting, paired by cluster.

    A setting that either run lacks is left out, and so is everything if the chunks are not the same, or for a metric
    that is no sum over clusters (`ppl_delta`): the change of such must be judged from both intervals.
    """
    if not now.chunks_fingerprint or now.chunks_fingerprint != earlier.chunks_fingerprint or metric == "ppl_delta":
        return {}
    then = {s.setting: s for s in earlier.settings}
    found = {}
    for s in now.settings:
        if s.setting not in then:
            continue
        a, b = (_metric_sums(x, metric) for x in (s, then[s.setting]))
        n = s.column("n")
        rng = np.random.default_rng([now.seed, 20])
        if np.array_equal(a, b):
            k = int((n > 0).sum())
            note = "the same in every cluster"
            found[s.setting] = Estimate(0.0, 0.0, 0.0, confidence, "paired, no change", k, int(n.sum()), note=note)
        elif metric == "ppl_ratio":  # exp of one mean minus exp of another, which is what ppl_delta estimates
            found[s.setting] = intervals.ppl_delta(b, a, n, rng=rng, confidence=confidence)
        else:
            limit = 1.0 if metric == "agreement" else None
            found[s.setting] = intervals.difference(a, b, n, rng=rng, limit=limit, confidence=confidence)
    return found


def _metric_sums(s: SettingCounts, metric: Metric) -> Float64Array:
    if metric == "agreement":
        return s.column("n_agree")
    if metric == "kld":
        return s.column("kld_low")
    return s.column("nll_test") - s.column("nll_base")


def _near_the_floor(run: RunCounts, confidence: float) -> dict[str, str]:
    """Return a warning for each setting whose agreement is not distinguishable from the noise floor's."""
    floors = [s.setting for s in run.settings if s.setting.endswith(AGAIN)]
    if not floors:
        return {}
    found = {}
    for d in differences(run, floors[0], confidence=confidence):
        low, high = d.agreement.low, d.agreement.high
        if d.agreement.value == 0 or low is None or high is None or low <= 0 <= high:
            found[d.setting] = (
                f"not distinguishable from the noise floor ({floors[0]}): the difference in agreement is "
                f"{100 * d.agreement.value:+.2f} points"
                + ("" if low is None or high is None else f" [{100 * low:+.2f}, {100 * high:+.2f}]")
            )
    return found


def find_setting(run: RunCounts, name: str) -> SettingCounts:
    """Return the counts of one setting.

    Raises:
        GateError: The run has no such setting; the message lists those it has.
    """
    for s in run.settings:
        if s.setting == name:
            return s
    raise GateError(f"the run has no setting {name!r}; it has {', '.join(s.setting for s in run.settings) or 'none'}")


def counts_to_json(run: RunCounts) -> dict[str, object]:
    """Return the counts as JSON-able columns: small enough to commit, enough for every estimate."""
    return {
        "format": REPORT_FORMAT,
        "format_version": REPORT_VERSION,
        "title": run.title,
        "facts": run.facts,
        "notes": list(run.notes),
        "seed": run.seed,
        "baseline_expert_bytes": run.baseline_expert_bytes,
        "chunks_fingerprint": run.chunks_fingerprint,
        "clusters": list(run.clusters),
        "settings": [
            {
                "setting": s.setting,
                "experts": s.experts,
                "expert_bytes": s.expert_bytes,
                "warnings": list(s.warnings),
                "counts": {f.name: [getattr(c, f.name) for c in s.counts] for f in fields(Counts)},
            }
            for s in run.settings
        ],
    }


def counts_from_json(data: dict[str, Any], source: str) -> RunCounts:
    """Return the counts kept in a `report.json`.

    Raises:
        StoreError: It is not one, of another version, or its columns do not fit together.
    """
    if data.get("format") != REPORT_FORMAT or data.get("format_version") != REPORT_VERSION:
        raise StoreError(f"{source} is not a report.json of this version; give a run directory or its report.json")
    try:
        return _parse_counts(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"{source} is damaged ({type(error).__name__}: {error}); make it again") from error


def _parse_counts(data: dict[str, Any]) -> RunCounts:
    clusters = tuple(str(c) for c in _list(data["clusters"]))
    settings = []
    for entry in _list(data["settings"]):
        columns = {
            f.name: [_number(x, type(f.default)) for x in _list(entry["counts"][f.name])] for f in fields(Counts)
        }
        if any(len(c) != len(clusters) for c in columns.values()):
            raise ValueError(f"{entry['setting']} does not have one count a cluster")
        per_cluster: list[dict[str, Any]] = [{k: v[i] for k, v in columns.items()} for i in range(len(clusters))]
        counts = tuple(Counts(**values) for values in per_cluster)
        settings.append(
            SettingCounts(
                str(entry["setting"]),
                _whole_or_none(entry["experts"]),
                _whole_or_none(entry["expert_bytes"]),
                counts,
                tuple(str(w) for w in _list(entry["warnings"])),
            )
        )
    facts = data["facts"]
    if not isinstance(facts, dict):
        raise TypeError("facts is not an object")
    return RunCounts(
        title=str(data["title"]),
        facts={str(k): str(v) for k, v in facts.items()},
        clusters=clusters,
        settings=tuple(settings),
        notes=tuple(str(n) for n in _list(data["notes"])),
        seed=int(_number(data["seed"], int)),
        baseline_expert_bytes=_whole_or_none(data["baseline_expert_bytes"]),
        chunks_fingerprint=str(data["chunks_fingerprint"]),
    )


def _number(value: object, kind: type) -> int | float:
    """Return a count as an int and a sum as a float, or refuse: a number that is none would spoil every total."""
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        raise TypeError(f"{value!r:.40} is no {kind.__name__}")
    if not math.isfinite(value) or (kind is int and value < 0):
        raise ValueError(f"{value!r:.40} is no sum of scores")
    return value


def _whole_or_none(value: object) -> int | None:
    return None if value is None else int(_number(value, int))


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, found {type(value).__name__}")
    return value


def by_cluster(per_chunk: Sequence[Counts], cluster: Sequence[int], n_clusters: int) -> tuple[Counts, ...]:
    """Add the counts of the chunks of each cluster."""
    sums = [Counts() for _ in range(n_clusters)]
    for counts, index in zip(per_chunk, cluster, strict=True):
        sums[index] = sums[index] + counts
    return tuple(sums)

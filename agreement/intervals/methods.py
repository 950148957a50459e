"""Which interval is formed how, and which one `auto` takes.

The rule of `auto` rests on the coverage that `tests/benchmarks/coverage.py` measures; the table is in
`docs/intervals.md`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from agreement.errors import UsageError
from agreement.intervals import bootstrap, score
from agreement.intervals.clusters import t_quantile

if TYPE_CHECKING:
    from agreement.intervals.clusters import Float64Array, Ratios

Method = Literal["auto", "score", "korn-graubard", "adjusted-t", "log-t", "t", "studentised", "percentile", "bca"]
METHODS: tuple[Method, ...] = get_args(Method)
SHARE_METHODS: tuple[Method, ...] = tuple(name for name in METHODS if name != "log-t")
MEAN_METHODS: tuple[Method, ...] = tuple(name for name in METHODS if name not in {"score", "korn-graubard"})

# Largest Student quantile whose exponential still bounds something: at 95 % that takes five clusters, at 99 % fifteen.
LARGEST_LOG_QUANTILE = 3.0

# As reports print them.
NAMES = {
    "score": "score, adjusted t",
    "korn-graubard": "Korn-Graubard",
    "adjusted-t": "adjusted t",
    "log-t": "adjusted t, log scale",
    "t": "Student t",
    "studentised": "studentised bootstrap",
    "percentile": "percentile bootstrap",
    "bca": "BCa bootstrap",
    "exact": "exact, by clusters",
}


def share_ends(shares: Ratios, method: Method, plan: bootstrap.Resampling) -> tuple[Float64Array, Float64Array, Method]:
    """Return both (n_draws,) ends and the method used.

    The draws must have at least two clusters and a share inside (0, 1); where clusters do not differ, only score and
    korn-graubard have an interval.
    """
    used: Method = "score" if method == "auto" else method
    if used == "score":
        low, high = score.score(shares, confidence=plan.confidence)
    elif used == "korn-graubard":
        low, high = score.korn_graubard(shares, confidence=plan.confidence)
    else:
        low, high, used = mean_ends(shares, used, plan)
    return np.clip(low, 0.0, 1.0), np.clip(high, 0.0, 1.0), used


def mean_ends(
    means: Ratios, method: Method, plan: bootstrap.Resampling, *, bound: float | None = None
) -> tuple[Float64Array, Float64Array, Method]:
    """Return both (n_draws,) ends and the method used; the draws must have at least two clusters that differ.

    `auto` works on the logarithmic scale where there is a lower bound and enough clusters, else on the mean's own.
    """
    used = method
    if used == "auto":
        quantile = float(t_quantile(plan.confidence, means.n_clusters - 1.0))
        used = "log-t" if bound is not None and quantile <= LARGEST_LOG_QUANTILE else "adjusted-t"
    if used == "log-t":
        if bound is None:
            raise UsageError("`method` log-t needs `lower_bound`; give one, or take adjusted-t")
        low, high = score.log_student(means, confidence=plan.confidence, bound=bound)
    else:
        spare = t_ends(means, used, plan.confidence)
        low, high = resample((means,), bootstrap.identity, used, plan, spare=spare)
    return (low if bound is None else np.maximum(low, bound)), high, used


def t_ends(means: Ratios, method: Method, confidence: float) -> tuple[Float64Array, Float64Array]:
    """Return the (n_draws,) ends without resampling: plain for `t`, else adjusted."""
    return (score.student if method == "t" else score.adjusted_student)(means, confidence=confidence)


def resample(
    columns: tuple[Ratios, ...],
    statistic: bootstrap.Statistic,
    method: Method,
    plan: bootstrap.Resampling,
    *,
    spare: tuple[Float64Array, Float64Array],
) -> tuple[Float64Array, Float64Array]:
    """Return the ends of a bootstrap method, with those of `spare` wherever it has no finite answer.

    Methods that do not resample give `spare`, which must be the result of `t_ends`.
    """
    if method == "studentised":
        low, high = bootstrap.studentised(columns, statistic, plan)
    elif method in {"percentile", "bca"}:
        low, high = bootstrap.resampled(columns, statistic, "bca" if method == "bca" else "percentile", plan)
    else:
        return spare
    return np.where(np.isfinite(low), low, spare[0]), np.where(np.isfinite(high), high, spare[1])

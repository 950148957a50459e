"""What the estimating functions share: option checks, and the records that they return."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from agreement.errors import UsageError
from agreement.intervals.methods import NAMES
from agreement.records import Estimate

if TYPE_CHECKING:
    from agreement.intervals.clusters import Checked

DEFAULT_RESAMPLES = 1999

ONE_CLUSTER = "one cluster: no interval, nothing shows how clusters differ"
NO_SPREAD = "no interval: every cluster has the same value, nothing shows how clusters differ"


def check_options(confidence: float, n_resamples: int, method: str, *, allowed: tuple[str, ...]) -> None:
    """Raise UsageError for an option that is out of range."""
    if method not in allowed:
        raise UsageError(f"`method` must be one of {', '.join(allowed)}; found {method!r}")
    if not 0.0 < confidence < 1.0:
        raise UsageError(f"`confidence` must lie between 0 and 1, found {confidence:g}; 0.95 is usual")
    # Each tail must hold one resample: (n + 1) * (1 - confidence) / 2 >= 1, give or take rounding.
    least = math.ceil(2.0 / (1.0 - confidence) - 1e-6) - 1
    if n_resamples < least:
        if n_resamples != DEFAULT_RESAMPLES:
            raise UsageError(
                f"`n_resamples` must be at least {least} for confidence {confidence:g}, found {n_resamples}"
            )
        raise UsageError(
            f"`confidence` {confidence!r} is too high for {n_resamples} resamples; give at most "
            f"{1.0 - 2.0 / (n_resamples + 1):.6g}, or in Python `n_resamples` of at least {least}"
        )


def exponential(value: float) -> float:
    """Return the exponential of a mean loss in nats, or say that it is none."""
    try:
        return math.exp(value)
    except OverflowError:
        raise UsageError(f"a mean of {value:g} nats has no finite exponential; check how the sums were made") from None


def joined(*notes: str) -> str:
    """Return the notes that say something, as one."""
    return "; ".join(note for note in notes if note)


def without_interval(data: Checked, value: float, confidence: float, note: str) -> Estimate:
    """Return an estimate that says why it has no interval."""
    return Estimate(
        value=value,
        low=None,
        high=None,
        confidence=confidence,
        method="none",
        n_clusters=data.n_clusters,
        n_positions=data.n_positions,
        note=joined(note, data.note),
    )


def with_interval(
    data: Checked,
    value: float,
    ends: tuple[float, float],
    *,
    confidence: float,
    method: str,
    effect: float | None = None,
    note: str = "",
) -> Estimate:
    """Return an estimate whose interval contains it: a skewed bootstrap can leave its own estimate outside."""
    return Estimate(
        value=value,
        low=min(ends[0], value),
        high=max(ends[1], value),
        confidence=confidence,
        method=NAMES[method],
        n_clusters=data.n_clusters,
        n_positions=data.n_positions,
        # A design effect of zero (clusters that happen to be equal) would make the sample worth infinitely much.
        design_effect=effect or None,
        note=joined(note, data.note),
    )

"""Sums by cluster, checked once, and what follows from them without resampling.

A cluster is what was drawn at random: a document, or a chunk where chunks are not cut by document. Its positions
agree and disagree together, so only the spread *between* clusters says how sure an estimate is. Every estimate here
is a ratio of sums over clusters; the spread of a ratio comes from its linearised residuals (Cochran 1977, *Sampling
Techniques*, section 6.4).

Arrays named `(n_draws, n_clusters)` let one call serve many data sets at once: the public functions use one draw,
the coverage benchmark thousands, and both run the same lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from agreement.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

Float64Array = NDArray[np.float64]
Int64Array = NDArray[np.int64]


@dataclass(frozen=True)
class Ratios:
    """Per-cluster sums of one quantity over the same positions, for `n_draws` data sets at once.

    Attributes:
        sums: (n_draws, n_clusters) float64, the sum of the quantity in each cluster.
        counts: (n_draws, n_clusters) float64, scored positions in each cluster, each at least 1.
    """

    sums: Float64Array
    counts: Float64Array

    @property
    def n_clusters(self) -> int:
        """Clusters in each draw."""
        return int(self.sums.shape[1])

    @cached_property
    def total(self) -> Float64Array:
        """(n_draws,) scored positions."""
        total: Float64Array = self.counts.sum(axis=1)
        return total

    @cached_property
    def value(self) -> Float64Array:
        """(n_draws,) ratio of sums."""
        value: Float64Array = self.sums.sum(axis=1) / self.total
        return value

    @cached_property
    def residuals(self) -> Float64Array:
        """(n_draws, n_clusters) linearised residuals `sum - value * count`; they add to zero.

        What is left of equal clusters by rounding, some 1e-16 of the terms, is set to zero: it has no spread to
        estimate and no skewness.
        """
        expected = self.value[:, None] * self.counts
        residuals = self.sums - expected
        residuals[np.abs(residuals) <= 1e-12 * (np.abs(self.sums) + np.abs(expected))] = 0.0
        return residuals

    @property
    def varies(self) -> NDArray[np.bool_]:
        """(n_draws,) whether clusters differ."""
        varies: NDArray[np.bool_] = np.any(self.residuals != 0.0, axis=1)
        return varies

    @cached_property
    def variance(self) -> Float64Array:
        """(n_draws,) variance of `value` between clusters.

        Each squared residual is divided by `1 - share of positions`, which makes it unbiased for independent
        positions whatever the cluster sizes (the CR2 correction of Bell and McCaffrey 2002, *Survey Methodology* 28);
        with equal clusters it is the usual `k / (k - 1)`.
        """
        share = self.counts / self.total[:, None]
        variance: Float64Array = (self.residuals**2 / (1.0 - share)).sum(axis=1) / self.total**2
        return variance

    def degrees(self, correlation: Float64Array | float = 0.0) -> Float64Array:
        """Return the (n_draws,) degrees of freedom of `variance` for normal clusters (Satterthwaite).

        Equal clusters give `k - 1`; unequal ones fewer, since the large ones decide the variance.

        Args:
            correlation: Within-cluster correlation, one number or (n_draws,); the spread of a cluster's sum is
                taken as `count * (1 + (count - 1) * correlation)`.

        The variance is a quadratic form in independent cluster sums; its mean squared over half its variance is
        `tr(A)**2 / tr(A A)`. All traces are sums over clusters because the form is diagonal plus rank two.
        """
        rho = np.broadcast_to(np.asarray(correlation, dtype=np.float64), self.total.shape)[:, None]
        share = self.counts / self.total[:, None]
        spread = self.counts * (1.0 + (self.counts - 1.0) * rho)
        spread = spread / spread.sum(axis=1, keepdims=True)
        weight = 1.0 / (1.0 - share)
        tilt = spread - share / 2.0
        diagonal = spread - 2.0 * share * tilt
        trace = (weight * diagonal).sum(axis=1)
        cross = (weight * share**2).sum(axis=1) * (weight * tilt**2).sum(axis=1)
        cross = cross + (weight * share * tilt).sum(axis=1) ** 2
        square = (weight**2 * (spread**2 - 4.0 * spread * share * tilt)).sum(axis=1) + 2.0 * cross
        degrees: Float64Array = np.clip(trace**2 / square, 1.0, self.n_clusters - 1.0)
        return degrees


def t_quantile(confidence: float, degrees: Float64Array | float) -> Float64Array:
    """Return the two-sided Student t quantile of `confidence` for each number of degrees of freedom."""
    return np.asarray(stdtrit(degrees, 0.5 + confidence / 2.0), dtype=np.float64)


@dataclass(frozen=True)
class Checked:
    """Input of a public function after its checks.

    Attributes:
        columns: One (1, n_clusters) float64 array for each argument, empty clusters left out.
        counts: (1, n_clusters) float64.
        n_clusters: Clusters with at least one scored position.
        n_positions: Scored positions.
        n_dropped: Clusters without a scored position.
    """

    columns: tuple[Float64Array, ...]
    counts: Float64Array
    n_clusters: int
    n_positions: int
    n_dropped: int

    def ratios(self, column: int = 0) -> Ratios:
        """Return one column with the counts, as a batch of one draw."""
        return Ratios(self.columns[column], self.counts)

    @property
    def note(self) -> str:
        """What a reader must know of clusters that were left out; empty if none was."""
        if not self.n_dropped:
            return ""
        plural = "s" if self.n_dropped > 1 else ""
        return f"{self.n_dropped} cluster{plural} without a scored position left out"


def check(counts: ArrayLike, columns: Sequence[tuple[str, ArrayLike]]) -> Checked:
    """Check per-cluster input and leave out clusters without a scored position.

    Args:
        counts: (n_clusters,) whole numbers, scored positions in each cluster.
        columns: Name and (n_clusters,) values of each per-cluster sum.

    Returns:
        The input as float64, without empty clusters.

    Raises:
        UsageError: Shapes differ, a value is NaN or infinite, a count is negative or no whole number, a cluster
            without a scored position has a sum, or no position was scored at all.
    """
    n = _column("counts", counts)
    if np.any(n < 0) or np.any(n != np.floor(n)):
        bad = n[(n < 0) | (n != np.floor(n))][0]
        raise UsageError(f"`counts` must be whole numbers of at least 0, found {bad:g}; pass positions per cluster")
    arrays: list[Float64Array] = []
    for name, raw in columns:
        values = _column(name, raw)
        if values.shape != n.shape:
            raise UsageError(
                f"`{name}` has {values.size} clusters and `counts` has {n.size}; pass one value for each cluster"
            )
        stray = np.flatnonzero((n == 0) & (values != 0))
        if stray.size:
            raise UsageError(
                f"`{name}` is {values[stray[0]]:g} in cluster {stray[0]}, which has no scored position; "
                "check how the sums were made"
            )
        arrays.append(values)
    scored = n > 0
    if not np.any(scored):
        raise UsageError(f"no scored position in {n.size} clusters; score at least one chunk")
    return Checked(
        columns=tuple(values[scored][None, :] for values in arrays),
        counts=n[scored][None, :],
        n_clusters=int(scored.sum()),
        n_positions=int(n.sum()),
        n_dropped=int(n.size - scored.sum()),
    )


def _column(name: str, raw: ArrayLike) -> Float64Array:
    """Return `raw` as one-dimensional float64, or say what is wrong with it."""
    values = np.asarray(raw, dtype=np.float64)
    if values.ndim != 1:
        raise UsageError(f"`{name}` must have one dimension, found shape {values.shape}; pass one value a cluster")
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise UsageError(f"`{name}` is {values[bad[0]]} in cluster {bad[0]}; find the pass that made it, run it again")
    return values

"""One look at one run or at thousands: which side of the bound the agreement lies on, if that is safe to say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from agreement.errors import GateError
from agreement.intervals import score
from agreement.intervals.clusters import Float64Array, Int64Array, Ratios
from agreement.sequential.rules import LEAST_FACTOR, Rules

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

BoolArray = NDArray[np.bool_]


def unseen(shares: Ratios, bound: float, reach: float) -> Float64Array:
    """Return the (n_draws,) evidence against bad clusters that were not drawn.

    `prod(1 + (share - bound) / reach)`, each factor at least 0.1: the capital of a gambler who starts with 1 and each
    time stakes what a cluster `reach` below the bound would cost altogether. If the mean is the bound or less and no
    cluster lies more than `0.9 * reach` below it, the capital does not grow on average, so it ever reaches `c` with a
    chance of at most `1 / c` (Ville 1939, *Étude critique de la notion de collectif*; Waudby-Smith and Ramdas 2024,
    *JRSS B* 86). After `k` clusters with share `a` it is `(1 + (a - bound) / reach) ** k`: the higher they lie, the
    more bad clusters it would take to bring the mean down to the bound, and the less likely it is to have drawn none.

    Clusters count by their positions, in units of the cluster that a position drawn at random lies in.
    """
    size = (shares.counts**2).sum(axis=1) / shares.total
    gains = (shares.sums - bound * shares.counts) / (size[:, None] * reach)
    evidence: Float64Array = np.exp(np.log(np.maximum(1.0 + gains, LEAST_FACTOR)).sum(axis=1))
    return evidence


def ends(shares: Ratios, tail: float) -> tuple[Float64Array, Float64Array]:
    """Return the (n_draws,) ends of the gate's interval, each with a one-sided error of `tail`.

    The draws must have at least two clusters. Where all positions are alike, the exact bound by clusters.
    """
    low, high = score.score(shares, confidence=1.0 - 2.0 * tail)
    alike = score.all_alike(shares.n_clusters, 1.0 - tail)
    low = np.select([shares.value == 1.0, shares.value == 0.0], [alike, 0.0], np.clip(low, 0.0, shares.value))
    high = np.select([shares.value == 1.0, shares.value == 0.0], [1.0, 1.0 - alike], np.clip(high, shares.value, 1.0))
    return low, high


@dataclass(frozen=True)
class Looked:
    """What a look found; all arrays (n_draws,).

    Attributes:
        low: float64, low end of the interval at the look's confidence.
        high: float64, high end.
        unseen: float64, evidence against bad clusters that were not drawn.
        above: bool, the agreement is at least the bound.
        below: bool, it is less than the bound.
    """

    low: Float64Array
    high: Float64Array
    unseen: Float64Array
    above: BoolArray
    below: BoolArray


def judge_look(shares: Ratios, rules: Rules, look: int) -> Looked:
    """Judge all draws at the look with this index.

    Above: the whole interval is, and the evidence against unseen bad clusters suffices; or that evidence alone is as
    strong as the look asks of the interval, which with next to no disagreement is very wide.
    Below: the whole interval is.
    """
    tail = rules.tails[look]
    low, high = ends(shares, tail)
    evidence = unseen(shares, rules.bound, rules.reach)
    above = (low >= rules.bound) & (evidence >= rules.unseen_needed)
    above |= (shares.value >= rules.bound) & (evidence >= max(1.0 / tail, rules.unseen_needed))
    return Looked(low, high, evidence, above, (high < rules.bound) & ~above)


@dataclass(frozen=True)
class Ended:
    """How many runs ended.

    Attributes:
        side: (n_runs,) int64; 1 above the bound, -1 below, 0 undecided.
        clusters: (n_runs,) int64, clusters drawn.
    """

    side: Int64Array
    clusters: Int64Array


def run_many(n_agree: ArrayLike, n: ArrayLike, rules: Rules) -> Ended:
    """Play many runs, each with its clusters in the order of its row.

    Args:
        n_agree: (n_runs, max_clusters) whole numbers, positions that agree.
        n: (n_runs, max_clusters) whole numbers, scored positions, at least 1.
        rules: What was fixed beforehand.

    Raises:
        GateError: Arrays of another shape.
    """
    sums, counts = np.asarray(n_agree, dtype=np.float64), np.asarray(n, dtype=np.float64)
    if sums.ndim != 2 or sums.shape != counts.shape or sums.shape[1] != rules.max_clusters:
        raise GateError(f"counts of shape {sums.shape} and {counts.shape}; both need {rules.max_clusters} columns")
    side = np.zeros(len(sums), dtype=np.int64)
    clusters = np.full(len(sums), rules.max_clusters, dtype=np.int64)
    going = np.arange(len(sums))
    for look, k in enumerate(rules.looks):
        if going.size == 0:
            break
        found = judge_look(Ratios(sums[going, :k], counts[going, :k]), rules, look)
        ended = found.above | found.below
        side[going[found.above]], side[going[found.below]] = 1, -1
        clusters[going[ended]] = k
        going = going[~ended]
    return Ended(side, clusters)

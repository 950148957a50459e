"""What is fixed before the first cluster is drawn: when to look, and what each look asks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from agreement.errors import GateError
from agreement.intervals.clusters import Float64Array

DEFAULT_CLUSTERS = 60
# Fewer say too little of how clusters differ: the t quantile of a look at five would be 6.
FIRST_LOOK = 6
# More looks are more work and hardly earlier: a corpus of 120 clusters is looked at after every second one.
MOST_LOOKS = 60
# What the stake of `unseen` is measured by, as a fraction of positions: clusters down to nine tenths of it below the
# bound are provided for. That is 13.5 points, where one cluster in ten that is 15 points worse than the others lies.
REACH = 0.15

# Of the error allowed, what each side may spend; half would leave nothing for what t quantiles do not know.
SIDE_SHARE = 0.48
# The evidence against unseen bad clusters that "at least" takes, times the error allowed: 18 at 95 %.
UNSEEN_SCALE = 0.9
# What one cluster leaves of the evidence at least, however bad it is: once seen, it is in the interval. Without this,
# one cluster that is worse than provided for would rule out "at least" for good.
LEAST_FACTOR = 0.1


@dataclass(frozen=True)
class Rules:
    """What is fixed before the first cluster is drawn.

    Attributes:
        bound: The agreement that is tested, a fraction.
        confidence: One minus the allowed chance of a wrong verdict over the whole run.
        looks: Clusters after which there is a look, ascending; the last is the most clusters that are drawn.
        tails: For each look, the one-sided error at which its interval is made.
        reach: What the stake of `unseen` is measured by, a fraction of positions.
        unseen_needed: Least `unseen` evidence for "at least the bound".
    """

    bound: float
    confidence: float
    looks: tuple[int, ...]
    tails: tuple[float, ...]
    reach: float
    unseen_needed: float

    @property
    def max_clusters(self) -> int:
        """Most clusters that are drawn."""
        return self.looks[-1]

    @property
    def worst(self) -> float:
        """The least agreement that an unseen cluster is assumed to have."""
        return self.bound - (1.0 - LEAST_FACTOR) * self.reach

    @property
    def fewest_above(self) -> int:
        """Clusters that "at least the bound" takes even if every position agrees, looks aside."""
        return math.ceil(math.log(self.unseen_needed) / math.log1p((1.0 - self.bound) / self.reach) - 1e-9)


def make_rules(
    bound: float,
    *,
    confidence: float = 0.95,
    max_clusters: int = DEFAULT_CLUSTERS,
    first_look: int = FIRST_LOOK,
    every: int | None = None,
    reach: float = REACH,
) -> Rules:
    """Return the rules of a run.

    Args:
        bound: The agreement to test, a fraction inside (0, 1).
        confidence: Inside [0.5, 1); 0.9, 0.95 and 0.99 were simulated.
        max_clusters: Most clusters to draw, at least `first_look`.
        first_look: Clusters before the first look, at least 2.
        every: Clusters between looks; None for one, or as many as keep the looks at 60.
        reach: Nine tenths of it is how far below the bound an unseen cluster may lie, as a fraction of its positions.
            More is safer and slower.

    Raises:
        GateError: An argument out of range.
    """
    if not 0.0 < bound < 1.0:
        raise GateError(f"bound {bound!r} cannot be settled by a sample; give one above 0 % and below 100 %")
    if not 0.5 <= confidence < 1.0:
        raise GateError(f"confidence {confidence!r} is outside 50 % to 100 %; 95 % is usual")
    if first_look < 2 or (every is not None and every < 1):
        raise GateError(f"first look after {first_look} clusters, then every {every}: give at least 2 and 1")
    if max_clusters < first_look:
        raise GateError(
            f"{max_clusters} clusters are fewer than the {first_look} of the first look; give more text or do not use "
            "the sequential gate"
        )
    if not 0.0 < reach <= 1.0:
        raise GateError(f"reach {reach!r} is outside 0 % to 100 %; 15 % is usual")
    step = math.ceil(max_clusters / MOST_LOOKS)
    if every is not None and every < step:
        raise GateError(f"{max_clusters} clusters looked at every {every} are too many looks; look every {step}")
    looks = (*range(first_look, max_clusters, every or step), max_clusters)
    error = 1.0 - confidence
    tails = spend(looks, SIDE_SHARE * error)
    return Rules(bound, confidence, looks, tails, min(reach, bound), UNSEEN_SCALE / error)


@lru_cache(maxsize=64)
def spend(looks: tuple[int, ...], error: float) -> tuple[float, ...]:
    """Return the one-sided tail of each look that spends the error evenly over the clusters.

    The chance of having crossed at or before look `k` of `K` is `error * k / K` (Lan and DeMets 1983, *Biometrika* 70,
    with the linear function of Kim and DeMets 1987, *Biometrika* 74). The sum of `k` independent normal increments
    is followed by numerical integration over those paths that have not crossed (Armitage, McPherson and Rowe 1969,
    *JRSS A* 132).

    Args:
        looks: Clusters after which there is a look, ascending.
        error: One-sided error over all looks.
    """
    nodes, weights = np.polynomial.legendre.leggauss(max(32, math.ceil(20.0 * math.sqrt(len(looks)))))
    paths, mass, before, spent = np.zeros(1), np.ones(1), 0, 0.0
    tails = []
    for k in looks:
        step, root = math.sqrt(k - before), math.sqrt(k)
        goal = error * k / looks[-1] - spent
        edge = _crossing(paths, mass, step, goal, 9.0 * root)
        tails.append(_upper_tail(edge / root))
        low = -6.0 * root  # Further down lies 1e-9 of the paths.
        places = low + (nodes + 1.0) * (edge - low) / 2.0
        moves = (places[:, None] - paths[None, :]) / step
        density = np.exp(-0.5 * moves**2) @ mass / (step * math.sqrt(2.0 * math.pi))
        paths, mass = places, weights * (edge - low) / 2.0 * density
        before, spent = k, error * k / looks[-1]
    return tuple(tails)


def _crossing(paths: Float64Array, mass: Float64Array, step: float, goal: float, high: float) -> float:
    """Return the edge that the weighted paths, moved by a normal of this deviation, exceed with chance `goal`."""
    low = -high
    for _ in range(48):
        middle = (low + high) / 2.0
        above = math.fsum(m * _upper_tail((middle - x) / step) for x, m in zip(paths, mass, strict=True))
        low, high = (middle, high) if above > goal else (low, middle)
    return (low + high) / 2.0


def _upper_tail(z: float) -> float:
    """Return the chance that a standard normal exceeds `z`."""
    return 0.5 * math.erfc(z / math.sqrt(2.0))

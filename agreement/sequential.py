"""Counts of one cluster after another flow in, a verdict flows out as soon as it is safe; pure.

The gate's own interval is looked at again and again, each time at a confidence so much higher that all looks together
err no more often than one look of a fixed run. Saying "at least" takes one thing more: enough clusters to make it
unlikely that rare bad ones exist and none has been drawn. `docs/sequential.md` has the reasons,
`reports/sequential.md` the simulated errors.

`run_many` plays many runs at once for simulations; `SequentialTest` plays one. Both ask `judge_look`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from agreement.errors import GateError
from agreement.intervals import score
from agreement.intervals.clusters import Ratios
from agreement.records import Estimate, Judgement, Requirement, Verdict

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

BoolArray = NDArray[np.bool_]
Float64Array = NDArray[np.float64]
Int64Array = NDArray[np.int64]
Side = Literal["above", "below"]

METHOD = "group sequential, score"
DEFAULT_CLUSTERS = 60
# Fewer say too little of how clusters differ: the t quantile that a look at five would need is above 5.
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


@dataclass(frozen=True)
class State:
    """Where a run stands.

    Attributes:
        clusters: Clusters with a scored position so far.
        max_clusters: Most clusters that are drawn.
        positions: Scored positions so far.
        agreement: Agreement so far, a fraction; None before the first position.
        low: Low end of the last look's interval; None before the first look.
        high: Its high end.
        look_confidence: Confidence of that interval taken alone; None before the first look.
        unseen: Evidence against bad clusters that were not drawn, at the last look.
        unseen_needed: Least such evidence for "at least the bound".
        next_look: Clusters at the next look; None after the last.
        verdict: None while the run goes on.
    """

    clusters: int
    max_clusters: int
    positions: int
    agreement: float | None
    low: float | None
    high: float | None
    look_confidence: float | None
    unseen: float | None
    unseen_needed: float
    next_look: int | None
    verdict: Verdict | None


class SequentialTest:
    """One requirement, judged while its clusters arrive.

    The clusters must come in random order, drawn before any of them was scored.

    Args:
        requirement: On `agreement`; its own confidence counts before the argument.
        max_clusters: Most clusters that will be drawn.
        confidence: One minus the allowed chance of a wrong verdict over the whole run, where the requirement does not
            say.
        first_look: See `make_rules`.
        every: See `make_rules`.
        reach: See `make_rules`.

    Raises:
        GateError: Another metric, a comparison with an earlier report, an argument out of range, or a requirement that
            could not pass even if every position went its way.
    """

    def __init__(
        self,
        requirement: Requirement,
        *,
        max_clusters: int = DEFAULT_CLUSTERS,
        confidence: float = 0.95,
        first_look: int = FIRST_LOOK,
        every: int | None = None,
        reach: float = REACH,
    ) -> None:
        if requirement.metric != "agreement" or requirement.against:
            raise GateError(
                f"requirement '{requirement}': the sequential gate judges agreement against a fixed bound only; "
                "leave it out, or judge a whole run"
            )
        self.requirement = requirement
        self.rules = make_rules(
            requirement.bound,
            confidence=confidence if requirement.confidence is None else requirement.confidence,
            max_clusters=max_clusters,
            first_look=first_look,
            every=every,
            reach=reach,
        )
        if requirement.op == ">=" and self.rules.fewest_above > max_clusters:
            raise GateError(
                f"requirement '{requirement}': passing takes {self.rules.fewest_above} clusters even if every position "
                f"agrees, and there are {max_clusters}; give more text, or judge a whole run"
            )
        self._sums: list[int] = []
        self._counts: list[int] = []
        self._looked: Looked | None = None
        self._look = -1
        self._verdict: Verdict | None = None

    def update(self, n_agree: int, n: int) -> Verdict | None:
        """Take the next cluster's counts; a cluster without a scored position is left out.

        Args:
            n_agree: Positions that agree with the baseline.
            n: Scored positions.

        Returns:
            The verdict, or None to go on.

        Raises:
            GateError: Counts that cannot be, or a cluster after the verdict.
        """
        if self._verdict is not None:
            raise GateError(f"a cluster after the verdict {self._verdict.value}; start another test for more")
        if not 0 <= n_agree <= n:
            raise GateError(f"{n_agree} of {n} positions agree; count again")
        if n == 0:
            return None
        self._sums.append(n_agree)
        self._counts.append(n)
        k = len(self._sums)
        if k not in self.rules.looks:
            return None
        self._look = self.rules.looks.index(k)
        self._looked = judge_look(self._shares(), self.rules, self._look)
        if self._looked.above[0]:
            self._verdict = self._on("above")
        elif self._looked.below[0]:
            self._verdict = self._on("below")
        elif k == self.rules.max_clusters:
            self._verdict = Verdict.INCONCLUSIVE
        return self._verdict

    def finish(self) -> Verdict:
        """Return the verdict, inconclusive if the text ended before there was one."""
        if self._verdict is None:
            self._verdict = Verdict.INCONCLUSIVE
        return self._verdict

    @property
    def state(self) -> State:
        """Where the run stands."""
        looked, k, rules = self._looked, len(self._sums), self.rules
        later = [look for look in rules.looks if look > k]
        return State(
            clusters=k,
            max_clusters=rules.max_clusters,
            positions=sum(self._counts),
            agreement=sum(self._sums) / sum(self._counts) if k else None,
            low=None if looked is None else float(looked.low[0]),
            high=None if looked is None else float(looked.high[0]),
            look_confidence=None if looked is None else 1.0 - 2.0 * rules.tails[self._look],
            unseen=None if looked is None else float(looked.unseen[0]),
            unseen_needed=rules.unseen_needed,
            next_look=later[0] if later and self._verdict is None else None,
            verdict=self._verdict,
        )

    @property
    def assumption(self) -> str:
        """What the verdict rests on, for the output."""
        rules = self.rules
        return (
            f"sequential: a wrong verdict in at most {1.0 - rules.confidence:.3g} of runs is simulated, not proven; "
            "assumed: documents come in random order, and hardly any agrees less than "
            f"{100.0 * rules.worst:.4g}% ({100.0 * (rules.bound - rules.worst):.3g} points below the bound)"
        )

    def judgement(self) -> Judgement:
        """Return the verdict as the gate gives it, with the last look's interval.

        That interval holds the truth at all looks together with the confidence of the run. The value is that of all
        clusters taken; since the run stops when it is far from the bound, it errs on that side.

        Raises:
            GateError: There is no verdict yet, or no scored position.
        """
        state = self.state
        if self._verdict is None or state.agreement is None:
            raise GateError(f"no verdict after {state.clusters} clusters; go on, or finish")
        effect = float(score.design_effect(self._shares())[0]) if state.clusters > 1 else math.nan
        # Clusters that were taken after the last look moved the value but not the interval.
        estimate = Estimate(
            value=state.agreement,
            low=None if state.low is None else min(state.low, state.agreement),
            high=None if state.high is None else max(state.high, state.agreement),
            confidence=self.rules.confidence,
            method=METHOD,
            n_clusters=state.clusters,
            n_positions=state.positions,
            design_effect=effect if effect > 0.0 else None,
            note=self.assumption,
        )
        return Judgement(self.requirement, estimate, self._verdict, None, self._reason(state))

    def _shares(self) -> Ratios:
        """Return the counts so far as a batch of one draw."""
        return Ratios(np.array([self._sums], dtype=np.float64), np.array([self._counts], dtype=np.float64))

    def _on(self, side: Side) -> Verdict:
        """Return the verdict of a side."""
        return Verdict.PASS if (side == "above") == (self.requirement.op == ">=") else Verdict.FAIL

    def _reason(self, state: State) -> str:
        """Return one clause for people."""
        taken = f"after {state.clusters} of at most {state.max_clusters} clusters"
        if self._verdict is not Verdict.INCONCLUSIVE:
            side = "at or above" if self._looked is not None and self._looked.above[0] else "below"
            return f"agreement is {side} the bound, safely so {taken}"
        if state.low is None:
            return f"the text ended {taken}, before the first look at {self.rules.looks[0]}"
        if state.low >= self.rules.bound:
            return f"the interval is above the bound {taken}, but rare bad documents may not have been seen yet"
        return f"the bound lies within the interval {taken}; judge a whole run of more text"

"""One requirement, judged while its clusters arrive."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from agreement.errors import GateError
from agreement.intervals import score
from agreement.intervals.clusters import Ratios
from agreement.records import Estimate, Judgement, Requirement, Verdict
from agreement.sequential.looks import Looked, judge_look
from agreement.sequential.rules import DEFAULT_CLUSTERS, FIRST_LOOK, REACH, make_rules

METHOD = "group sequential, score"

Side = Literal["above", "below"]


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
        error = 100.0 * (1.0 - rules.confidence)
        return (
            f"sequential: by simulation, not by proof, at most {error:.3g}% of runs give a wrong verdict, "
            f"{1.4 * error:.3g}% if one document in ten is much worse; assumed: documents come in random order, and "
            f"hardly any agrees less than {100.0 * rules.worst:.4g}% "
            f"({100.0 * (rules.bound - rules.worst):.3g} points below the bound)"
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

"""Tokens to the first divergence: what agreement makes one expect, and what was measured.

Whoever decodes greedily from some place gets the baseline's tokens up to the first at which the argmaxes differ. The
recordings hold both argmaxes at every position of the same text, so the number of tokens up to and including the
first difference can be read off from any start, unless the chunk ends before: then it is only known to be more.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from agreement import intervals
from agreement.breakdown.positions import BoolArray, Positions
from agreement.breakdown.results import Options, RunLength, RunLengths
from agreement.records import Estimate

_QUARTERS = (0.25, 0.5, 0.75)
# The product of shares that makes the survival curve may miss an exact quarter by rounding.
_ROUNDING = 1e-12


def run_lengths(scored: Positions, options: Options) -> RunLengths:
    """Return the expected and the measured tokens to the first divergence."""
    tokens, seen = to_first_difference(scored.agree)
    after = np.zeros_like(seen)
    after[:, 1:] = ~scored.agree[:, :-1]
    n = scored.sums()[0]
    agreement = intervals.proportion(
        scored.sums(scored.agree)[0], n, rng=options.rng("runs"), confidence=options.confidence
    )
    return RunLengths(
        expected=expected_length(agreement),
        anywhere=kaplan_meier(tokens.ravel(), seen.ravel()),
        after_difference=kaplan_meier(tokens[after], seen[after]) if after.any() else None,
    )


def expected_length(agreement: Estimate) -> Estimate:
    """Return `1 / (1 - agreement)`: the mean of a geometric distribution, if positions agreed independently."""

    def length(share: float) -> float:
        return math.inf if share >= 1.0 else 1.0 / (1.0 - share)

    return replace(
        agreement,
        value=length(agreement.value),
        low=None if agreement.low is None else length(agreement.low),
        high=None if agreement.high is None else length(agreement.high),
        design_effect=None,
    )


def to_first_difference(agree: BoolArray) -> tuple[NDArray[np.intp], BoolArray]:
    """Return for every position the tokens from it up to and including the first difference in its chunk.

    Args:
        agree: (n_chunks, n_scored) bool.

    Returns:
        (n_chunks, n_scored) tokens, at least 1, and whether the difference was seen; where it was not, the tokens up
        to the chunk's end, none of which differs.
    """
    n_scored = agree.shape[1]
    place = np.arange(n_scored)
    own = np.where(agree, n_scored, place)  # n_scored stands for: not within the chunk
    following = np.minimum.accumulate(own[:, ::-1], axis=1)[:, ::-1]
    seen: BoolArray = following < n_scored
    tokens = np.where(seen, following - place + 1, n_scored - place)
    return tokens.astype(np.intp), seen


def kaplan_meier(tokens: NDArray[np.intp], seen: BoolArray) -> RunLength:
    """Summarise lengths of which some are cut short (Kaplan and Meier 1958, *JASA* 53).

    The share of starts still without a difference after `t` tokens is the product over `k <= t` of
    `1 - differences at k / starts followed for at least k tokens`; a start cut at `c` counts up to and including `c`.

    Args:
        tokens: (n,) lengths, each at least 1; n is at least 1.
        seen: (n,) whether the length ended in a difference.
    """
    longest = int(tokens.max())
    ended = np.bincount(tokens[seen], minlength=longest + 1)[1:]
    followed = np.bincount(tokens, minlength=longest + 1)[:0:-1].cumsum()[::-1]
    survival = np.cumprod(1.0 - ended / followed)
    reached = [np.flatnonzero(survival <= 1.0 - quarter + _ROUNDING) for quarter in _QUARTERS]
    first, second, third = (int(found[0]) + 1 if found.size else None for found in reached)
    return RunLength(
        n_starts=len(tokens),
        n_cut=int((~seen).sum()),
        longest=longest,
        # The mean of a whole number from 1 on is the sum of the shares above 0, 1, 2, ...
        mean=1.0 + float(survival[:-1].sum()),
        open_ended=bool(survival[-1] > 0.0),
        quartiles=(first, second, third),
    )

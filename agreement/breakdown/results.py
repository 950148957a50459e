"""The frozen records of a breakdown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from agreement.records import Estimate

Part = Literal["margin", "position", "document", "flips", "dp", "kld", "runs"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True)
class Options:
    """How intervals are formed.

    Attributes:
        confidence: Nominal coverage.
        seed: Seeds interval methods that resample.
    """

    confidence: float = 0.95
    seed: int = 0

    def rng(self, part: Part, index: int = 0) -> np.random.Generator:
        """Return a generator of its own for each estimate, so that leaving parts out changes no number."""
        return np.random.default_rng([self.seed, 100 + PARTS.index(part), index])


@dataclass(frozen=True)
class Bin:
    """The positions whose margin, or whose place in the chunk, lies between two edges.

    Attributes:
        low: Lower edge. A margin bin leaves it out, but for the first; a position bin contains it.
        high: Upper edge. A margin bin contains it; a position bin leaves it out.
        n: Scored positions.
        n_agree: Those at which both argmaxes are the same token.
        agreement: Share of `n_agree` in `n`, with an interval by clusters.
        kld: Mean KL divergence baseline‖setting, nats, with an interval by clusters (and truncation, where only the
            top was recorded).
    """

    low: float
    high: float
    n: int
    n_agree: int
    agreement: Estimate
    kld: Estimate


@dataclass(frozen=True)
class DocumentRow:
    """One cluster; it has no interval, because a single cluster does not show how clusters differ.

    Attributes:
        name: The cluster's name.
        n: Scored positions.
        n_agree: Those at which both argmaxes are the same token.
        kld_low: Mean of the lower bounds of the KL divergence, nats; the mean itself where the recording is full.
        kld_high: Mean of the upper bounds, nats.
    """

    name: str
    n: int
    n_agree: int
    kld_low: float
    kld_high: float

    @property
    def agreement(self) -> float:
        """Share of positions that agree."""
        return self.n_agree / self.n


@dataclass(frozen=True)
class Flips:
    """Answers that became right or wrong on the true next token; the five counts add up to all positions.

    Attributes:
        n_both_right: Baseline and setting predict the true token.
        n_right_to_wrong: The baseline does, the setting does not.
        n_wrong_to_right: The reverse.
        n_wrong_same: Both predict the same wrong token.
        n_wrong_changed: They predict different wrong tokens.
        right_to_wrong: Share of `n_right_to_wrong` in all positions.
        wrong_to_right: Share of `n_wrong_to_right` in all positions.
        wrong_changed: Share of `n_wrong_changed` in all positions.
        base_accuracy: Share of positions at which the baseline is right.
        test_accuracy: The same for the setting.
        difference: Accuracy of the setting minus that of the baseline, paired by cluster.
    """

    n_both_right: int
    n_right_to_wrong: int
    n_wrong_to_right: int
    n_wrong_same: int
    n_wrong_changed: int
    right_to_wrong: Estimate
    wrong_to_right: Estimate
    wrong_changed: Estimate
    base_accuracy: Estimate
    test_accuracy: Estimate
    difference: Estimate


@dataclass(frozen=True)
class Quantile:
    """A quantile over positions, without an interval.

    Attributes:
        share: Which one: 0.5 is the median, 0 the minimum, 1 the maximum.
        low: Its value; for KLD of a recording of the top only, that of the lower bounds.
        high: Equal to `low`, or the quantile of the upper bounds: the true one lies between them.
    """

    share: float
    low: float
    high: float


@dataclass(frozen=True)
class DeltaP:
    """Change of the true next token's probability, setting minus baseline, as fractions.

    Attributes:
        mean: Over positions, with an interval by clusters.
        rms: Root of the mean square over positions; its interval is that of the mean square, through the root.
        quantiles: Highest first, over positions.
    """

    mean: Estimate
    rms: Estimate
    quantiles: tuple[Quantile, ...]


@dataclass(frozen=True)
class Place:
    """One scored position.

    Attributes:
        document: Name of its cluster.
        chunk: Index of its chunk in the run.
        position: Its place in the chunk, counted from 0 at the chunk's first token.
        target: Id of the true next token.
        base_top: Id of the baseline's argmax.
        test_top: Id of the setting's argmax.
    """

    document: str
    chunk: int
    position: int
    target: int
    base_top: int
    test_top: int


@dataclass(frozen=True)
class KldQuantiles:
    """How KL divergence baseline‖setting is distributed, nats.

    Attributes:
        mean: Over positions, with an interval by clusters.
        quantiles: Highest first, over positions; the first is the maximum.
        worst: Where the maximum is: of equal ones the first; where the recording holds bounds, the position with the
            largest lower bound.
    """

    mean: Estimate
    quantiles: tuple[Quantile, ...]
    worst: Place


@dataclass(frozen=True)
class RunLength:
    """Tokens from a start up to and including the first that differs, by Kaplan and Meier's estimate.

    Attributes:
        n_starts: Starts counted.
        n_cut: Those that met the end of their chunk before any difference.
        longest: Most tokens that any start could be followed for and was.
        mean: Mean tokens; if `open_ended`, only of the part up to `longest`, so the mean is at least this.
        open_ended: Whether the estimate still has starts without a difference at `longest`.
        quartiles: At 25, 50 and 75 %: the least number of tokens within which that share of starts has met a
            difference; None if it is more than `longest`.
    """

    n_starts: int
    n_cut: int
    longest: int
    mean: float
    open_ended: bool
    quartiles: tuple[int | None, int | None, int | None]


@dataclass(frozen=True)
class RunLengths:
    """Tokens to the first divergence, expected and measured.

    Attributes:
        expected: `1 / (1 - agreement)` with the ends of agreement's interval put through the same formula: what the
            mean would be if differences fell independently. Infinite where none was seen.
        anywhere: Measured, from every scored position as a start.
        after_difference: Measured, from the positions that follow a difference inside a chunk: the agreeing runs
            between differences. None if there is no such position.
    """

    expected: Estimate
    anywhere: RunLength
    after_difference: RunLength | None


@dataclass(frozen=True)
class Breakdown:
    """What one setting changes, and where; a part that was not asked for is None.

    Attributes:
        title: The run's name.
        setting: The setting's name.
        n_positions: Scored positions.
        n_chunks: Chunks.
        n_clusters: Clusters with at least one chunk.
        n_agree: Positions at which both argmaxes are the same token.
        n_ambiguous: Positions where the stored baseline cannot tell its two best tokens apart.
        confidence: Nominal coverage of every interval.
        margin: Bins of the baseline's top-1 minus top-2 log-probability, nats, of as nearly equal counts as ties allow.
        position: Bins of the position in the chunk, of as nearly equal width as can be.
        document: One a cluster, lowest agreement first, of equal ones the highest KLD.
        flips: Answers that became right or wrong.
        dp: Change of the true token's probability.
        kld: Distribution of the KL divergence.
        runs: Tokens to the first divergence.
    """

    title: str
    setting: str
    n_positions: int
    n_chunks: int
    n_clusters: int
    n_agree: int
    n_ambiguous: int
    confidence: float
    margin: tuple[Bin, ...] | None = None
    position: tuple[Bin, ...] | None = None
    document: tuple[DocumentRow, ...] | None = None
    flips: Flips | None = None
    dp: DeltaP | None = None
    kld: KldQuantiles | None = None
    runs: RunLengths | None = None

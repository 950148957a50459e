"""Agreement and KL divergence of groups of positions: by baseline margin, by place in the chunk, by document."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agreement import intervals
from agreement.breakdown.positions import Positions
from agreement.breakdown.results import Bin, DocumentRow, Options, Part
from agreement.records import Float32Array


def margin_bins(margin: Float32Array, bins: int) -> tuple[list[float], NDArray[np.intp]]:
    """Cut margins at their quantiles.

    The upper edge of bin `i` (from 1) is the `ceil(n * i / bins)`-th smallest margin, and a bin is `(low, high]`: with
    no ties the counts differ by at most one. Equal margins are never parted, so with ties bins may be fewer and
    unequal. Edges are margins that occurred; interpolated ones would have no meaning where a margin is infinite.

    Args:
        margin: Margins, any shape, at least one.
        bins: Bins wanted, at least 1.

    Returns:
        Edges, one more than there are bins, the first the least margin (which bin 0 contains); and each margin's bin,
        of the shape of `margin`.
    """
    ordered = np.sort(margin, axis=None)
    n = ordered.size
    upper = np.unique(ordered[[-(-n * i // bins) - 1 for i in range(1, bins + 1)]])
    edges = [float(ordered[0]), *upper.tolist()]
    return edges, np.searchsorted(upper, margin, side="left")


def by_margin(scored: Positions, bins: int, options: Options) -> tuple[Bin, ...]:
    """Return the bins of the baseline's margin, most doubtful first."""
    edges, group = margin_bins(scored.margin, bins)
    return _bins(scored, edges, group, "margin", options)


def by_position(scored: Positions, bins: int, options: Options) -> tuple[Bin, ...]:
    """Return the bins of the position in the chunk, `[low, high)`, earliest first; at most one a position."""
    bins = min(bins, scored.n_scored)
    starts = [scored.n_scored * i // bins for i in range(bins + 1)]
    column = np.searchsorted(np.array(starts[1:]), np.arange(scored.n_scored), side="right")
    group = np.broadcast_to(column, scored.target.shape)
    return _bins(scored, [float(scored.first + start) for start in starts], group, "position", options)


def by_document(scored: Positions) -> tuple[DocumentRow, ...]:
    """Return one row a cluster that has chunks, lowest agreement first, of equal ones the highest KLD, then by name."""
    n, agree = scored.sums()[0], scored.sums(scored.agree)[0]
    low, high = scored.sums(scored.kld_low)[0], scored.sums(scored.kld_high)[0]
    rows = [
        DocumentRow(name, int(n[i]), int(agree[i]), float(low[i] / n[i]), float(high[i] / n[i]))
        for i, name in enumerate(scored.cluster_names)
        if n[i]
    ]
    return tuple(sorted(rows, key=lambda row: (row.agreement, -(row.kld_low + row.kld_high), row.name)))


def _bins(
    scored: Positions, edges: Sequence[float], group: NDArray[np.intp], part: Part, options: Options
) -> tuple[Bin, ...]:
    """Estimate each group from its counts by cluster; clusters without a position in it are left out."""
    n_bins = len(edges) - 1
    n = scored.sums(None, group, n_bins)
    agree = scored.sums(scored.agree, group, n_bins)
    low, high = scored.sums(scored.kld_low, group, n_bins), scored.sums(scored.kld_high, group, n_bins)
    result = []
    for i in range(n_bins):
        rng = options.rng(part, i)
        result.append(
            Bin(
                low=edges[i],
                high=edges[i + 1],
                n=int(n[i].sum()),
                n_agree=int(agree[i].sum()),
                agreement=intervals.proportion(agree[i], n[i], rng=rng, confidence=options.confidence),
                kld=intervals.bounded_mean(
                    low[i], high[i], n[i], rng=rng, lower_bound=0.0, confidence=options.confidence
                ),
            )
        )
    return tuple(result)

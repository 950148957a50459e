"""Where the changes are: by margin, position and document, and as flips, KLD quantiles and run lengths.

In: the stored position scores of one setting.  Out: a `Breakdown`, whose parts are computed by pure functions on
arrays; `load_positions` alone reads files.
"""

from __future__ import annotations

from agreement.breakdown.changes import delta_p, flips, kld_quantiles
from agreement.breakdown.groups import by_document, by_margin, by_position
from agreement.breakdown.positions import Positions, load_positions, positions
from agreement.breakdown.results import PARTS, Breakdown, Options, Part
from agreement.breakdown.streaks import run_lengths
from agreement.errors import UsageError

__all__ = [
    "PARTS",
    "Breakdown",
    "Options",
    "Part",
    "Positions",
    "break_down",
    "by_document",
    "by_margin",
    "by_position",
    "delta_p",
    "flips",
    "kld_quantiles",
    "load_positions",
    "positions",
    "run_lengths",
]

DEFAULT_BINS = 4


def break_down(
    scored: Positions,
    *,
    parts: tuple[Part, ...] = PARTS,
    bins: int = DEFAULT_BINS,
    confidence: float = 0.95,
    seed: int = 0,
) -> Breakdown:
    """Return the parts asked for of one setting's scores.

    Args:
        scored: The scores.
        parts: Which of `PARTS` to compute.
        bins: Bins of the margin and of the position.
        confidence: Nominal coverage of every interval.
        seed: Seeds interval methods that resample.

    Raises:
        UsageError: An unknown part, fewer than one bin, or a confidence outside (0, 1).
    """
    unknown = sorted(set(parts) - set(PARTS))
    if unknown:
        raise UsageError(f"`parts` has {unknown[0]!r}, which is none of {', '.join(PARTS)}")
    if bins < 1:
        raise UsageError(f"`bins` is {bins}; give at least 1")
    if not 0.0 < confidence < 1.0:  # also where no part asked for has an interval
        raise UsageError(f"`confidence` must lie between 0 and 1, found {confidence:g}; 0.95 is usual")
    options = Options(confidence, seed)
    return Breakdown(
        title=scored.title,
        setting=scored.setting,
        n_positions=scored.n_positions,
        n_chunks=scored.n_chunks,
        n_clusters=len(set(scored.cluster.tolist())),
        n_agree=int(scored.agree.sum()),
        n_ambiguous=scored.n_ambiguous,
        confidence=confidence,
        margin=by_margin(scored, bins, options) if "margin" in parts else None,
        position=by_position(scored, bins, options) if "position" in parts else None,
        document=by_document(scored) if "document" in parts else None,
        flips=flips(scored, options) if "flips" in parts else None,
        dp=delta_p(scored, options) if "dp" in parts else None,
        kld=kld_quantiles(scored, options) if "kld" in parts else None,
        runs=run_lengths(scored, options) if "runs" in parts else None,
    )

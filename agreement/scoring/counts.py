"""Per-position scores of a chunk, and their sums.

In: what the recording and a pass say of the same positions.  Out: `PositionScores` and `Counts`.
"""

from __future__ import annotations

import numpy as np

from agreement.records import Counts, PositionScores
from agreement.scoring.baseline import BaselineRows
from agreement.scoring.compare import RowScores


def position_scores(base: BaselineRows, test: RowScores) -> PositionScores:
    """Lay the baseline and a setting side by side at the same positions; everything exact."""
    margin = (
        base.top_logprobs[:, 0] - base.top_logprobs[:, 1]
        if base.top_logprobs.shape[1] > 1
        else np.full(len(base.target), np.inf, np.float32)
    )
    return PositionScores(
        base_top=base.top_ids[:, 0],
        base_target_logprob=base.target_logprob,
        base_margin=margin,
        test_top=test.top,
        test_target_logprob=test.target_logprob,
        kld_low=test.kld_low,
        kld_high=test.kld_high,
        target=base.target,
        ambiguous=np.zeros(len(base.target), np.bool_) if base.ambiguous is None else base.ambiguous,
    )


def count_chunk(scores: PositionScores) -> Counts:
    """Sum the scores of one chunk, in float64.

    Flips and the change of the true token's probability are those of llama-perplexity's KL divergence report; flips
    as a measure of their own come from Dutta et al. 2024, "Accuracy is not all you need".
    """
    base_right = scores.base_top == scores.target
    test_right = scores.test_top == scores.target
    dp = np.exp(scores.test_target_logprob.astype(np.float64)) - np.exp(scores.base_target_logprob.astype(np.float64))
    return Counts(
        n=len(scores.target),
        n_agree=int((scores.base_top == scores.test_top).sum()),
        nll_base=-float(scores.base_target_logprob.sum(dtype=np.float64)),
        nll_test=-float(scores.test_target_logprob.sum(dtype=np.float64)),
        kld_low=float(scores.kld_low.sum(dtype=np.float64)),
        kld_high=float(scores.kld_high.sum(dtype=np.float64)),
        n_base_right=int(base_right.sum()),
        n_test_right=int(test_right.sum()),
        n_right_to_wrong=int((base_right & ~test_right).sum()),
        n_wrong_to_right=int((~base_right & test_right).sum()),
        dp=float(dp.sum()),
        dp_squared=float((dp**2).sum()),
        n_ambiguous=int(scores.ambiguous.sum()),
    )

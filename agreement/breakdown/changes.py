"""What changes over all positions: flips, the true token's probability, and the distribution of KL divergence."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from agreement import intervals
from agreement.breakdown.positions import BoolArray, Positions
from agreement.breakdown.results import DeltaP, Flips, KldQuantiles, Options, Place, Quantile
from agreement.records import Estimate

# llama-perplexity's, highest first.
DP_SHARES = (1.0, 0.999, 0.99, 0.95, 0.9, 0.75, 0.5, 0.25, 0.1, 0.05, 0.01, 0.001, 0.0)
KLD_SHARES = (1.0, 0.999, 0.99, 0.95, 0.9, 0.5)


def flips(scored: Positions, options: Options) -> Flips:
    """Count answers that became right or wrong, and compare both accuracies.

    Accuracy can stand still while many answers move, when as many become right as become wrong (Dutta et al. 2024,
    "Accuracy is not all you need").
    """
    base_right, test_right = scored.base_top == scored.target, scored.test_top == scored.target
    agree = scored.agree
    n = scored.sums()[0]

    def share(which: BoolArray, index: int) -> Estimate:
        found = intervals.proportion(
            scored.sums(which)[0], n, rng=options.rng("flips", index), confidence=options.confidence
        )
        if found.value in {0.0, 1.0} and found.high is not None:
            # The note speaks of positions that agree; here the share is of something else.
            seen = "none seen" if found.value == 0.0 else "all positions"
            return replace(found, note=f"{seen}: one-sided bound from {found.n_clusters} clusters")
        return found

    right_to_wrong, wrong_to_right = base_right & ~test_right, ~base_right & test_right
    both_wrong = ~base_right & ~test_right
    return Flips(
        n_both_right=int((base_right & test_right).sum()),
        n_right_to_wrong=int(right_to_wrong.sum()),
        n_wrong_to_right=int(wrong_to_right.sum()),
        n_wrong_same=int((both_wrong & agree).sum()),
        n_wrong_changed=int((both_wrong & ~agree).sum()),
        right_to_wrong=share(right_to_wrong, 0),
        wrong_to_right=share(wrong_to_right, 1),
        wrong_changed=share(both_wrong & ~agree, 2),
        base_accuracy=share(base_right, 3),
        test_accuracy=share(test_right, 4),
        difference=intervals.difference(
            scored.sums(test_right)[0],
            scored.sums(base_right)[0],
            n,
            rng=options.rng("flips", 5),
            limit=1.0,
            confidence=options.confidence,
        ),
    )


def delta_p(scored: Positions, options: Options) -> DeltaP:
    """Return mean, root mean square and quantiles of the change of the true token's probability."""
    n = scored.sums()[0]
    square = scored.dp**2
    mean = intervals.mean(
        scored.sums(scored.dp)[0],
        n,
        rng=options.rng("dp", 0),
        squares=scored.sums(square)[0],
        confidence=options.confidence,
    )
    mean_square = intervals.mean(
        scored.sums(square)[0], n, rng=options.rng("dp", 1), lower_bound=0.0, confidence=options.confidence
    )
    rms = replace(
        mean_square,
        value=math.sqrt(mean_square.value),
        low=None if mean_square.low is None else math.sqrt(mean_square.low),
        high=None if mean_square.high is None else math.sqrt(mean_square.high),
    )
    values = np.quantile(scored.dp, DP_SHARES).tolist()
    return DeltaP(mean, rms, tuple(Quantile(q, x, x) for q, x in zip(DP_SHARES, values, strict=True)))


def kld_quantiles(scored: Positions, options: Options) -> KldQuantiles:
    """Return mean, quantiles and the place of the maximum of the KL divergence.

    Quantiles are interpolated between the two nearest positions at `share * (n - 1)`, as in llama-perplexity. Of
    bounds, they are bounds: raising every value of a sample lowers none of its quantiles.
    """
    mean = intervals.bounded_mean(
        scored.sums(scored.kld_low)[0],
        scored.sums(scored.kld_high)[0],
        scored.sums()[0],
        rng=options.rng("kld"),
        lower_bound=0.0,
        confidence=options.confidence,
    )
    low, high = (np.quantile(k.astype(np.float64), KLD_SHARES).tolist() for k in (scored.kld_low, scored.kld_high))
    chunk, column = divmod(int(scored.kld_low.argmax()), scored.n_scored)
    worst = Place(
        document=scored.cluster_names[int(scored.cluster[chunk])],
        chunk=chunk,
        position=scored.first + column,
        target=int(scored.target[chunk, column]),
        base_top=int(scored.base_top[chunk, column]),
        test_top=int(scored.test_top[chunk, column]),
    )
    return KldQuantiles(mean, tuple(Quantile(q, a, b) for q, a, b in zip(KLD_SHARES, low, high, strict=True)), worst)

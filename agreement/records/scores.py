"""Scores by position and their sums: what flows from `scoring` to `intervals`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agreement.records.arrays import Float32Array, Int32Array


@dataclass(frozen=True)
class PositionScores:
    """One setting against the baseline at the scored positions of one chunk; all arrays (n_scored,).

    Attributes:
        base_top: int32, the baseline's argmax.
        base_target_logprob: float32, nats.
        base_margin: float32, the baseline's top-1 minus top-2 log-probability, nats.
        test_top: int32, the setting's argmax.
        test_target_logprob: float32, nats.
        kld_low: float32, nats, baseline‖test; a lower bound where the recording holds only the top, else the value.
        kld_high: float32, nats; the matching upper bound, equal to `kld_low` where the recording is full.
        target: int32, the true next token.
        ambiguous: bool, positions where the stored baseline cannot tell its two best tokens apart.
    """

    base_top: Int32Array
    base_target_logprob: Float32Array
    base_margin: Float32Array
    test_top: Int32Array
    test_target_logprob: Float32Array
    kld_low: Float32Array
    kld_high: Float32Array
    target: Int32Array
    ambiguous: NDArray[np.bool_]


@dataclass(frozen=True)
class Counts:
    """Sums over scored positions; add them, never average their ratios.

    Attributes:
        n: Scored positions.
        n_agree: Positions where both argmaxes are the same token.
        nll_base: Sum of the baseline's negative log-likelihood of the true next token, nats.
        nll_test: The same for the setting.
        kld_low: Sum of lower bounds of the KL divergence, nats.
        kld_high: Sum of upper bounds.
        n_base_right: Positions where the baseline's argmax is the true next token.
        n_test_right: The same for the setting.
        n_right_to_wrong: Positions where the baseline is right and the setting is not.
        n_wrong_to_right: The reverse.
        dp: Sum of the change of the true token's probability.
        dp_squared: Sum of its square.
        n_ambiguous: Positions where the stored baseline cannot tell its two best tokens apart.
    """

    n: int = 0
    n_agree: int = 0
    nll_base: float = 0.0
    nll_test: float = 0.0
    kld_low: float = 0.0
    kld_high: float = 0.0
    n_base_right: int = 0
    n_test_right: int = 0
    n_right_to_wrong: int = 0
    n_wrong_to_right: int = 0
    dp: float = 0.0
    dp_squared: float = 0.0
    n_ambiguous: int = 0

    def __add__(self, other: Counts) -> Counts:
        """Return the counts of both parts together."""
        return Counts(**{k: v + getattr(other, k) for k, v in vars(self).items()})

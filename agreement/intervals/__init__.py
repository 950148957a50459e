"""Counts and sums by cluster flow in; estimates with intervals flow out. Pure, and random only through `rng`."""

from agreement.intervals.estimates import bounded_mean, difference, exp_mean, mean, ppl_delta, proportion
from agreement.intervals.methods import MEAN_METHODS, METHODS, Method

__all__ = [
    "MEAN_METHODS",
    "METHODS",
    "Method",
    "bounded_mean",
    "difference",
    "exp_mean",
    "mean",
    "ppl_delta",
    "proportion",
]

"""Counts and sums by cluster flow in; estimates with intervals flow out. Pure, and random only through `rng`."""

from agreement.intervals.estimates import bounded_mean, exp_mean, mean, proportion
from agreement.intervals.methods import MEAN_METHODS, METHODS, SHARE_METHODS, Method
from agreement.intervals.paired import difference, ppl_delta

__all__ = [
    "MEAN_METHODS",
    "METHODS",
    "SHARE_METHODS",
    "Method",
    "bounded_mean",
    "difference",
    "exp_mean",
    "mean",
    "ppl_delta",
    "proportion",
]

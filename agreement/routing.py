"""Routing policies: how many of the experts that the router selected are kept, row by row.

In: gate weights `(n_tokens, n_used)`, best expert first, and one policy a row.  Out: the weights with the dropped
columns silenced, and how many were kept.  Pure functions; what the numbers come from is the engine's business.

A row is one token in one layer.  Its columns are in the order in which the router selected the experts; its values are
gate values, without the bias that some architectures add for the selection alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from agreement.errors import SettingError
from agreement.records import Float32Array

PolicyKind = Literal["experts", "ser", "topp"]

POLICY_STARTS = ("ser=", "topp=")  # of the names of policies that no metadata override offers
_WHOLE = re.compile(r"[0-9]+")
_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?|\.[0-9]+")


@dataclass(frozen=True)
class Policy:
    """How many of a row's selected experts stay.

    * `experts=N`: the first N.
    * `ser=K,T`: the first K; a further one stays if its gate weight is at least T times the row's largest.  T = 1
      keeps exactly K (ties included), T = 0 keeps all.
    * `topp=P`: the first ones until their share of the selected gate weight reaches P, at least one.  P = 1 keeps all.

    Attributes:
        kind: Which of the three.
        keep: Experts that stay whatever they weigh, at least 1.
        limit: T or P, in [0, 1]; 0 for `experts`.
    """

    kind: PolicyKind
    keep: int = 1
    limit: float = 0.0

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise SettingError(f"{self}: at least one expert must be kept; give a number from 1 on")
        if not 0 <= self.limit <= 1 or (self.kind == "topp" and self.limit == 0):
            raise SettingError(f"{self}: a share of the gate weight lies between 0 and 1; give one such as 0.8")

    def __str__(self) -> str:
        """Return the canonical form, which `parse_policy` reads."""
        limit = np.format_float_positional(self.limit, trim="-")
        if self.kind == "ser":
            return f"ser={self.keep},{limit}"
        return f"topp={limit}" if self.kind == "topp" else f"experts={self.keep}"


def parse_policy(text: str) -> Policy:
    """Parse `experts=N`, `ser=K,T` or `topp=P`.

    Raises:
        SettingError: The text is none of these, is joined to something, or a number is out of its range.
    """
    refuse_joined(text, text)
    kind, _, value = text.strip().partition("=")
    if kind == "experts" and _WHOLE.fullmatch(value):
        return Policy("experts", int(value))
    if kind == "topp" and _NUMBER.fullmatch(value):
        return Policy("topp", 1, float(value))
    if kind == "ser":
        keep, _, limit = value.partition(",")
        if _WHOLE.fullmatch(keep) and _NUMBER.fullmatch(limit):
            return Policy("ser", int(keep), float(limit))
    raise SettingError(f"routing policy {text!r}: expected experts=N, ser=K,T or topp=P, such as ser=4,0.2 or topp=0.8")


def refuse_joined(text: str, part: str) -> None:
    """Refuse a setting of which `part` is a policy and which joins something to it.

    Raises:
        SettingError: That it does.
    """
    if "+" in text and part.strip().startswith(POLICY_STARTS):
        raise SettingError(
            f"setting {text!r}: a routing policy cannot be joined with '+'; give each as a setting of its own"
        )


def kept_columns(weights: Float32Array, policy: Policy, *, softmax_after: bool = False) -> NDArray[np.bool_]:
    """Say which experts of each row stay.

    Args:
        weights: (n, n_used) float32 gate values, best first.
        policy: The policy of all these rows.
        softmax_after: The engine takes a softmax over the selected experts only after this point, so `weights` are
            still scores; shares and ratios are then those of their softmax.

    Returns:
        (n, n_used) bool; at least one column of each row is True.
    """
    n_used = weights.shape[1]
    first = np.arange(n_used) < policy.keep
    if policy.kind == "experts" or n_used == 0 or (policy.kind == "ser" and policy.limit >= 1):
        return np.broadcast_to(first, weights.shape)
    if policy.kind == "topp" and policy.limit >= 1:
        return np.ones(weights.shape, np.bool_)
    # float64: a share next to the limit must not be decided by the order of a float32 sum.
    mass = weights.astype(np.float64)
    if softmax_after:
        mass = np.exp(mass - mass.max(axis=1, keepdims=True))
    keep: NDArray[np.bool_]
    if policy.kind == "ser":
        keep = first | (mass >= policy.limit * mass.max(axis=1, keepdims=True))
    else:
        before = np.cumsum(mass, axis=1) - mass
        keep = first | (before < policy.limit * mass.sum(axis=1, keepdims=True))
    return keep


def drop_experts(
    weights: Float32Array,
    policies: Sequence[Policy | None],
    policy_of_row: NDArray[np.intp],
    *,
    softmax_after: bool = False,
) -> tuple[Float32Array, NDArray[np.int64]]:
    """Silence the experts that each row's policy drops.

    Args:
        weights: (n, n_used) float32 gate values, best first; only read.
        policies: The policies in use; None keeps everything.
        policy_of_row: (n,) index into `policies`.
        softmax_after: See `kept_columns`.  A dropped column becomes -inf, which that softmax turns to 0, instead of 0.

    Returns:
        (n, n_used) float32, the changed weights, and (n,) int64, experts kept in each row.
    """
    out = weights.copy()
    n_kept = np.full(len(weights), weights.shape[1], np.int64)
    silent = np.float32(-np.inf if softmax_after else 0)
    for i, policy in enumerate(policies):
        rows = np.flatnonzero(policy_of_row == i)
        if policy is None or not len(rows):
            continue
        keep = kept_columns(weights[rows], policy, softmax_after=softmax_after)
        out[rows] = np.where(keep, weights[rows], silent)
        n_kept[rows] = keep.sum(axis=1)
    return out, n_kept

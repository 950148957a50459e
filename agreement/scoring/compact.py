"""A distribution in a twentieth of the space: what is kept of it, and the bounds of KL divergence that follow.

In: baseline logits.  Out: `CompactRows`; from them and a setting's logits, a lower and an upper bound of the
divergence.  Derived in `docs/method.md`; everything here is float64, so that the bounds hold to about 1e-9 nat.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agreement.records import Float32Array, Float64Array, Int32Array
from agreement.scoring.idlist import Int64Array, UInt8Array, pack_ids, packed_bytes, unpack_ids

CODE_MAX = 255
LISTED_SHARE = 19  # one token in so many is listed: with the rest of a row 4.9 % of 2 bytes a token
LEAST_LISTED = 2048  # small vocabularies make small files anyway
FLOOR = -80.0  # nats; less probable tokens are listed as if they had this log-probability
# Steps grow with the fourth root of the probability: fine where mass is, coarse where there is little.
ROOT = 4.0
_NUMBERS = 8  # float64 fields of a row
_UNIT = 2.0**-24  # half a unit in the last place of float32, relative
_MARGIN = 1e-10  # rounding of float64 sums over a vocabulary, relative to the largest log-probability in them
_SAMPLE = 1024  # tail tokens looked at to choose a multiplier; any multiplier gives a valid bound
_MULTIPLIERS = np.geomspace(0.1, 100, 16)
_buffers = threading.local()


@dataclass(frozen=True)
class CompactRows:
    """What is kept of `n` baseline distributions beside their exact top; all float64 (n,) unless said otherwise.

    The known tokens are the exact top and the listed ones; the others are the tail.  `p` is the baseline's
    probability, `p'` what the record decodes to.

    Attributes:
        listed_ids: (n, packed_bytes) uint8, the listed tokens, see `idlist`; no bytes where every token is known.
        listed_codes: (n, k) uint8, of the listed tokens in rising order of their ids.
        listed_low: Log-probability of code 0, nats.
        listed_step: Of the codes, in units of `exp((log p - low) / 4)`.
        correction: Adds to the exact top's float32 log-probabilities what rounding logsumexp took, nats.
        known_mass: Sum of p over the known tokens.
        known_gain: Sum of p (log p - log p') over the known tokens, nats.
        known_residual: Sum of (p - p')^2 / w over the known tokens, with the weights w of `_weights`.
        tail_mass: Sum of p over the tail.
        tail_entropy: Sum of p log p over the tail, nats (at most 0).
    """

    listed_ids: UInt8Array
    listed_codes: UInt8Array
    listed_low: Float64Array
    listed_step: Float64Array
    correction: Float64Array
    known_mass: Float64Array
    known_gain: Float64Array
    known_residual: Float64Array
    tail_mass: Float64Array
    tail_entropy: Float64Array


def n_listed(n_vocab: int, top_k: int) -> int:
    """Return how many tokens are listed beside the `top_k` exact ones."""
    return max(0, min(n_vocab - top_k, max(n_vocab // LISTED_SHARE, LEAST_LISTED)))


def compact_bytes(n_vocab: int, top_k: int) -> int:
    """Return the bytes of one row of `CompactRows`."""
    k = n_listed(n_vocab, top_k)
    return k + (packed_bytes(n_vocab, k) if k < n_vocab - top_k else 0) + 8 * _NUMBERS


def encode_compact(block: Float32Array, top_ids: Int64Array, top_logprobs: Float32Array) -> CompactRows:
    """Keep what the bounds need of finite logits.

    Args:
        block: (r, n_vocab) float32 logits.
        top_ids: (r, top_k) int64, the tokens kept exactly.
        top_logprobs: (r, top_k) float32, their log-probabilities as they are stored, nats.
    """
    r, n_vocab = block.shape
    top_k = top_ids.shape[1]
    k = n_listed(n_vocab, top_k)
    whole = k == n_vocab - top_k
    logprobs, everything = _log_softmax(block)
    exact = np.take_along_axis(logprobs, top_ids, axis=1)
    correction = exact[:, 0] - top_logprobs[:, 0]
    listed = _others(top_ids, n_vocab) if whole else _next_best(block, top_ids, k)
    true = np.take_along_axis(logprobs, listed, axis=1)
    low = np.maximum(true.min(axis=1), FLOOR) if k else np.zeros(r)
    roots = np.exp((np.maximum(true, low[:, None]) - low[:, None]) / ROOT)
    step = (roots.max(axis=1) - 1) / CODE_MAX if k else np.zeros(r)
    codes = np.rint((roots - 1) / np.where(step > 0, step, 1)[:, None]).astype(np.uint8)
    decoded = _decode(top_logprobs, codes, correction, low, step)
    known = np.concatenate([exact, true], axis=1)
    p, p_decoded = np.exp(known), np.exp(decoded)
    tail_mass, tail_entropy = np.zeros(r), np.zeros(r)
    if not whole:
        np.put_along_axis(everything, np.concatenate([top_ids, listed], axis=1), 0.0, axis=1)
        tail_mass = everything.sum(axis=1)
        everything *= logprobs
        tail_entropy = everything.sum(axis=1)
    return CompactRows(
        listed_ids=np.empty((r, 0), np.uint8) if whole else pack_ids(listed, n_vocab),
        listed_codes=codes,
        listed_low=low,
        listed_step=step,
        correction=correction,
        known_mass=p.sum(axis=1),
        known_gain=(p * (known - decoded)).sum(axis=1),
        known_residual=((p - p_decoded) ** 2 / _weights(decoded, top_k, low, step)).sum(axis=1),
        tail_mass=tail_mass,
        tail_entropy=tail_entropy,
    )


def bounded_kld(
    rows: CompactRows, top_ids: Int32Array, top_logprobs: Float32Array, block: Float32Array
) -> tuple[Float32Array, Float32Array]:
    """Return (r,) lower and upper bounds of the KL divergence baseline‖setting, nats, rounded outwards.

    Args:
        rows: What was kept of the baseline.
        top_ids: (r, top_k) int32, its exact top.
        top_logprobs: (r, top_k) float32, nats.
        block: (r, n_vocab) float32, the setting's finite logits.
    """
    n_vocab, top_k = block.shape[1], top_ids.shape[1]
    exact = top_ids.astype(np.int64)
    whole = rows.listed_codes.shape[1] == n_vocab - top_k
    listed = _others(exact, n_vocab) if whole else unpack_ids(rows.listed_ids, n_vocab, rows.listed_codes.shape[1])
    ids = np.concatenate([exact, listed], axis=1)
    test, q = _log_softmax(block)
    decoded = _decode(top_logprobs, rows.listed_codes, rows.correction, rows.listed_low, rows.listed_step)
    weights = _weights(decoded, top_k, rows.listed_low, rows.listed_step)
    # Sum of p (log p - log q) = gain - sum of p x; p is p' and a rest whose sum and weighted square are known.
    x = np.take_along_axis(test, ids, axis=1) - decoded
    centre = (weights * x).sum(axis=1) / weights.sum(axis=1)
    p_decoded = np.exp(decoded)
    middle = rows.known_gain - (p_decoded * x).sum(axis=1) - centre * (rows.known_mass - p_decoded.sum(axis=1))
    spread = np.sqrt(rows.known_residual * (weights * (x - centre[:, None]) ** 2).sum(axis=1))
    low, high = middle - spread, middle + spread
    margin = _MARGIN * (1 - test.min(axis=1))
    if not whole:
        tail_low, tail_high = _tail_bounds(rows, test, q, ids)
        low += tail_low
        high += tail_high
    return (
        np.nextafter((low - margin).astype(np.float32), np.float32(-np.inf)),
        np.nextafter((high + margin).astype(np.float32), np.float32(np.inf)),
    )


def _tail_bounds(
    rows: CompactRows, test: Float64Array, q: Float64Array, ids: Int64Array
) -> tuple[Float64Array, Float64Array]:
    """Return (r,) bounds of the tail's part of the divergence; overwrites `test` and `q`, which is its exponential.

    Low: the log-sum inequality, and the most probable tail token of the setting.  High: with the tail's mass m and
    entropy sum S fixed, `S + mu (S + m log(sum of q^(-1/mu)) - m log m)` is a bound for every mu > 0, and
    `S - m log(least q)` is its limit for mu to 0.
    """
    mass, entropy = rows.tail_mass, rows.tail_entropy
    np.put_along_axis(q, ids, 0.0, axis=1)
    test_mass = q.sum(axis=1)
    np.put_along_axis(test, ids, -np.inf, axis=1)
    most = test.max(axis=1)
    np.put_along_axis(test, ids, np.inf, axis=1)
    least = test.min(axis=1)
    none = mass <= 0
    log_mass = np.log(np.where(none, 1, mass))
    by_mass = mass * (log_mass - np.log(np.where(none, 1, np.maximum(test_mass, 1e-320))))
    low = np.maximum(by_mass, entropy - mass * most)

    sample = np.ascontiguousarray(test[:, :: max(1, test.shape[1] // _SAMPLE)])
    missing = np.log(test.shape[1] / sample.shape[1])
    buffer = np.empty_like(sample)
    tried = [_dual(mu, sample, least, missing, mass, log_mass, entropy, buffer) for mu in _MULTIPLIERS]
    best = _MULTIPLIERS[np.argmin(tried, axis=0)]
    high = np.minimum(_dual(best, test, least, 0.0, mass, log_mass, entropy, q), entropy - mass * least)
    return np.where(none, 0, low), np.where(none, 0, high)


def _dual(
    mu: Float64Array | np.float64,
    test: Float64Array,
    least: Float64Array,
    missing: float,
    mass: Float64Array,
    log_mass: Float64Array,
    entropy: Float64Array,
    buffer: Float64Array,
) -> Float64Array:
    """Return (r,) upper bounds of the tail's divergence; `missing` is the log of the share of tokens left out."""
    mu = np.broadcast_to(mu, least.shape)
    np.subtract(least[:, None], test, out=buffer)
    buffer /= mu[:, None]
    np.exp(buffer, out=buffer)
    with np.errstate(divide="ignore", invalid="ignore"):  # a sample may hold no tail token, a tail no mass
        log_sum = np.log(buffer.sum(axis=1)) + missing - least / mu
        bound: Float64Array = entropy + mu * (entropy + mass * (log_sum - log_mass))
    return bound


def _log_softmax(block: Float32Array) -> tuple[Float64Array, Float64Array]:
    """Return log-probabilities and probabilities, both of the block's shape, in this thread's two buffers.

    Callers write into both; they hold until the next call in the same thread.  Fresh arrays of this size would come
    from the system each time, page by page, which takes longer than all the arithmetic.
    """
    if getattr(_buffers, "shape", None) != block.shape:
        _buffers.shape, _buffers.pair = block.shape, (np.empty(block.shape), np.empty(block.shape))
    logprobs: Float64Array
    p: Float64Array
    logprobs, p = _buffers.pair
    np.subtract(block, block.max(axis=1, keepdims=True), out=logprobs, dtype=np.float64)
    np.exp(logprobs, out=p)
    total = p.sum(axis=1, keepdims=True)
    logprobs -= np.log(total)
    p /= total
    return logprobs, p


def _decode(
    top_logprobs: Float32Array, codes: UInt8Array, correction: Float64Array, low: Float64Array, step: Float64Array
) -> Float64Array:
    """Return (r, top_k + k) log-probabilities of the exact top and the listed tokens, nats."""
    listed = low[:, None] + ROOT * np.log1p(step[:, None] * codes)
    return np.concatenate([top_logprobs.astype(np.float64) + correction[:, None], listed], axis=1)


def _weights(decoded: Float64Array, top_k: int, low: Float64Array, step: Float64Array) -> Float64Array:
    """Return (r, top_k + k): about how far each probability may be from its decoded value; never zero."""
    relative = np.empty_like(decoded)
    relative[:, :top_k] = _UNIT * (1 - decoded[:, :top_k])
    # log p = low + 4 log(root), so half a step of the root is worth so much of log p:
    relative[:, top_k:] = ROOT / 2 * step[:, None] * np.exp((low[:, None] - decoded[:, top_k:]) / ROOT) + _UNIT
    relative *= np.exp(np.maximum(decoded, -600.0))
    return relative


def _others(ids: Int64Array, n_vocab: int) -> Int64Array:
    """Return (r, n_vocab - k) rising ids of all tokens that are not among `ids`."""
    rest = np.ones((len(ids), n_vocab), np.bool_)
    np.put_along_axis(rest, ids, False, axis=1)
    return np.nonzero(rest)[1].reshape(len(ids), n_vocab - ids.shape[1])


def _next_best(block: Float32Array, top_ids: Int64Array, k: int) -> Int64Array:
    """Return (r, k) rising ids of the most probable tokens after the top; of equal ones the lower ids."""
    result = np.empty((len(block), k), np.int64)
    wanted = k + top_ids.shape[1]
    for row, (values, top) in enumerate(zip(block, top_ids, strict=True)):
        candidates = _candidates(values, wanted)
        some = values[candidates]
        bound = np.partition(some, some.size - wanted)[-wanted]
        equal = np.flatnonzero(some == bound)
        keep = some > bound
        keep[equal[: wanted - int(keep.sum())]] = True
        keep[np.searchsorted(candidates, top)] = False
        result[row] = candidates[keep]
    return result


def _candidates(values: Float32Array, wanted: int) -> NDArray[np.int64]:
    """Return rising ids that are sure to hold the `wanted` largest values, and few others.

    Selecting in the whole vocabulary costs more than all the rest, so a sample says from where on to look.
    """
    stride = max(1, values.size // 8192)
    sample = np.sort(values[::stride])
    guess = sample[max(0, sample.size - 1 - int(1.1 * wanted / stride) - 8)]
    found = np.flatnonzero(values >= guess)
    return found if found.size >= wanted else np.arange(values.size)

"""Sets of token ids in few bits: about `log2(n_vocab / k) + 2` an id.

In: `k` distinct ids a row.  Out: bytes, and from them the ids again in rising order.

The coding is Elias and Fano's (1971, 1974): of the ids in rising order the low bits are kept as they are, and the high
parts as a row of bits in which the i-th one stands at place `high_i + i`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

UInt8Array = NDArray[np.uint8]
Int64Array = NDArray[np.int64]


def low_bits(n_vocab: int, k: int) -> int:
    """Return how many bits of an id are kept as they are."""
    return max(0, (n_vocab // k).bit_length() - 1) if k else 0


def _high_bits(n_vocab: int, k: int) -> int:
    return k + ((n_vocab - 1) >> low_bits(n_vocab, k)) if k else 0


def packed_bytes(n_vocab: int, k: int) -> int:
    """Return the bytes of a row of `k` ids."""
    return -(-_high_bits(n_vocab, k) // 8) + -(-k * low_bits(n_vocab, k) // 8)


def pack_ids(ids: Int64Array, n_vocab: int) -> UInt8Array:
    """Return (n, packed_bytes) uint8 for ids (n, k), each row distinct and rising, all in [0, n_vocab)."""
    n, k = ids.shape
    width = low_bits(n_vocab, k)
    high = np.zeros((n, _high_bits(n_vocab, k)), np.uint8)
    np.put_along_axis(high, (ids >> width) + np.arange(k), np.uint8(1), axis=1)
    low = ((ids[:, :, None] >> np.arange(width)) & 1).astype(np.uint8).reshape(n, k * width)
    return np.concatenate([np.packbits(high, axis=1), np.packbits(low, axis=1)], axis=1)


def unpack_ids(packed: UInt8Array, n_vocab: int, k: int) -> Int64Array:
    """Return the (n, k) ids that `pack_ids` packed."""
    n = len(packed)
    width, n_high = low_bits(n_vocab, k), _high_bits(n_vocab, k)
    split = -(-n_high // 8)
    high = np.unpackbits(packed[:, :split], axis=1, count=n_high)
    ids = np.nonzero(high)[1].reshape(n, k) - np.arange(k)
    if width:
        low = np.unpackbits(packed[:, split:], axis=1, count=k * width).reshape(n, k, width)
        ids = (ids << width) + low @ (1 << np.arange(width))
    return ids

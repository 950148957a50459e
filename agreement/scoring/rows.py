"""Working through logits a few rows at a time, so that every intermediate stays in the processor's cache.

In: `(n, n_vocab)` logits.  Out: calls of a function on row ranges, spread over threads; numpy lets go of the
interpreter lock inside its loops, so threads help without copying anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from agreement.records import Float32Array

# About 512 KB of float32: with the codes and two buffers of this size a core's second-level cache still holds most.
BLOCK_ELEMENTS = 131072

# Less work than this (about 10 ms) is quicker done by the caller: after a decode the engine's own threads go on
# spinning for a while, and scoring threads would have to share the processors with them.
THREADED_ELEMENTS = 1 << 22


class _Kept(threading.local):
    """Arrays of one thread, by number."""

    def __init__(self) -> None:
        self.arrays: dict[int, Float32Array] = {}


_kept = _Kept()


def scratch(n_rows: int, n_vocab: int, which: int = 0) -> Float32Array:
    """Return an (n_rows, n_vocab) float32 array that this thread may overwrite until it asks for `which` again.

    A fresh array of half a megabyte costs more in page faults than a pass over it.
    """
    size = n_rows * n_vocab
    kept = _kept.arrays
    if which not in kept or kept[which].size < size:
        kept[which] = np.empty(size, np.float32)
    return kept[which][:size].reshape(n_rows, n_vocab)


def row_blocks(n_rows: int, n_vocab: int) -> list[tuple[int, int]]:
    """Return consecutive row ranges `[start, stop)` of about BLOCK_ELEMENTS elements each."""
    step = max(1, BLOCK_ELEMENTS // n_vocab)
    return [(start, min(start + step, n_rows)) for start in range(0, n_rows, step)]


def for_each_block(
    work: Callable[[int, int], None], n_rows: int, n_vocab: int, pool: ThreadPoolExecutor | None = None
) -> None:
    """Call `work(start, stop)` for every block of rows, on `pool` if one is given; the first error is raised."""
    blocks = row_blocks(n_rows, n_vocab)
    if pool is None or n_rows * n_vocab < THREADED_ELEMENTS:
        for start, stop in blocks:
            work(start, stop)
        return
    for done in [pool.submit(work, start, stop) for start, stop in blocks]:
        done.result()

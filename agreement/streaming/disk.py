"""How fast a file comes from its disk, measured without the page cache.

In: a file.  Out: bytes a second, or None where the file system does not offer reading past the cache.
"""

from __future__ import annotations

import mmap
import os
import time

_BLOCK = 4 << 20  # aligned to every sector size, and large enough that requests do not count
MOST_BYTES = 64 << 20
_MOST_SECONDS = 0.5
_UNTIMED = 32 << 20


def read_speed(path: str, *, most_bytes: int = MOST_BYTES) -> float | None:
    """Read some of a file with O_DIRECT, for half a second at most, and return bytes a second.

    What lies in memory already would look like a disk of many gigabytes a second, so the page cache is passed by; it
    keeps what it holds.  The middle of the file is read: its beginning is the header.

    Args:
        path: A regular file.
        most_bytes: Read no more than this.

    Returns:
        None for a file smaller than 4 MiB, on a system or file system without O_DIRECT (tmpfs, some network mounts),
        and where reading fails.
    """
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | flag)
    except OSError:
        return None
    try:
        with mmap.mmap(-1, _BLOCK) as block:  # O_DIRECT wants aligned memory
            return _timed(descriptor, block, most_bytes)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _timed(descriptor: int, block: mmap.mmap, most_bytes: int) -> float | None:
    size = os.fstat(descriptor).st_size
    at = size // 2 // _BLOCK * _BLOCK
    stop = min(size // _BLOCK * _BLOCK, at + most_bytes)
    # A disk with a limited rate lets the first requests pass at once: seen at four times the rate for 16 MiB.
    start = at if stop - at < 2 * _UNTIMED else at + _UNTIMED
    n_bytes, began = 0, time.perf_counter()
    started = began
    for offset in range(at, stop, _BLOCK):
        if time.perf_counter() - began > _MOST_SECONDS:
            break
        if offset == start:
            n_bytes, started = 0, time.perf_counter()
        if os.preadv(descriptor, [block], offset) != _BLOCK:
            break
        n_bytes += _BLOCK
    return n_bytes / (time.perf_counter() - started) if n_bytes else None

"""The digest of a model: part of what makes two passes comparable.

In: a `ModelFile`.  Out: a string that names the method and then the hash.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import xxhash

from agreement.errors import ModelFileError
from agreement.model_file.header import read_header

if TYPE_CHECKING:
    from io import FileIO

    from agreement.records import ModelFile

Progress = Callable[[int, int], None]

# A model that streams from disk must not be read once more only to be named.
FULL_BYTES = 1_000_000_000
_BLOCK = 1 << 22  # bytes read at a time; memory does not grow with the file
_SAMPLES = 64  # blocks a shard in the quick digest
_SAMPLE = 1 << 16  # bytes a block


def model_digest(model: ModelFile, progress: Progress | None = None, *, quick: bool | None = None) -> str:
    """Return a digest of the model's files.

    The full digest is the 128-bit xxh3 of all shards' bytes one after the other, `cat SHARDS | xxhsum -H2`, and reads
    everything: minutes for hundreds of gigabytes.  The quick one hashes each shard's size, its whole header and 64
    blocks of 64 KiB spread evenly over its data, first and last included (all of it if that is no more): it tells
    another model, quantisation or conversion, but not one weight changed between two samples.  The two kinds begin with
    different words, so they are never equal by accident.

    Args:
        model: What to hash.
        progress: Called with bytes done and bytes in all.
        quick: Hash samples only; None does so for models of more than FULL_BYTES.

    Returns:
        `xxh3-128:` or `xxh3-128-sampled:` and 32 hexadecimal digits.

    Raises:
        ModelFileError: A file cannot be read, or became shorter.
    """
    quick = model.bytes_total > FULL_BYTES if quick is None else quick
    spans = [(path, _quick_spans(path) if quick else [(0, _size(path))]) for path in model.shards]
    total = sum(length for _, parts in spans for _, length in parts)
    state = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_BLOCK))
    done = 0
    for path, parts in spans:
        if quick:
            state.update(_size(path).to_bytes(8, "little"))
        with opened(path) as file:
            for piece in pieces(file, parts, buffer, path):
                state.update(piece)
                done += len(piece)
                if progress:
                    progress(done, total)
    return f"{'xxh3-128-sampled' if quick else 'xxh3-128'}:{state.hexdigest()}"


@contextmanager
def opened(path: str) -> Iterator[FileIO]:
    """Open a model's file, unbuffered.

    Raises:
        ModelFileError: It cannot be opened, or reading it fails within the `with`.
    """
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123  (paths travel as text in the records)
            yield file
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error.strerror})") from error


def _size(path: str) -> int:
    with opened(path) as file:
        return os.fstat(file.fileno()).st_size


def _quick_spans(path: str) -> list[tuple[int, int]]:
    """Return (start, length) of what the quick digest reads of one shard, in order and without overlap."""
    header = read_header(path)
    start = min(header.data_offset, header.file_size)
    n = header.file_size - start
    if n <= _SAMPLES * _SAMPLE:
        return [(0, header.file_size)]
    last = n - _SAMPLE  # where the last sample begins; the others are evenly spread before it
    return [(0, start), *((start + last * i // (_SAMPLES - 1), _SAMPLE) for i in range(_SAMPLES))]


def pieces(file: FileIO, parts: list[tuple[int, int]], buffer: memoryview, path: str) -> Iterator[memoryview]:
    """Yield the bytes of (start, length) parts of a file, in order, at most a buffer full at a time.

    Raises:
        ModelFileError: The file ends before a part does.
    """
    for start, length in parts:
        file.seek(start)
        left = length
        while left:
            n = file.readinto(buffer[: min(left, len(buffer))])
            if not n:
                raise ModelFileError(f"{path}: became shorter while it was read; get the file again")
            left -= n
            yield buffer[:n]

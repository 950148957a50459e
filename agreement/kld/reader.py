"""Chunks of a logits file, as views of the file.

In: an open `LogitsFile`.  Out: one `LogitsChunk` at a time; its codes are mapped, not read, so that a chunk larger than
memory can be walked through in slices of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from agreement.errors import LogitsFileError
from agreement.kld.rows import CODE, HEAD_CODES, QuantisedRows, bad_head, dequantise, row_codes, row_heads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agreement.kld.logits_file import LogitsFile
    from agreement.records import Float32Array, Int32Array


@dataclass(frozen=True)
class LogitsChunk:
    """The rows of one chunk.

    Attributes:
        index: Number of the chunk, from 0.
        rows: `codes` (n_rows, n_vocab) uint16 is a read-only view of the file.
        targets: (n_rows,) int32, the true next tokens.
    """

    index: int
    rows: QuantisedRows
    targets: Int32Array

    def log_probs(self, start: int, stop: int, out: Float32Array | None = None) -> Float32Array:
        """Return the log-probs of rows `[start, stop)`, (stop - start, n_vocab) float32 nats."""
        part = slice(start, stop)
        rows = QuantisedRows(self.rows.codes[part], self.rows.scale[part], self.rows.min_log_prob[part])
        return dequantise(rows, out)


def read_chunk(file: LogitsFile, index: int) -> LogitsChunk:
    """Map chunk `index` of the file; the mapping ends when the chunk is dropped.

    Raises:
        LogitsFileError: There is no such chunk, a row's head cannot be, or the file has become shorter.
    """
    if not 0 <= index < file.n_chunk:
        raise LogitsFileError(f"{file.path}: no chunk {index}; it has {file.n_chunk}, counted from 0")
    offset = file.body_offset + index * file.n_rows * file.row_bytes
    try:
        shape = (file.n_rows, row_codes(file.n_vocab))
        data: np.ndarray[tuple[int, int], np.dtype[np.uint16]] = np.memmap(file.path, CODE, "r", offset, shape)
    except (OSError, ValueError) as error:
        raise LogitsFileError(f"{file.path}: chunk {index} cannot be mapped ({error}); did the file change?") from error
    scale, min_log_prob = row_heads(data)
    if (found := bad_head(scale, min_log_prob, file.n_vocab)) is not None:
        raise LogitsFileError(f"{file.path}: chunk {index}, row {found[0]}: {found[1]}")
    codes = data[:, HEAD_CODES : HEAD_CODES + file.n_vocab]
    return LogitsChunk(index, QuantisedRows(codes, scale, min_log_prob), file.targets[index].copy())


def iter_chunks(file: LogitsFile) -> Iterator[LogitsChunk]:
    """Yield every whole chunk in order."""
    for index in range(file.n_chunk):
        yield read_chunk(file, index)

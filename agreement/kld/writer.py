"""Writing a logits file that llama.cpp's perplexity tool takes as a base.

In: tokens and quantised rows, block by block.  Out: a whole file or none.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from agreement.errors import LogitsFileError
from agreement.kld.logits_file import HEADER, MAGIC, TOKEN, rows_per_chunk
from agreement.kld.rows import CODE, FLOAT, HEAD_CODES, QuantisedRows, bad_head, row_codes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agreement.records import Int32Array


def write_logits_file(path: str | Path, tokens: Int32Array, n_vocab: int, blocks: Iterable[QuantisedRows]) -> int:
    """Write a logits file under a temporary name in the same directory, then rename it.

    Args:
        path: The file to make; one that is there is replaced at the end.
        tokens: (n_chunk, n_ctx) int32, as tokenised.
        n_vocab: Size of the vocabulary.
        blocks: The rows in order, any number at a time; together `n_chunk * (n_ctx - 1 - n_ctx // 2)`. From
            `quantise`, or from another file: then the codes arrive unchanged.

    Returns:
        The file's size in bytes.

    Raises:
        LogitsFileError: Sizes, tokens or rows that no logits file can have, or the file cannot be written. No file
            is left behind.
    """
    path = Path(path)
    _check(path, tokens, n_vocab)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        try:
            with partial.open("wb") as file:
                file.write(HEADER.pack(MAGIC, tokens.shape[1], n_vocab, tokens.shape[0]))
                file.write(np.ascontiguousarray(tokens, dtype=TOKEN).tobytes())
                _write_rows(path, file, n_vocab, tokens.shape[0] * rows_per_chunk(tokens.shape[1]), blocks)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)  # after an error; a finished file has been renamed
    except OSError as error:
        raise LogitsFileError(f"{path}: cannot be written ({error.strerror or error}); choose another place") from error
    return size


def _check(path: Path, tokens: Int32Array, n_vocab: int) -> None:
    if tokens.ndim != 2 or tokens.shape[0] < 1 or rows_per_chunk(tokens.shape[1]) < 1:
        raise LogitsFileError(f"{path}: tokens of shape {tokens.shape}; give (n_chunk, n_ctx) with n_ctx at least 3")
    limit = np.iinfo(np.int32).max  # the header's fields; the tool multiplies n_chunk and n_ctx as such, too
    if not 2 <= n_vocab <= limit or tokens.size > limit:
        raise LogitsFileError(f"{path}: n_vocab {n_vocab} with {tokens.size} tokens does not fit the format")
    if tokens.min() < 0 or tokens.max() >= n_vocab:
        raise LogitsFileError(f"{path}: tokens from {tokens.min()} to {tokens.max()} are not all in 0..{n_vocab - 1}")


def _write_rows(path: Path, file: BinaryIO, n_vocab: int, n: int, blocks: Iterable[QuantisedRows]) -> None:
    done = 0
    for block in blocks:
        size = len(block.codes)
        if block.codes.shape != (size, n_vocab) or block.scale.shape != (size,) or block.min_log_prob.shape != (size,):
            raise LogitsFileError(
                f"{path}: a block with codes {block.codes.shape}, scale {block.scale.shape}, min_log_prob "
                f"{block.min_log_prob.shape}; expected ({size}, {n_vocab}) and ({size},)"
            )
        if (found := bad_head(block.scale, block.min_log_prob, n_vocab)) is not None:
            raise LogitsFileError(f"{path}: row {done + found[0]}: {found[1]}")
        if done + size > n:
            raise LogitsFileError(f"{path}: more than the {n} rows that the tokens ask for")
        if not size:
            continue
        data = np.zeros((size, row_codes(n_vocab)), dtype=CODE)
        head = np.stack([block.scale, block.min_log_prob], axis=1).astype(FLOAT)
        data[:, :HEAD_CODES] = head.view(CODE)
        data[:, HEAD_CODES : HEAD_CODES + n_vocab] = block.codes
        file.write(data.data.cast("B"))
        done += size
    if done < n:
        raise LogitsFileError(f"{path}: {done} rows given, {n} expected for these tokens")

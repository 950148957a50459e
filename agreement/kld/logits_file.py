"""What a logits file says about itself: header, lengths, row heads.

In: a path.  Out: a `LogitsFile`, or a `LogitsFileError` that names what does not fit.  The format has no version and
no digest, so every number is held against the file's size before it is believed.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

import numpy as np

from agreement.errors import LogitsFileError
from agreement.kld.rows import (
    CODE,
    FLOAT,
    HEAD_CODES,
    IK_LLAMA_NATS,
    LLAMA_CPP_NATS,
    SPAN_TOLERANCE,
    TOP_CODE,
    bad_head,
    row_codes,
)

if TYPE_CHECKING:
    from agreement.records import Float32Array, Int32Array

Writer = Literal["llama.cpp", "ik_llama.cpp", "unknown"]

MAGIC = b"_logits_"
HEADER = struct.Struct("<8siii")
TOKEN = np.dtype("<i4")

_SMALL_ROW = 1 << 15  # bytes; below this, reading all is faster than seeking from head to head
_HEADS_BLOCK = 1 << 22  # bytes read at once then


@dataclass(frozen=True)
class LogitsFile:
    """A logits file whose header, lengths, tokens and row heads have been checked.

    Position `p` of a chunk is scored for `first <= p < n_ctx - 1`: its row holds the log-probs after
    `tokens[: p + 1]`, and its target is `tokens[p + 1]`.

    Attributes:
        path: The file.
        n_ctx: Tokens a chunk.
        n_vocab: Size of the vocabulary.
        n_chunk_claimed: Chunks that the header claims.
        n_chunk: Whole chunks that are there; smaller than claimed only if a file cut short was accepted.
        tokens: (n_chunk, n_ctx) int32, as tokenised. If the vocabulary asks for BOS, the tool decoded BOS in place of
            the first token of each chunk; the file does not say so.
        first: First scored position, `n_ctx // 2`.
        scale: (n_chunk * n_rows,) float32, of every row.
        min_log_prob: (n_chunk * n_rows,) float32, of every row.
        writer: Who wrote it, where that shows.
        bytes_total: Size of the file.
    """

    path: Path
    n_ctx: int
    n_vocab: int
    n_chunk_claimed: int
    n_chunk: int
    tokens: Int32Array = field(repr=False)
    first: int
    scale: Float32Array = field(repr=False)
    min_log_prob: Float32Array = field(repr=False)
    writer: Writer
    bytes_total: int

    @property
    def n_rows(self) -> int:
        """Scored positions a chunk."""
        return rows_per_chunk(self.n_ctx)

    @property
    def targets(self) -> Int32Array:
        """The true next tokens, (n_chunk, n_rows) int32."""
        return self.tokens[:, self.first + 1 :]

    @property
    def row_bytes(self) -> int:
        """Size of one row."""
        return 2 * row_codes(self.n_vocab)

    @property
    def body_offset(self) -> int:
        """Where the first row starts."""
        return body_offset(self.n_ctx, self.n_chunk_claimed)

    @property
    def truncated(self) -> bool:
        """Whether the file ends before the chunks that its header claims."""
        return self.bytes_total < self.body_offset + self.n_chunk_claimed * self.n_rows * self.row_bytes


def rows_per_chunk(n_ctx: int) -> int:
    """Return how many positions of a chunk are scored: the second half but the last."""
    return n_ctx - 1 - n_ctx // 2


def body_offset(n_ctx: int, n_chunk: int) -> int:
    """Return the size of header and tokens."""
    return HEADER.size + 4 * n_ctx * n_chunk


def open_logits_file(path: str | Path, *, allow_truncated: bool = False) -> LogitsFile:
    """Read header, tokens and the head of every row, and check all of them.

    Args:
        path: The file.
        allow_truncated: Accept a file that ends early, and use its whole chunks.

    Raises:
        LogitsFileError: The file cannot be read, is no logits file, is cut short (unless allowed) or too long, or
            holds a size, a token or a row head that cannot be.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            return _read(path, file, allow_truncated=allow_truncated)
    except OSError as error:
        raise LogitsFileError(f"{path}: cannot be read ({error.strerror or error}); check the path") from error


def _read(path: Path, file: BinaryIO, *, allow_truncated: bool) -> LogitsFile:
    size = path.stat().st_size
    head = file.read(HEADER.size)
    if head[: len(MAGIC)] != MAGIC[: len(head)] or not head:
        raise LogitsFileError(f"{path}: does not start with {MAGIC.decode()!r}; not a llama-perplexity logits file")
    if len(head) < HEADER.size:
        raise LogitsFileError(f"{path}: ends inside its header after {size} bytes; write it again")
    _, n_ctx, n_vocab, claimed = HEADER.unpack(head)
    _check_sizes(path, n_ctx, n_vocab, claimed)
    if body_offset(n_ctx, claimed) > size:
        raise LogitsFileError(
            f"{path}: the header claims {claimed} chunks of {n_ctx} tokens, more than {size} bytes hold; "
            "the header is damaged or the file was cut inside its tokens"
        )
    n_chunk = _whole_chunks(path, size, (n_ctx, n_vocab, claimed), allow_truncated=allow_truncated)
    tokens = np.frombuffer(file.read(4 * n_ctx * n_chunk), dtype=TOKEN).reshape(n_chunk, n_ctx).astype(np.int32)
    wrong = np.flatnonzero((tokens < 0) | (tokens >= n_vocab))
    if wrong.size:
        chunk, position = divmod(int(wrong[0]), n_ctx)
        token = int(tokens[chunk, position])
        raise LogitsFileError(
            f"{path}: token {token} at position {position} of chunk {chunk} is not in 0..{n_vocab - 1}; "
            "the file is damaged"
        )
    n_rows = rows_per_chunk(n_ctx)
    scale, min_log_prob = _read_heads(path, body_offset(n_ctx, claimed), n_chunk * n_rows, 2 * row_codes(n_vocab))
    if (found := bad_head(scale, min_log_prob, n_vocab)) is not None:
        chunk, row = divmod(found[0], n_rows)
        raise LogitsFileError(f"{path}: chunk {chunk}, row {row}: {found[1]}")
    writer = _guess_writer(scale)
    first = n_ctx // 2
    return LogitsFile(path, n_ctx, n_vocab, claimed, n_chunk, tokens, first, scale, min_log_prob, writer, size)


def _check_sizes(path: Path, n_ctx: int, n_vocab: int, claimed: int) -> None:
    if rows_per_chunk(n_ctx) < 1:
        raise LogitsFileError(f"{path}: n_ctx {n_ctx} in the header leaves no scored position; it must be at least 3")
    if n_vocab < 2:
        raise LogitsFileError(f"{path}: n_vocab {n_vocab} in the header; a vocabulary has at least 2 tokens")
    if claimed < 1:
        raise LogitsFileError(f"{path}: n_chunk {claimed} in the header; there must be at least 1 chunk")


def _whole_chunks(path: Path, size: int, header: tuple[int, int, int], *, allow_truncated: bool) -> int:
    n_ctx, n_vocab, claimed = header
    chunk_bytes = rows_per_chunk(n_ctx) * 2 * row_codes(n_vocab)
    body = size - body_offset(n_ctx, claimed)
    whole, rest = divmod(body, chunk_bytes)
    if body > claimed * chunk_bytes:
        raise LogitsFileError(
            f"{path}: {body - claimed * chunk_bytes} bytes after the last of {claimed} chunks "
            f"(n_ctx {n_ctx}, n_vocab {n_vocab}); the header lies or something was appended"
        )
    if whole < claimed and not (allow_truncated and whole):
        more = "; its whole chunks can be used with --allow-truncated" if whole else ""
        raise LogitsFileError(
            f"{path}: cut short: {whole} of {claimed} chunks are whole, then {rest} of {chunk_bytes} bytes{more}"
        )
    return whole


def _read_heads(path: Path, offset: int, n: int, row_bytes: int) -> tuple[Float32Array, Float32Array]:
    """Return scale and min_log_prob of all `n` rows, reading as little as is quick."""
    heads = np.empty((n, 2), dtype=FLOAT)
    block = 1 if row_bytes > _SMALL_ROW else _HEADS_BLOCK // row_bytes
    wanted = 8 if block == 1 else row_bytes
    # Unbuffered: a buffered reader would fetch a whole buffer for each head of eight bytes.
    with path.open("rb", buffering=0) as raw:
        buffer = np.empty((block, wanted // 2), dtype=CODE)
        for start in range(0, n, block):
            part = buffer[: min(block, n - start)]
            read_into(raw, offset + start * row_bytes, part, path)
            heads[start : start + len(part)] = part[:, :HEAD_CODES].copy().view(FLOAT)
    return heads[:, 0].astype(np.float32), heads[:, 1].astype(np.float32)


def read_into(file: BinaryIO, offset: int, out: np.ndarray[tuple[int, ...], np.dtype[np.uint16]], path: Path) -> None:
    """Fill the contiguous array `out` from `offset` of an unbuffered file.

    Raises:
        LogitsFileError: The file ends there, so it has changed since it was opened.
    """
    file.seek(offset)
    view = out.data.cast("B")
    while view:
        got = file.readinto(view)  # type: ignore[attr-defined]  # an unbuffered binary file has it
        if not got:
            raise LogitsFileError(f"{path}: became shorter while it was read; is it still being written?")
        view = view[got:]


def _guess_writer(scale: Float32Array) -> Writer:
    """Tell the writer from the rows' spans.

    More than 16 nats is only written by ik_llama.cpp. A row that ends at 16 exactly was cut there, by llama.cpp. If
    all are shorter, nothing shows.
    """
    widest = float(scale.max()) * TOP_CODE
    if widest > IK_LLAMA_NATS + SPAN_TOLERANCE:
        return "unknown"
    if widest > LLAMA_CPP_NATS + SPAN_TOLERANCE:
        return "ik_llama.cpp"
    return "llama.cpp" if widest > LLAMA_CPP_NATS - SPAN_TOLERANCE else "unknown"


def facts(file: LogitsFile) -> dict[str, str]:
    """Return what a person wants to know of the file, in the order to show it."""
    widest = float(file.scale.max()) * TOP_CODE
    limit = {"llama.cpp": LLAMA_CPP_NATS, "ik_llama.cpp": IK_LLAMA_NATS}.get(file.writer)
    cut = 0 if limit is None else int(np.sum(np.abs(file.scale * TOP_CODE - limit) <= SPAN_TOLERANCE))
    n = file.scale.size
    chunks = f"{file.n_chunk} of {file.n_chunk_claimed} (cut short)" if file.truncated else str(file.n_chunk)
    return {
        "file": str(file.path),
        "size": f"{file.bytes_total:,} bytes",
        "writer": file.writer,
        "chunks": chunks,
        "n_ctx": str(file.n_ctx),
        "n_vocab": str(file.n_vocab),
        "scored positions": f"{n:,} ({file.n_rows} a chunk, from position {file.first})",
        "widest row": f"{widest:.3f} nats",
        "rows clipped at the writer's limit": f"{cut:,} of {n:,}",
        "coarsest code": f"{float(file.scale.max()):.3g} nats",
    }

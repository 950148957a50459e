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
    HEAD_CODES,
    IK_LLAMA_NATS,
    LLAMA_CPP_NATS,
    SPAN_TOLERANCE,
    TOP_CODE,
    bad_head,
    clipped_rows,
    row_codes,
    row_heads,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from agreement.records import Float32Array, Int32Array

Writer = Literal["llama.cpp", "ik_llama.cpp", "unknown"]

MAGIC = b"_logits_"
HEADER = struct.Struct("<8siii")
TOKEN = np.dtype("<i4")

_SAMPLE = 256  # rows looked at when a file is opened; a seek each, some 20 ms on a disk that is cold


@dataclass(frozen=True)
class LogitsFile:
    """A logits file whose header, lengths and tokens have been checked.

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
        bytes_total: Size of the file.
        n_rows_seen: Rows whose heads were read and checked on opening; the next three are about these.
        n_rows_clipped: Those that are cut off at 16 or 24 nats.
        widest_nats: The largest `65535 * scale`.
        writer: Who wrote it, where that shows.
    """

    path: Path
    n_ctx: int
    n_vocab: int
    n_chunk_claimed: int
    n_chunk: int
    tokens: Int32Array = field(repr=False)
    first: int
    bytes_total: int
    n_rows_seen: int
    n_rows_clipped: int
    widest_nats: float
    writer: Writer

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


def open_logits_file(path: str | Path, *, allow_truncated: bool = False, every_row: bool = False) -> LogitsFile:
    """Read header, tokens and the heads of some rows, and check them.

    Args:
        path: The file.
        allow_truncated: Accept a file that ends early, and use its whole chunks.
        every_row: Look at the head of every row, not of 256 spread over the file. Whoever reads a row later checks
            its head anyway; this is for saying all about a file.

    Raises:
        LogitsFileError: The file cannot be read, is no logits file, is cut short (unless allowed) or too long, or
            holds a size, a token or a row head that cannot be.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            return _read(path, file, allow_truncated=allow_truncated, every_row=every_row)
    except OSError as error:
        raise LogitsFileError(f"{path}: cannot be read ({error.strerror or error}); check the path") from error


def _read(path: Path, file: BinaryIO, *, allow_truncated: bool, every_row: bool) -> LogitsFile:
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
    n = n_chunk * n_rows
    seen = np.arange(n) if every_row or n <= _SAMPLE else np.linspace(0, n - 1, _SAMPLE).astype(np.int64)
    scale, min_log_prob = _read_heads(path, body_offset(n_ctx, claimed) + seen * 2 * row_codes(n_vocab))
    if (found := bad_head(scale, min_log_prob, n_vocab)) is not None:
        chunk, row = divmod(int(seen[found[0]]), n_rows)
        raise LogitsFileError(f"{path}: chunk {chunk}, row {row}: {found[1]}")
    widest = float(scale.max()) * TOP_CODE
    return LogitsFile(
        path=path,
        n_ctx=n_ctx,
        n_vocab=n_vocab,
        n_chunk_claimed=claimed,
        n_chunk=n_chunk,
        tokens=tokens,
        first=n_ctx // 2,
        bytes_total=size,
        n_rows_seen=len(seen),
        n_rows_clipped=int(clipped_rows(scale).sum()),
        widest_nats=widest,
        writer=_guess_writer(widest),
    )


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


def _read_heads(path: Path, offsets: NDArray[np.int64]) -> tuple[Float32Array, Float32Array]:
    """Return scale and min_log_prob, (n,) float32 each, of the rows at these offsets."""
    heads = np.empty((len(offsets), HEAD_CODES), dtype=CODE)
    # Unbuffered: a buffered reader would fetch a whole buffer for each head of eight bytes.
    with path.open("rb", buffering=0) as raw:
        for offset, head in zip(offsets.tolist(), heads, strict=True):
            read_into(raw, offset, head, path)
    return row_heads(heads)


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


def _guess_writer(widest: float) -> Writer:
    """Tell the writer from the widest row's span in nats.

    More than 16 is only written by ik_llama.cpp. A row that ends at 16 exactly was cut there, by llama.cpp. If all
    are narrower, nothing shows.
    """
    if widest > IK_LLAMA_NATS + SPAN_TOLERANCE:
        return "unknown"
    if widest > LLAMA_CPP_NATS + SPAN_TOLERANCE:
        return "ik_llama.cpp"
    return "llama.cpp" if widest > LLAMA_CPP_NATS - SPAN_TOLERANCE else "unknown"


def facts(file: LogitsFile) -> dict[str, str]:
    """Return what a person wants to know of the file, in the order to show it."""
    n = file.n_chunk * file.n_rows
    chunks = f"{file.n_chunk} of {file.n_chunk_claimed} (cut short)" if file.truncated else str(file.n_chunk)
    return {
        "file": str(file.path),
        "size": f"{file.bytes_total:,} bytes",
        "writer": file.writer,
        "chunks": chunks,
        "n_ctx": str(file.n_ctx),
        "n_vocab": str(file.n_vocab),
        "scored positions": f"{n:,} ({file.n_rows} a chunk, from position {file.first})",
        "rows looked at": f"{file.n_rows_seen:,} of {n:,}",
        "clipped rows": f"{file.n_rows_clipped:,} of {file.n_rows_seen:,}",
        "widest row": f"{file.widest_nats:.3f} nats",
        "coarsest code": f"{file.widest_nats / TOP_CODE:.3g} nats",
    }

"""One logits file against another: what a setting changes, with no engine present.

In: two open files over the same tokens, the baseline and a setting.  Out: `PositionScores` chunk by chunk, with what
quantisation may have hidden.  Blocks of rows are read and scored by a few threads (NumPy lets the others run while it
computes), so memory is a few tens of megabytes whatever the files' size.
"""

from __future__ import annotations

import queue
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from agreement.errors import LogitsFileError
from agreement.kld.logits_file import read_into
from agreement.kld.row_scores import SCORES, Rows, score_rows
from agreement.kld.rows import CODE, bad_head, row_codes, row_heads
from agreement.records import PositionScores

if TYPE_CHECKING:
    from collections.abc import Generator
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from agreement.kld.logits_file import LogitsFile
    from agreement.records import Float32Array, Int32Array

BLOCK_BYTES = 1 << 22
"""Bytes of one file read at once: enough to hide the cost of a call, small enough for the worst case.

Temporary arrays take 30 bytes for each token above the KLD's floor; with a small vocabulary, where all may be, 2 M
codes make 60 MB a thread.
"""


@dataclass(frozen=True)
class ScoredChunk:
    """One chunk of the setting's file against the baseline's.

    With exact logits of the setting instead of its file, llama-perplexity's own KL divergence `k` of a position
    satisfies `kld - kld_rounding <= k`, and `k <= kld + kld_rounding` where `clipped_mass` is 0. Where it is not, the
    setting gave those tokens at most the stored probability: `k` may be larger by an unknown amount.

    Attributes:
        index: Number of the chunk, from 0.
        scores: `kld_low` and `kld_high` are both the KL divergence of the stored values, summed over baseline
            log-probs above -16 as llama-perplexity does. `ambiguous` where two tokens share the top code in the
            baseline's row or in the setting's; elsewhere both argmaxes are exactly the engine's.
        kld_rounding: (n_rows,) float32, nats.
        clipped_mass: (n_rows,) float32, baseline probability of tokens that are clipped in the setting's row.
        n_base_targets_clipped: Positions whose target's log-prob in the baseline is only an upper bound.
        n_test_targets_clipped: The same for the setting.
        identical: Both files hold the same bits in every row of the chunk.
    """

    index: int
    scores: PositionScores
    kld_rounding: Float32Array
    clipped_mass: Float32Array
    n_base_targets_clipped: int
    n_test_targets_clipped: int
    identical: bool


def score_files(base: LogitsFile, test: LogitsFile, *, n_threads: int = 2) -> Generator[ScoredChunk, None, None]:
    """Score the setting's file against the baseline's, chunk by chunk in order.

    Where one of them was cut short (and opened nevertheless), only chunks that both hold whole are scored. Files stay
    open until the generator ends or is closed.

    Args:
        base: The baseline.
        test: The setting.
        n_threads: Blocks in work at the same time.

    Raises:
        LogitsFileError: The files differ in n_ctx, n_vocab, the number of chunks or tokens; or a row is damaged.
    """
    check_same_text(base, test)
    return _scored_chunks(base, test, n_threads)


def check_same_text(base: LogitsFile, test: LogitsFile) -> None:
    """Refuse two files that are not over the same tokens.

    Raises:
        LogitsFileError: They differ; the message names the field.
    """
    pair = f"{base.path} and {test.path}"
    advice = "run both on the same text with the same -c and --chunks"
    for name, one, other in (
        ("n_ctx", base.n_ctx, test.n_ctx),
        ("n_vocab", base.n_vocab, test.n_vocab),
        ("n_chunk", base.n_chunk_claimed, test.n_chunk_claimed),
    ):
        if one != other:
            raise LogitsFileError(f"{pair} differ in {name}: {one} and {other}; {advice}")
    n = min(base.n_chunk, test.n_chunk)
    different = np.flatnonzero(base.tokens[:n] != test.tokens[:n])
    if different.size:
        chunk, position = divmod(int(different[0]), base.n_ctx)
        one, other = int(base.tokens[chunk, position]), int(test.tokens[chunk, position])
        raise LogitsFileError(
            f"{pair} differ in tokens: {one} and {other} at position {position} of chunk {chunk}; {advice}"
        )


def _scored_chunks(base: LogitsFile, test: LogitsFile, n_threads: int) -> Generator[ScoredChunk, None, None]:
    n_rows, n_chunk = base.n_rows, min(base.n_chunk, test.n_chunk)
    step = max(1, BLOCK_BYTES // base.row_bytes)
    starts = range(0, n_chunk * n_rows, step)
    blocks = iter(starts)
    targets = base.targets.reshape(-1)
    index, pending = 0, np.empty(0, dtype=SCORES)
    with ExitStack() as stack:
        n_spaces = max(1, min(n_threads, len(starts)))
        spaces = [_Workspace(base, test, min(step, n_chunk * n_rows), stack) for _ in range(n_spaces)]
        free: queue.SimpleQueue[_Workspace] = queue.SimpleQueue()
        for space in spaces:
            free.put(space)

        def work(start: int) -> NDArray[np.void]:
            space = free.get()
            try:
                return space.score(start, targets[: n_chunk * n_rows][start : start + step])
            finally:
                free.put(space)

        pool = ThreadPoolExecutor(len(spaces))
        stack.callback(pool.shutdown, cancel_futures=True)
        running: deque[Future[NDArray[np.void]]] = deque()
        while True:
            # One more than there are threads, so that none waits while a chunk is being handed over.
            while len(running) <= len(spaces) and (start := next(blocks, None)) is not None:
                running.append(pool.submit(work, start))
            if not running:
                return
            pending = np.concatenate([pending, running.popleft().result()])
            while len(pending) >= n_rows:
                yield _chunk(index, pending[:n_rows], base.targets[index])
                index, pending = index + 1, pending[n_rows:]


def _chunk(index: int, rows: NDArray[np.void], targets: Int32Array) -> ScoredChunk:
    def column(name: str) -> NDArray[Any]:
        return np.ascontiguousarray(rows[name])

    kld = column("kld")
    scores = PositionScores(
        base_top=column("base_top"),
        base_target_logprob=column("base_target_logprob"),
        base_margin=column("base_margin"),
        test_top=column("test_top"),
        test_target_logprob=column("test_target_logprob"),
        kld_low=kld,
        kld_high=kld,
        target=targets.copy(),
        ambiguous=column("ambiguous"),
    )
    return ScoredChunk(
        index=index,
        scores=scores,
        kld_rounding=column("kld_rounding"),
        clipped_mass=column("clipped_mass"),
        n_base_targets_clipped=int(rows["base_target_clipped"].sum()),
        n_test_targets_clipped=int(rows["test_target_clipped"].sum()),
        identical=bool(rows["identical"].all()),
    )


class _Workspace:
    """Open files and buffers of one thread."""

    def __init__(self, base: LogitsFile, test: LogitsFile, n: int, stack: ExitStack) -> None:
        self.base, self.test = base, test
        shape = (n, row_codes(base.n_vocab))
        self._files = [(file, self._open(file, stack), np.empty(shape, dtype=CODE)) for file in (base, test)]
        self._mask = np.empty(shape, dtype=np.bool_)

    @staticmethod
    def _open(file: LogitsFile, stack: ExitStack) -> BinaryIO:
        try:
            return stack.enter_context(file.path.open("rb", buffering=0))
        except OSError as error:
            raise LogitsFileError(f"{file.path}: cannot be read ({error.strerror or error})") from error

    def score(self, start: int, targets: Int32Array) -> NDArray[np.void]:
        """Read and score the rows from `start` on, one for each target: (n,) of `SCORES`."""
        n = len(targets)
        base, test = (self._read(*source, start, n) for source in self._files)
        return score_rows(base, test, targets, self._mask[:n])

    @staticmethod
    def _read(file: LogitsFile, handle: BinaryIO, buffer: NDArray[np.uint16], start: int, n: int) -> Rows:
        raw = buffer[:n]
        read_into(handle, file.body_offset + start * file.row_bytes, raw, file.path)
        scale, min_log_prob = row_heads(raw)
        rows = Rows(file, start, raw, scale, min_log_prob)
        if (found := bad_head(scale, min_log_prob, file.n_vocab)) is not None:
            raise rows.damaged(*found)
        return rows

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
from agreement.kld.rows import CODE, HEAD_CODES, KLD_FLOOR, TOP_CODE, clipped_rows, row_codes
from agreement.records import PositionScores

if TYPE_CHECKING:
    from collections.abc import Generator
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from agreement.kld.logits_file import LogitsFile
    from agreement.records import Float32Array, Int32Array

BLOCK_BYTES = 1 << 22
"""Bytes of one file read at once: enough to hide the cost of a call, small enough for the worst case below.

Temporary arrays take 30 bytes for each token above the KLD's floor; if all are (a flat distribution), 2 M codes make
60 MB a thread.
"""

_ROUNDING_CODES = 0.52
"""Largest rounding error of a code in units of a code: half, and what `1 / scale` adds in float32 at 65535."""

_FLOAT32_NATS = 1e-5
"""Room for float32 rounding of logits up to 64 in either program, nats."""

_SCORES = np.dtype(
    [
        ("base_top", np.int32),
        ("base_target_logprob", np.float32),
        ("base_margin", np.float32),
        ("test_top", np.int32),
        ("test_target_logprob", np.float32),
        ("kld", np.float32),
        ("ambiguous", np.bool_),
        ("kld_rounding", np.float32),
        ("clipped_mass", np.float32),
        ("base_target_clipped", np.bool_),
        ("test_target_clipped", np.bool_),
        ("identical", np.bool_),
    ]
)


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
    blocks = iter(range(0, n_chunk * n_rows, step))
    targets = base.targets.reshape(-1)
    index, pending = 0, np.empty(0, dtype=_SCORES)
    with ExitStack() as stack:
        spaces = [_Workspace(base, test, min(step, n_chunk * n_rows), stack) for _ in range(max(1, n_threads))]
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
        """Read and score the rows from `start` on, one for each target: (n,) of `_SCORES`."""
        n = len(targets)
        part = slice(start, start + n)
        for file, handle, buffer in self._files:
            read_into(handle, file.body_offset + start * file.row_bytes, buffer[:n], file.path)
        (base, _, base_raw), (test, _, test_raw) = self._files
        base_rows = _Rows(base, base_raw[:n], base.scale[part], base.min_log_prob[part], start)
        test_rows = _Rows(test, test_raw[:n], test.scale[part], test.min_log_prob[part], start)
        return _score(base_rows, test_rows, targets, self._mask[:n])


@dataclass(frozen=True)
class _Rows:
    """Some rows of a file: `raw` (n, row_codes) uint16 with heads and padding; scale and minimum (n,) float32."""

    file: LogitsFile
    raw: NDArray[np.uint16]
    scale: Float32Array
    min_log_prob: Float32Array
    start: int

    @property
    def codes(self) -> NDArray[np.uint16]:
        """Return the codes alone, (n, n_vocab)."""
        return self.raw[:, HEAD_CODES : HEAD_CODES + self.file.n_vocab]

    def log_probs(self, codes: NDArray[np.uint16], counts: NDArray[np.intp]) -> Float32Array:
        """Dequantise codes picked from the rows in order, `counts` from each."""
        result = codes.astype(np.float32)
        result *= np.repeat(self.scale, counts)
        result += np.repeat(self.min_log_prob, counts)
        return result

    def where(self, mask: NDArray[np.bool_]) -> NDArray[np.intp]:
        """Return the flat indices into `raw` where the mask holds, leaving out heads and padding."""
        mask[:, :HEAD_CODES] = False
        mask[:, HEAD_CODES + self.file.n_vocab :] = False
        return np.flatnonzero(mask)

    def damaged(self, row: int, why: str) -> LogitsFileError:
        """Return the error that names row `row` of this block."""
        chunk, in_chunk = divmod(self.start + row, self.file.n_rows)
        return LogitsFileError(f"{self.file.path}: chunk {chunk}, row {in_chunk}: {why}; the file is damaged")


def _score(base: _Rows, test: _Rows, targets: Int32Array, mask: NDArray[np.bool_]) -> NDArray[np.void]:
    n, width = base.raw.shape
    out = np.zeros(n, dtype=_SCORES)
    rows = np.arange(n)
    # Few tokens of a large vocabulary have a log-prob above the floor of the KL divergence, so those are picked first;
    # the best two are among them. Two codes below the floor leave room for rounding; the exact cut follows.
    with np.errstate(divide="ignore", over="ignore"):
        lowest = (KLD_FLOOR - base.min_log_prob.astype(np.float64)) / base.scale.astype(np.float64)
    lowest = np.where(base.scale > 0, np.clip(np.floor(lowest) - 2, 0, TOP_CODE), 0).astype(np.uint16)
    picked = base.where(np.greater_equal(base.raw, lowest[:, None], out=mask))
    bounds = np.searchsorted(picked, np.arange(n + 1) * width)
    counts, begins = np.diff(bounds), bounds[:-1]
    if not counts.all():
        raise base.damaged(int(np.flatnonzero(counts == 0)[0]), "no token has a probability above e^-16")
    base_codes, test_codes = base.raw.reshape(-1)[picked], test.raw.reshape(-1)[picked]

    _score_tops(base, (picked, base_codes, bounds), out)
    _score_test_tops(test, mask, out)
    _score_divergence(base, test, (base_codes, test_codes, counts, begins), out)

    for side, name in ((base, "base"), (test, "test")):
        codes = side.raw[rows, targets + HEAD_CODES]
        out[f"{name}_target_logprob"] = side.log_probs(codes, np.ones(n, dtype=np.intp))
        out[f"{name}_target_clipped"] = (codes == 0) & clipped_rows(side.scale)
    same = np.flatnonzero((base.scale == test.scale) & (base.min_log_prob == test.min_log_prob))
    out["identical"][same] = (base.codes[same] == test.codes[same]).all(axis=1)
    return out


def _score_tops(
    base: _Rows, selection: tuple[NDArray[np.intp], NDArray[np.uint16], NDArray[np.intp]], out: NDArray[np.void]
) -> None:
    """Fill in the baseline's best token, its lead, and whether another shares its code."""
    picked, codes, bounds = selection
    n, width = base.raw.shape
    counts, begins = np.diff(bounds), bounds[:-1]
    top = np.maximum.reduceat(codes, begins)
    at_top = np.flatnonzero(codes == np.repeat(top, counts))
    row_of = np.searchsorted(bounds, at_top, side="right") - 1
    first = at_top[np.searchsorted(row_of, np.arange(n))]
    token = picked[first] - np.arange(n) * width - HEAD_CODES
    others = codes.copy()
    others[first] = 0
    second = np.maximum.reduceat(others, begins)
    for row in np.flatnonzero(counts == 1):  # the best token alone is above the floor
        column = int(token[row])
        whole = base.codes[row]
        second[row] = max(whole[:column].max(initial=0), whole[column + 1 :].max(initial=0))
    out["base_top"] = token
    out["base_margin"] = (top - second).astype(np.float32) * base.scale
    # Rounding never swaps two tokens, so unequal codes prove the order, and only equal ones leave it open.
    out["ambiguous"] |= top == second


def _score_test_tops(test: _Rows, mask: NDArray[np.bool_], out: NDArray[np.void]) -> None:
    """Fill in the setting's best token and whether another shares its code; `mask` is scratch."""
    n, width = test.raw.shape
    at_top = test.where(np.equal(test.raw, TOP_CODE, out=mask))
    row_of = at_top // width
    n_top = np.bincount(row_of, minlength=n)
    token = np.zeros(n, dtype=np.intp)
    found = n_top > 0
    token[found] = (at_top - row_of * width - HEAD_CODES)[np.searchsorted(row_of, np.flatnonzero(found))]
    for row in np.flatnonzero(~found):  # a row without spread, or a writer that does not use the last code
        codes = test.codes[row]
        token[row] = codes.argmax()
        n_top[row] = np.count_nonzero(codes == codes.max())
    out["test_top"] = token
    out["ambiguous"] |= n_top > 1


def _score_divergence(
    base: _Rows,
    test: _Rows,
    selection: tuple[NDArray[np.uint16], NDArray[np.uint16], NDArray[np.intp], NDArray[np.intp]],
    out: NDArray[np.void],
) -> None:
    """Fill in `sum p_b (lp_b - lp_t)` over baseline log-probs above -16, and what quantisation may have changed."""
    base_codes, test_codes, counts, begins = selection
    log_base = base.log_probs(base_codes, counts)
    log_test = test.log_probs(test_codes, counts)
    p = np.exp(log_base)
    p[log_base <= KLD_FLOOR] = 0
    # Summed in float64: the terms of both signs are hundreds of times larger than their sum.
    mass = np.add.reduceat(p, begins, dtype=np.float64)
    n_vocab = base.file.n_vocab
    tolerance = 1e-3 + n_vocab * np.exp(KLD_FLOOR)  # float32 and code rounding; all that is below the floor
    if (off := np.abs(mass - 1) > tolerance).any():
        row = int(np.flatnonzero(off)[0])
        raise base.damaged(row, f"its probabilities sum to {mass[row]:.6g}, not 1")
    log_base -= log_test
    log_base *= p
    out["kld"] = np.add.reduceat(log_base, begins, dtype=np.float64)
    out["kld_rounding"] = mass * (_ROUNDING_CODES * test.scale + _FLOAT32_NATS)
    cut = clipped_rows(test.scale)
    if cut.any():
        p[test_codes != 0] = 0
        out["clipped_mass"] = np.where(cut, np.add.reduceat(p, begins, dtype=np.float64), 0)

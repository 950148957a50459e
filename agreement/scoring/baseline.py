"""What is kept of the baseline's logits at each scored position.

In: float32 logits `(n, n_vocab)` and target ids.  Out: `BaselineRows`: exact numbers for everything that decides an
agreement or a perplexity, and of the rest of the distribution either 16-bit codes or what bounds of KLD need.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agreement.errors import EngineError, StoreError
from agreement.records import Float32Array, Float64Array, Int32Array
from agreement.scoring.compact import CompactRows, compact_bytes, encode_compact
from agreement.scoring.idlist import UInt8Array
from agreement.scoring.rows import for_each_block, row_blocks, scratch

CODE_MAX = 65535
FULL_TOP_K = 32
COMPACT_TOP_K = 64
_STRIDE_GROUPS = 64


@dataclass(frozen=True)
class BaselineRows:
    """The baseline at `n` scored positions.

    Attributes:
        n_vocab: Size of the vocabulary.
        target: (n,) int32, the true next token.
        target_logprob: (n,) float32, nats, exact.
        logsumexp: (n,) float32, of the raw logits, nats.
        top_ids: (n, top_k) int32, the most probable tokens, best first; of equal ones the lower id first.
        top_logprobs: (n, top_k) float32, nats, exact.
        codes: (n, n_vocab) uint16 or None: log-prob = low + step * code.
        low: (n,) float32, the smallest log-probability, nats; None without codes.
        step: (n,) float32, nats a code; None without codes.
        ambiguous: (n,) bool, positions whose two best tokens share a code, where all there is came from codes; None
            where the numbers above are exact.

    The others are those of `CompactRows`, and None with codes.
    """

    n_vocab: int
    target: Int32Array
    target_logprob: Float32Array
    logsumexp: Float32Array
    top_ids: Int32Array
    top_logprobs: Float32Array
    codes: NDArray[np.uint16] | None = None
    low: Float32Array | None = None
    step: Float32Array | None = None
    ambiguous: NDArray[np.bool_] | None = None
    listed_ids: UInt8Array | None = None
    listed_codes: UInt8Array | None = None
    listed_low: Float64Array | None = None
    listed_step: Float64Array | None = None
    correction: Float64Array | None = None
    known_mass: Float64Array | None = None
    known_gain: Float64Array | None = None
    known_residual: Float64Array | None = None
    tail_mass: Float64Array | None = None
    tail_entropy: Float64Array | None = None

    def compact(self, start: int, stop: int) -> CompactRows:
        """Return rows `[start, stop)` of what the bounds of KLD need; only without codes.

        Raises:
            StoreError: The recording kept nothing of the distribution.
        """
        if self.listed_codes is None:
            raise StoreError(
                "the recording keeps nothing of the distribution beside its top; record the baseline again"
            )
        return CompactRows(**{f.name: getattr(self, f.name)[start:stop] for f in fields(CompactRows)})


def default_top_k(n_vocab: int, *, full: bool) -> int:
    """Return how many tokens are kept exactly: enough for margins, and for most of the probability of most rows."""
    return min(n_vocab, FULL_TOP_K if full else COMPACT_TOP_K)


def row_bytes(n_vocab: int, *, full: bool, top_k: int) -> int:
    """Return the bytes of one row of `BaselineRows`, uncompressed as it is stored."""
    top_k = min(top_k, n_vocab)
    exact = 3 * 4 + 8 * top_k  # target, its log-probability, logsumexp; ids and log-probabilities of the top
    return exact + (2 * n_vocab + 2 * 4 if full else compact_bytes(n_vocab, top_k))


def encode_rows(
    logits: Float32Array,
    targets: Int32Array,
    *,
    top_k: int,
    full: bool,
    pool: ThreadPoolExecutor | None = None,
) -> BaselineRows:
    """Keep what is needed of baseline logits.

    Args:
        logits: (n, n_vocab) float32, copied if not C-contiguous (sums over strided rows are less exact); only read.
        targets: (n,) int32 ids of the true next tokens.
        top_k: Tokens kept exactly, at least 2 unless the vocabulary is smaller.
        full: Keep the rest of the distribution as 16-bit codes over each row's own range, else as `CompactRows`.
            The range is coded whole, not clipped as in llama-perplexity's file; at 30 nats a code is 4.6e-4 nat.
        pool: Threads to spread the rows over.

    Raises:
        EngineError: A logit is NaN or infinite; the message names the row.
    """
    logits = np.ascontiguousarray(logits)
    n, n_vocab = logits.shape
    top_k = min(top_k, n_vocab)
    target_logprob, logsumexp = np.empty(n, np.float32), np.empty(n, np.float32)
    top_ids, top_logprobs = np.empty((n, top_k), np.int32), np.empty((n, top_k), np.float32)
    codes = np.empty((n, n_vocab), np.uint16) if full else None
    low, step = (np.empty(n, np.float32), np.empty(n, np.float32)) if full else (None, None)
    compact: dict[int, CompactRows] = {}

    def work(start: int, stop: int) -> None:
        block = logits[start:stop]
        ids = top_indices(block, top_k)
        best = np.take_along_axis(block, ids[:, :1], axis=1)
        check_finite(block, best[:, 0], start)
        buffer = np.subtract(block, best, out=scratch(*block.shape))
        np.exp(buffer, out=buffer)
        lse = best + np.log(buffer.sum(axis=1, keepdims=True))
        top_ids[start:stop] = ids
        top_logprobs[start:stop] = np.take_along_axis(block, ids, axis=1) - lse
        target_logprob[start:stop] = (np.take_along_axis(block, targets[start:stop, None], axis=1) - lse)[:, 0]
        logsumexp[start:stop] = lse[:, 0]
        if codes is not None and low is not None and step is not None:
            smallest = block.min(axis=1, keepdims=True)
            width = (best - smallest) / np.float32(CODE_MAX)
            low[start:stop], step[start:stop] = (smallest - lse)[:, 0], width[:, 0]
            np.subtract(block, smallest, out=buffer)
            buffer *= 1 / np.where(width > 0, width, 1)
            buffer += np.float32(0.5)  # the cast truncates: this rounds
            np.minimum(buffer, CODE_MAX, out=buffer)
            np.copyto(codes[start:stop], buffer, casting="unsafe")
        else:
            compact[start] = encode_compact(block, ids, top_logprobs[start:stop])

    for_each_block(work, n, n_vocab, pool)
    return BaselineRows(
        n_vocab=n_vocab,
        target=targets.astype(np.int32, copy=False),
        target_logprob=target_logprob,
        logsumexp=logsumexp,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        codes=codes,
        low=low,
        step=step,
        **_joined([compact[start] for start in sorted(compact)]),
    )


def _joined(parts: list[CompactRows]) -> dict[str, NDArray[Any]]:
    if not parts:
        return {}
    return {f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(CompactRows)}


def quantised_rows(
    codes: NDArray[np.uint16], low: Float32Array, step: Float32Array, targets: Int32Array
) -> BaselineRows:
    """Return the baseline from codes alone, as a llama-perplexity file has it: nothing in it is exact.

    Args:
        codes: (n, n_vocab) uint16; log-prob = low + step * code.
        low: (n,) float32, nats.
        step: (n,) float32, nats a code.
        targets: (n,) int32 ids of the true next tokens.
    """
    n, n_vocab = codes.shape
    top_k = min(FULL_TOP_K, n_vocab)
    ids = np.empty((n, top_k), np.int64)
    for start, stop in row_blocks(n, n_vocab):
        ids[start:stop] = top_indices(codes[start:stop].astype(np.float32), top_k)

    def logprobs(of: NDArray[Any]) -> Float32Array:
        picked = np.take_along_axis(codes, of, axis=1)
        values: Float32Array = np.multiply(picked, step[:, None], dtype=np.float32) + low[:, None]
        return values

    best = np.take_along_axis(codes, ids[:, :2], axis=1)
    return BaselineRows(
        n_vocab=n_vocab,
        target=targets,
        target_logprob=logprobs(targets[:, None].astype(np.int64))[:, 0],
        logsumexp=np.zeros(n, np.float32),
        top_ids=ids.astype(np.int32),
        top_logprobs=logprobs(ids),
        codes=codes,
        low=low,
        step=step,
        ambiguous=best[:, 0] == best[:, -1] if best.shape[1] > 1 else np.zeros(n, np.bool_),
    )


def check_finite(block: Float32Array, best: Float32Array, first_row: int) -> None:
    """Refuse NaN and infinite logits.

    The maximum alone shows NaN and +inf; -inf everywhere but in a few places also counts as broken here, because a
    log-probability of -inf makes KL divergence infinite.

    Args:
        block: (r, n_vocab) float32 logits.
        best: (r,) float32, each row's value at its argmax.
        first_row: Row number of the block's first row, for the message.

    Raises:
        EngineError: Some logit is not finite; names the first such row and how many rows have one.
    """
    # A NaN anywhere makes the minimum NaN, and an infinity is the minimum or the maximum.
    bad = ~(np.isfinite(best) & np.isfinite(block.min(axis=1)))
    if bad.any():
        row = first_row + int(np.argmax(bad))
        values = block[int(np.argmax(bad))]
        kind = "NaN" if np.isnan(values).any() else "infinite"
        raise EngineError(f"logits are {kind} at row {row} ({int(bad.sum())} such rows in its block)")


def top_indices(block: Float32Array, k: int) -> NDArray[np.int64]:
    """Return the indices of the `k` largest values of each row, (r, k), largest first, of equal ones the lower first.

    Selecting among 150,000 values a row costs more than everything else together, so for large rows the candidates
    are thinned first: the k-th largest of the maxima of disjoint groups is a lower bound for the k-th largest value.
    """
    r, n = block.shape
    groups = _STRIDE_GROUPS
    if r == 0:
        return np.empty((0, min(k, n)), np.int64)
    if n < 64 * groups or k * 4 > n // groups:
        return _top_of_rows(block, min(k, n))
    whole = n // groups * groups
    maxima = block[:, :whole].reshape(r, groups, -1).max(axis=1)  # groups of every (n // groups)-th value
    bound = np.partition(maxima, maxima.shape[1] - k, axis=1)[:, -k]
    result = np.empty((r, k), np.int64)
    for i in range(r):
        candidates = np.flatnonzero(~(block[i] < bound[i]))
        result[i] = _top_of(block[i, candidates], candidates, k)
    return result


def _top_of_rows(block: Float32Array, k: int) -> NDArray[np.int64]:
    """Select in all rows at once; rows with a tie at the k-th place, or a NaN, one by one."""
    n = block.shape[1]
    bound = np.partition(block, n - k, axis=1)[:, n - k]
    chosen = block >= bound[:, None]
    plain = chosen.sum(axis=1) == k
    result = np.empty((len(block), k), np.int64)
    ids = np.nonzero(chosen[plain])[1].reshape(-1, k)  # ascending in each row, so a stable sort keeps the lower first
    order = np.argsort(-np.take_along_axis(block[plain], ids, axis=1), axis=1, kind="stable")
    result[plain] = np.take_along_axis(ids, order, axis=1)
    for i in np.flatnonzero(~plain):
        result[i] = _top_of(block[i], np.arange(n), k)
    return result


def _top_of(values: Float32Array, ids: NDArray[np.int64], k: int) -> NDArray[np.int64]:
    if k < len(values):
        bound = np.partition(values, len(values) - k)[-k]
        keep = ~(values < bound)  # not `>=`: NaN must come through, to be reported
        values, ids = values[keep], ids[keep]
    return ids[np.lexsort((ids, -values))[:k]]

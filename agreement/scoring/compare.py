"""A setting's logits against the recorded baseline, position by position.

In: `BaselineRows` and float32 logits `(n, n_vocab)` of the same positions.  Out: `RowScores`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from agreement.errors import IdentityError
from agreement.records import Float32Array, Int32Array
from agreement.scoring.baseline import BaselineRows, check_finite
from agreement.scoring.compact import bounded_kld
from agreement.scoring.rows import for_each_block, scratch


@dataclass(frozen=True)
class RowScores:
    """A setting at `n` scored positions.

    Attributes:
        top: (n,) int32, the setting's argmax; of equal logits the lower id.
        target_logprob: (n,) float32, nats.
        logsumexp: (n,) float32, of the raw logits, nats.
        kld_low: (n,) float32, nats, KL divergence baseline‖setting or its lower bound.
        kld_high: (n,) float32, nats, the same value or its upper bound.
    """

    top: Int32Array
    target_logprob: Float32Array
    logsumexp: Float32Array
    kld_low: Float32Array
    kld_high: Float32Array


def score_rows(base: BaselineRows, logits: Float32Array, *, pool: ThreadPoolExecutor | None = None) -> RowScores:
    """Compare a setting's logits with the baseline's record.

    With the full distribution recorded, KLD is `sum_v p_b(v) (log p_b(v) - log p_t(v))`, in which the most probable
    tokens enter with their exact log-probabilities and the others with their codes.  Without it, KLD is bounded from
    what `CompactRows` keeps; the bounds are derived in `docs/method.md`.

    Args:
        base: The baseline at these positions.
        logits: (n, n_vocab) float32, copied if not C-contiguous; only read.
        pool: Threads to spread the rows over.

    Raises:
        IdentityError: Another vocabulary or number of positions than the baseline's.
        EngineError: A logit is NaN or infinite.
    """
    logits = np.ascontiguousarray(logits)
    n, n_vocab = logits.shape
    if (n, n_vocab) != (len(base.target), base.n_vocab):
        raise IdentityError(
            f"the baseline has {len(base.target)} positions of {base.n_vocab} tokens, these logits {n} of {n_vocab}"
        )
    out = RowScores(
        top=np.empty(n, np.int32),
        target_logprob=np.empty(n, np.float32),
        logsumexp=np.empty(n, np.float32),
        kld_low=np.empty(n, np.float32),
        kld_high=np.empty(n, np.float32),
    )

    def work(start: int, stop: int) -> None:
        block = logits[start:stop]
        top = block.argmax(axis=1)
        best = np.take_along_axis(block, top[:, None], axis=1)
        check_finite(block, best[:, 0], start)
        buffer = np.subtract(block, best, out=scratch(*block.shape))
        np.exp(buffer, out=buffer)
        lse = best + np.log(buffer.sum(axis=1, keepdims=True))
        out.top[start:stop] = top
        out.logsumexp[start:stop] = lse[:, 0]
        targets = base.target[start:stop, None]
        out.target_logprob[start:stop] = np.take_along_axis(block, targets, axis=1)[:, 0] - lse[:, 0]
        if base.codes is None:
            low, high = bounded_kld(
                base.compact(start, stop), base.top_ids[start:stop], base.top_logprobs[start:stop], block
            )
        else:
            low = high = _full_kld(base, start, stop, block, lse, buffer)
        # Rounding can leave a divergence of equal distributions a hair below zero.
        out.kld_low[start:stop] = np.maximum(low, 0)
        out.kld_high[start:stop] = np.maximum(high, 0)

    for_each_block(work, n, n_vocab, pool)
    return out


def _full_kld(
    base: BaselineRows, start: int, stop: int, block: Float32Array, lse: Float32Array, buffer: Float32Array
) -> Float32Array:
    """Return (stop - start,) KLD from codes, in `buffer` and one more array of the block's size."""
    if base.codes is None or base.step is None or base.low is None:
        raise AssertionError("called without codes")
    np.multiply(base.codes[start:stop], base.step[start:stop, None], out=buffer)
    buffer += base.low[start:stop, None]
    np.put_along_axis(buffer, base.top_ids[start:stop].astype(np.int64), base.top_logprobs[start:stop], axis=1)
    p = np.exp(buffer, out=scratch(block.shape[0], block.shape[1], 1))
    # The shift comes before the difference: logits near 20 would otherwise cost two digits of a small divergence.
    buffer += lse
    buffer -= block
    p *= buffer
    kld: Float32Array = p.sum(axis=1)
    return kld

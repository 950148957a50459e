"""One row of a logits file: the log-probabilities of one position as 16-bit codes.

A row on disk is `float32 scale, float32 min_log_prob, uint16 code[n_vocab]` and one unused code if `n_vocab` is odd.
In: float32 logits.  Out: codes that equal those of llama.cpp's own writer, and the way back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from agreement.errors import LogitsFileError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from agreement.records import Float32Array

CODE = np.dtype("<u2")
FLOAT = np.dtype("<f4")
HEAD_CODES = 4  # the two float32 of a row's head take the room of four codes
TOP_CODE = 65535  # code of a row's best token, if the row has any spread
LLAMA_CPP_NATS = 16.0  # llama.cpp clips this far below the best token
IK_LLAMA_NATS = 24.0  # ik_llama.cpp clips here
KLD_FLOOR = -16.0  # both tools leave baseline log-probs at or below this out of the KL divergence
SPAN_TOLERANCE = 1e-4  # nats; float32 rounding of `scale * 65535` at logits up to some hundreds

_LOG_PROB_TOLERANCE = 1e-3  # nats; for checks of normalisation only, far above float32 rounding


@dataclass(frozen=True)
class QuantisedRows:
    """Quantised log-probabilities of some positions.

    Attributes:
        codes: (n_rows, n_vocab) uint16; the log-prob is `scale * code + min_log_prob`, in float32.
        scale: (n_rows,) float32, nats a code; 0 where all logits are equal.
        min_log_prob: (n_rows,) float32, nats.
    """

    codes: NDArray[np.uint16]
    scale: Float32Array
    min_log_prob: Float32Array


def row_codes(n_vocab: int) -> int:
    """Return the length of a row in units of 16 bits, head and padding included."""
    return 2 * ((n_vocab + 1) // 2) + HEAD_CODES


def row_heads(raw: NDArray[np.uint16]) -> tuple[Float32Array, Float32Array]:
    """Return scale and min_log_prob, (n,) float32 each, of rows as they are on disk, (n, at least 4) uint16."""
    heads = raw[:, :HEAD_CODES].copy().view(FLOAT)
    return heads[:, 0].astype(np.float32), heads[:, 1].astype(np.float32)


def quantise(logits: Float32Array, *, max_nats: float = LLAMA_CPP_NATS) -> QuantisedRows:
    """Quantise logits (or log-probabilities: the same up to a constant) as llama.cpp's perplexity tool does.

    Per row, all in float32 but the sum: with `lo = max(min(x), max(x) - max_nats)` and
    `lse = log(sum(exp(x - max(x))))`, it stores `scale = (max(x) - lo) / 65535`,
    `min_log_prob = lo - max(x) - lse`, and the code `round((x - lo) * (1 / scale))` with halves to even, 0 at or below
    `lo`.
    Codes and scales are bit for bit those of the tool on a machine whose compiler does not fuse multiply and add
    (x86-64 by default); `min_log_prob` may differ by one unit in the last place, where `exp` of two libraries does.

    Args:
        logits: (n_rows, n_vocab) float32; -inf is allowed (a token that cannot occur), NaN and +inf are not.
        max_nats: `LLAMA_CPP_NATS` or `IK_LLAMA_NATS`.

    Raises:
        LogitsFileError: The shape is wrong, or a row holds NaN or +inf, or -inf only.
    """
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise LogitsFileError(
            f"logits of shape {logits.shape} cannot be stored; give (n_rows, n_vocab) with n_vocab > 1"
        )
    x = np.asarray(logits, dtype=np.float32)
    top = x.max(axis=1, initial=-np.inf)
    if not np.isfinite(top).all():  # a NaN anywhere makes the maximum NaN
        row = int(np.flatnonzero(~np.isfinite(top))[0])
        raise LogitsFileError(f"row {row}: the largest logit is {top[row]}; logits must be numbers to be stored")
    low = np.maximum(x.min(axis=1), top - np.float32(max_nats))
    shifted = x - top[:, None]
    np.exp(shifted, out=shifted)
    log_sum = np.log(shifted.sum(axis=1, dtype=np.float64)).astype(np.float32)
    min_log_prob = low - top - log_sum
    scale = (top - low) / np.float32(TOP_CODE)
    with np.errstate(over="ignore"):
        inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    inverse[np.isinf(inverse)] = 0  # a spread below 1e-34: there the tool's rounding ends in code 0, too
    above = np.subtract(x, low[:, None], out=shifted)
    np.maximum(above, np.float32(0), out=above)
    above *= inverse[:, None]
    np.rint(above, out=above)
    return QuantisedRows(above.astype(np.uint16), scale, min_log_prob)


def dequantise(rows: QuantisedRows, out: Float32Array | None = None) -> Float32Array:
    """Return the stored log-probabilities, (n_rows, n_vocab) float32 nats, in `out` if given.

    Multiplication and addition are rounded one after the other, as the tool does.
    """
    result = np.multiply(rows.codes, rows.scale[:, None], out=out, dtype=np.float32)
    result += rows.min_log_prob[:, None]
    return result


def clipped_rows(scale: Float32Array) -> NDArray[np.bool_]:
    """Return which rows, (n_rows,) bool, are cut off at either writer's limit, so that code 0 means "this or less"."""
    span = scale.astype(np.float64) * TOP_CODE
    return np.asarray(
        (np.abs(span - LLAMA_CPP_NATS) <= SPAN_TOLERANCE) | (np.abs(span - IK_LLAMA_NATS) <= SPAN_TOLERANCE),
        dtype=np.bool_,
    )


def bad_head(scale: Float32Array, min_log_prob: Float32Array, n_vocab: int) -> tuple[int, str] | None:
    """Return the first row whose head no distribution over `n_vocab` tokens can have, and why; None if all can be.

    The best token's log-prob, `65535 * scale + min_log_prob`, must lie in `[-ln(n_vocab), 0]`; a row without spread
    is uniform. This finds zeroed and shifted data as well as numbers that are none.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        best = scale.astype(np.float64) * TOP_CODE + min_log_prob
        finite = np.isfinite(scale) & np.isfinite(min_log_prob)
        in_range = (best <= _LOG_PROB_TOLERANCE) & (best >= -np.log(n_vocab) - _LOG_PROB_TOLERANCE)
        uniform = (scale != 0) | (best <= -np.log(n_vocab) + _LOG_PROB_TOLERANCE)
    good = finite & (scale >= 0) & in_range & uniform
    if good.all():
        return None
    row = int(np.flatnonzero(~good)[0])
    values = f"scale {scale[row]}, min_log_prob {min_log_prob[row]}"
    if not finite[row]:
        return row, f"{values}: not a number (the engine computed NaN or infinity, or the file is damaged)"
    if scale[row] < 0:
        return row, f"{values}: a negative scale"
    return row, f"{values}: the best token's log-prob would be {best[row]:.6g}, impossible with {n_vocab} tokens"

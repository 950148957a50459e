"""Scores of some rows of two logits files against each other; pure.

In: rows as they are on disk.  Out: one record a row.  Two ways lead to the same numbers: where few tokens of a large
vocabulary have a log-prob above the floor of the KL divergence, as in real text, only those are picked and computed;
where many have, whole rows are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from agreement.errors import LogitsFileError
from agreement.kld.rows import HEAD_CODES, KLD_FLOOR, TOP_CODE, clipped_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from agreement.kld.logits_file import LogitsFile
    from agreement.records import Float32Array, Float64Array, Int32Array

SCORES = np.dtype(
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

_ROUNDING_CODES = 0.52
"""Largest rounding error of a code in units of a code: half, and what `1 / scale` adds in float32 at 65535."""

_FLOAT32_NATS = 1e-5
"""Room for float32 rounding of logits up to 64 in either program, nats."""

_LONG_ROW = 4096  # codes; from here on a loop over whole rows costs less than picking, if there is much to pick
_MANY = 1 / 16  # share of tokens above the floor from which whole rows are quicker


@dataclass(frozen=True)
class Rows:
    """Some rows of a file.

    Attributes:
        file: Where they come from.
        start: Number of the first in the file.
        raw: (n, row_codes) uint16, with heads and padding.
        scale: (n,) float32, checked.
        min_log_prob: (n,) float32, checked.
    """

    file: LogitsFile
    start: int
    raw: NDArray[np.uint16]
    scale: Float32Array
    min_log_prob: Float32Array

    @property
    def codes(self) -> NDArray[np.uint16]:
        """The codes alone, (n, n_vocab)."""
        return self.raw[:, HEAD_CODES : HEAD_CODES + self.file.n_vocab]

    def log_probs(self, codes: NDArray[np.uint16], counts: NDArray[np.intp]) -> Float32Array:
        """Dequantise codes picked from the rows in order, `counts` from each."""
        result = codes.astype(np.float32)
        result *= np.repeat(self.scale, counts)
        result += np.repeat(self.min_log_prob, counts)
        return result

    def row_log_probs(self, row: int, out: Float32Array) -> None:
        """Dequantise one row into `out`, (n_vocab,)."""
        np.copyto(out, self.codes[row])
        out *= self.scale[row]
        out += self.min_log_prob[row]

    def damaged(self, row: int, why: str) -> LogitsFileError:
        """Return the error that names row `row` of these."""
        chunk, in_chunk = divmod(self.start + row, self.file.n_rows)
        return LogitsFileError(f"{self.file.path}: chunk {chunk}, row {in_chunk}: {why}")


@dataclass(frozen=True)
class _Picked:
    """Tokens of some rows, row by row.

    Attributes:
        flat: Indices into the flattened `raw`, rising.
        bounds: (n + 1,) where each row's tokens begin and end in `flat`.
    """

    flat: NDArray[np.intp]
    bounds: NDArray[np.intp]

    @property
    def counts(self) -> NDArray[np.intp]:
        """Tokens in each row, (n,)."""
        return np.diff(self.bounds)

    @property
    def begins(self) -> NDArray[np.intp]:
        """Where each row's tokens begin, (n,)."""
        return self.bounds[:-1]


def score_rows(base: Rows, test: Rows, targets: Int32Array, mask: NDArray[np.bool_]) -> NDArray[np.void]:
    """Score the setting's rows against the baseline's.

    Args:
        base: The baseline.
        test: The setting, of the same shape.
        targets: (n,) int32, the true next tokens.
        mask: Scratch of the shape of `raw`.

    Returns:
        (n,) of `SCORES`.

    Raises:
        LogitsFileError: The probabilities of a row of the baseline do not sum to 1.
    """
    n = len(base.raw)
    out = np.zeros(n, dtype=SCORES)
    np.greater_equal(base.raw, _lowest_codes(base)[:, None], out=mask)
    _leave_out_heads(base, mask)
    if base.file.n_vocab >= _LONG_ROW and np.count_nonzero(mask) > _MANY * mask.size:
        mass = _score_whole_rows(base, test, out)
    else:
        mass = _score_picked(base, test, mask, out)
    # What is left out below the floor, and some room for rounding.
    off = np.abs(mass - 1) > 1e-3 + base.file.n_vocab * np.exp(KLD_FLOOR)
    if off.any():
        row = int(np.flatnonzero(off)[0])
        raise base.damaged(row, f"its probabilities sum to {mass[row]:.6g}, not 1; the file is damaged")
    out["kld_rounding"] = mass * (_ROUNDING_CODES * test.scale + _FLOAT32_NATS)
    _score_test_tops(test, mask, out)

    rows, ones = np.arange(n), np.ones(n, dtype=np.intp)
    for side, name in ((base, "base"), (test, "test")):
        codes = side.raw[rows, targets + HEAD_CODES]
        out[f"{name}_target_logprob"] = side.log_probs(codes, ones)
        out[f"{name}_target_clipped"] = (codes == 0) & clipped_rows(side.scale)
    same = np.flatnonzero((base.scale == test.scale) & (base.min_log_prob == test.min_log_prob))
    out["identical"][same] = (base.codes[same] == test.codes[same]).all(axis=1)
    return out


def _lowest_codes(base: Rows) -> NDArray[np.uint16]:
    """Return for each row, (n,), a code just below the floor of the KL divergence.

    Two codes of room for rounding; the exact cut is made on log-probs.
    """
    with np.errstate(divide="ignore", over="ignore"):
        lowest = (KLD_FLOOR - base.min_log_prob.astype(np.float64)) / base.scale.astype(np.float64)
    return np.where(base.scale > 0, np.clip(np.floor(lowest) - 2, 0, TOP_CODE), 0).astype(np.uint16)


def _leave_out_heads(rows: Rows, mask: NDArray[np.bool_]) -> None:
    mask[:, :HEAD_CODES] = False
    mask[:, HEAD_CODES + rows.file.n_vocab :] = False


def _score_picked(base: Rows, test: Rows, mask: NDArray[np.bool_], out: NDArray[np.void]) -> Float64Array:
    """Score the tokens in `mask`, those of the baseline above the floor; return their probability, (n,)."""
    flat = np.flatnonzero(mask)
    picked = _Picked(flat, np.searchsorted(flat, np.arange(len(base.raw) + 1) * base.raw.shape[1]))
    if not picked.counts.all():
        row = int(np.flatnonzero(picked.counts == 0)[0])
        raise base.damaged(row, "no token has a probability above e^-16; the file is damaged")
    base_codes, test_codes = base.raw.reshape(-1)[flat], test.raw.reshape(-1)[flat]
    _score_base_tops(base, picked, base_codes, out)
    log_base = base.log_probs(base_codes, picked.counts)
    p = np.exp(log_base)
    p[log_base <= KLD_FLOOR] = 0
    # Summed in float64: the terms of both signs are hundreds of times larger than their sum.
    mass: Float64Array = np.add.reduceat(p, picked.begins, dtype=np.float64)
    log_base -= test.log_probs(test_codes, picked.counts)
    log_base *= p
    out["kld"] = np.add.reduceat(log_base, picked.begins, dtype=np.float64)
    cut = clipped_rows(test.scale)
    if cut.any():
        p[test_codes != 0] = 0
        out["clipped_mass"] = np.where(cut, np.add.reduceat(p, picked.begins, dtype=np.float64), 0)
    return mass


def _score_base_tops(base: Rows, picked: _Picked, codes: NDArray[np.uint16], out: NDArray[np.void]) -> None:
    """Fill in the baseline's best token, its lead, and whether another shares its code."""
    n, width = base.raw.shape
    counts, begins = picked.counts, picked.begins
    top = np.maximum.reduceat(codes, begins)
    at_top = np.flatnonzero(codes == np.repeat(top, counts))
    row_of = np.searchsorted(picked.bounds, at_top, side="right") - 1
    first = at_top[np.searchsorted(row_of, np.arange(n))]
    token = picked.flat[first] - np.arange(n) * width - HEAD_CODES
    others = codes.copy()
    others[first] = 0
    second = np.maximum.reduceat(others, begins)
    for row in np.flatnonzero(counts == 1):  # the best token alone is above the floor
        second[row] = _second(base.codes[row], int(token[row]))
    _fill_base_tops(base, token, top - second, out)


def _second(codes: NDArray[np.uint16], top: int) -> int:
    """Return the largest code but that of token `top`."""
    return max(int(codes[:top].max(initial=0)), int(codes[top + 1 :].max(initial=0)))


def _fill_base_tops(base: Rows, token: NDArray[np.intp], lead: NDArray[np.uint16], out: NDArray[np.void]) -> None:
    out["base_top"] = token
    out["base_margin"] = lead.astype(np.float32) * base.scale
    # Rounding never swaps two tokens, so unequal codes prove the order, and only equal ones leave it open.
    out["ambiguous"] |= lead == 0


def _score_whole_rows(base: Rows, test: Rows, out: NDArray[np.void]) -> Float64Array:
    """Do what `_score_picked` does, a row at a time, with arrays that stay in the processor's cache."""
    n, n_vocab = base.codes.shape
    mass = np.empty(n, dtype=np.float64)
    token, lead = np.empty(n, dtype=np.intp), np.empty(n, dtype=np.uint16)
    log_base, log_test, p = (np.empty(n_vocab, dtype=np.float32) for _ in range(3))
    counts = np.empty(n_vocab, dtype=np.bool_)
    cut = clipped_rows(test.scale)
    for row in range(n):
        codes = base.codes[row]
        token[row] = codes.argmax()
        lead[row] = int(codes[token[row]]) - _second(codes, int(token[row]))
        base.row_log_probs(row, log_base)
        test.row_log_probs(row, log_test)
        np.exp(log_base, out=p)
        if base.min_log_prob[row] <= KLD_FLOOR:
            np.greater(log_base, KLD_FLOOR, out=counts)
            p *= counts
        # Float32, but pairwise over a contiguous row: an error of 1e-6 of the sum of magnitudes, 1e-7 nat in practice.
        mass[row] = p.sum()
        log_base -= log_test
        log_base *= p
        out["kld"][row] = log_base.sum()
        if cut[row]:
            np.equal(test.codes[row], 0, out=counts)
            p *= counts
            out["clipped_mass"][row] = p.sum()
    _fill_base_tops(base, token, lead, out)
    return mass


def _score_test_tops(test: Rows, mask: NDArray[np.bool_], out: NDArray[np.void]) -> None:
    """Fill in the setting's best token and whether another shares its code; `mask` is scratch."""
    n, width = test.raw.shape
    np.equal(test.raw, TOP_CODE, out=mask)
    _leave_out_heads(test, mask)
    at_top = np.flatnonzero(mask)
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

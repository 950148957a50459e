"""How narrow the KLD interval of a compact recording is, and what a row of it takes.

    python tests/benchmarks/kld_bounds.py                # a vocabulary of 151,936; a minute or so
    python tests/benchmarks/kld_bounds.py --vocab 2048

In: a vocabulary size.  Out: one line for each kind of distribution and each size of change: the mean divergence, how
far the lower and the upper bound are from it on average, and beside that what one gets for the same bytes from the
plain record: as many exact tokens as fit, the rest's mass and its sum of p log p.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the package beside this file, installed or not

from agreement.scoring import default_top_k, encode_rows, row_bytes, score_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from agreement.records import Float32Array, Float64Array

CHANGES = (0.1, 0.3, 0.5)  # standard deviation of what a setting adds to each logit


def gaussian(rng: np.random.Generator, shape: tuple[int, int]) -> Float64Array:
    """Return logits of standard deviation 2.5 with nothing likely among them: flatter than any trained model's."""
    return rng.normal(0, 2.5, shape)


def peaked(height: float, n_peaks: int) -> Callable[[np.random.Generator, tuple[int, int]], Float64Array]:
    """Return a maker of the same with some likely tokens on top."""

    def make(rng: np.random.Generator, shape: tuple[int, int]) -> Float64Array:
        logits = gaussian(rng, shape)
        for row in logits:
            row[rng.choice(shape[1], n_peaks, replace=False)] = rng.normal(height, 3, n_peaks)
        return logits

    return make


def zipf(exponent: float) -> Callable[[np.random.Generator, tuple[int, int]], Float64Array]:
    """Return a maker of Zipf's law with that exponent (1 over the temperature) and noise of standard deviation 1."""

    def make(rng: np.random.Generator, shape: tuple[int, int]) -> Float64Array:
        ranks = np.stack([rng.permutation(shape[1]) + 1 for _ in range(shape[0])])
        logits: Float64Array = -exponent * np.log(ranks) + rng.normal(0, 1, shape)
        return logits

    return make


KINDS = {
    "20 likely tokens, about 18": peaked(18, 20),
    "50 likely tokens, about 13": peaked(13, 50),
    "Zipf, exponent 2": zipf(2),
    "Zipf, exponent 1.5": zipf(1.5),
    "Zipf, exponent 1": zipf(1),
    "gaussian": gaussian,
}


def log_softmax(logits: Float32Array) -> Float64Array:
    """Return log-probabilities in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: Float64Array = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def plain_bounds(base: Float64Array, test: Float64Array, top_k: int) -> tuple[float, float]:
    """Return mean bounds from an exact top and the tail's mass and entropy alone."""
    lows, highs = [], []
    for a, b in zip(base, test, strict=True):
        order = np.argsort(-a, kind="stable")
        top, tail = order[:top_k], order[top_k:]
        p = np.exp(a)
        head = float((p[top] * (a[top] - b[top])).sum())
        mass, entropy = float(p[tail].sum()), float((p[tail] * a[tail]).sum())
        if not tail.size:
            mass, entropy, low, high = 0.0, 0.0, 0.0, 0.0
        else:
            low = max(mass * np.log(mass / np.exp(b[tail]).sum()), entropy - mass * b[tail].max())
            high = entropy - mass * b[tail].min()
        lows.append(max(0.0, head + low))
        highs.append(head + high)
    return float(np.mean(lows)), float(np.mean(highs))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Width of the KLD interval of compact recordings.")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    shape = (options.rows, options.vocab)
    top_k = default_top_k(options.vocab, full=False)
    n_bytes, reference = row_bytes(options.vocab, full=False, top_k=top_k), 8 + 2 * options.vocab
    plain_k = min(options.vocab, (n_bytes - 20) // 8)
    print(f"vocabulary {options.vocab:,}: {n_bytes:,} bytes a row, {n_bytes / reference:.2%} of llama-perplexity's")
    print(f"means over {options.rows} rows; 'plain' is an exact top {plain_k:,} with the tail's mass and entropy")
    print(f"{'distribution':28}{'change':>7}{'KLD':>10}{'low -':>10}{'high +':>10}{'plain -':>10}{'plain +':>10}")
    seconds = 0.0
    for name, make in KINDS.items():
        rng = np.random.default_rng(options.seed)
        base = make(rng, shape).astype(np.float32)
        a = log_softmax(base)
        for change in CHANGES:
            test = (base + rng.normal(0, change, shape)).astype(np.float32)
            b = log_softmax(test)
            exact = (np.exp(a) * (a - b)).sum(axis=1)
            start = time.thread_time()
            scores = score_rows(encode_rows(base, np.zeros(options.rows, np.int32), top_k=top_k, full=False), test)
            seconds += time.thread_time() - start
            assert (scores.kld_low <= exact).all()
            assert (exact <= scores.kld_high).all()
            low, high = plain_bounds(a, b, plain_k)
            mean = float(exact.mean())
            print(
                f"{name:28}{change:7.1f}{mean:10.5f}{mean - scores.kld_low.mean(dtype=np.float64):10.1e}"
                f"{scores.kld_high.mean(dtype=np.float64) - mean:10.1e}{mean - low:10.1e}{high - mean:10.1e}",
                flush=True,
            )
    print(f"{1e3 * seconds / (len(KINDS) * len(CHANGES) * options.rows):.2f} ms of processor time a row in all")


if __name__ == "__main__":
    main()

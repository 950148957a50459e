"""Before any pass: does this engine repeat itself, and how much does the batch shape alone change?

In: an engine and one chunk.  Out: `Preflight`, or an error that says what to try.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from agreement.engine import Engine, without_read_ahead
from agreement.errors import EngineError, UnstableEngineError
from agreement.records import Float32Array, Int32Array, ModelFile
from agreement.scoring.rows import row_blocks

# Measured on small models: 0 to 0.02 between shapes in float16 and 8-bit weights.  A logit that moves by more than
# one unit, or one position in twenty that changes its top token, is no rounding.
MAX_SHAPE_DIFFERENCE = 1.0
MAX_SHAPE_DISAGREEMENT = 0.05


@dataclass(frozen=True)
class Preflight:
    """How far an engine agrees with itself.

    Attributes:
        n_positions: Scored positions compared.
        repeat_max_difference: Largest logit difference of two runs in the same batch shape.
        repeat_disagreement: Share of positions whose top token differs between them.
        shape_max_difference: Largest logit difference between two batch shapes.
        shape_disagreement: Share of positions whose top token differs between them.
        other_shape: What the other shape was.
        tokens_per_second: Speed of the second run, for an estimate of time; volatile.
    """

    n_positions: int
    repeat_max_difference: float
    repeat_disagreement: float
    shape_max_difference: float
    shape_disagreement: float
    other_shape: str
    tokens_per_second: float


def collect(engine: Engine, tokens: Int32Array, first: int, last: int, *, piece: int | None = None) -> Float32Array:
    """Return a copy of the logits of the first sequence, (last - first, n_vocab) float32."""
    out = np.empty((last - first, engine.n_vocab), np.float32)
    for part in engine.decode(tokens, first, last, piece=piece):
        if part.sequence == 0:
            out[part.first - first : part.first - first + len(part.logits)] = part.logits
    return out


SHORT = 16  # tokens of the short preflight: they touch few experts, and the second and third run find them in memory


def short_preflight(engine: Engine, model: ModelFile, chunk: Int32Array, *, room: int) -> Preflight:
    """Run the check of `preflight` on the first tokens of a chunk, for a model that streams from disk.

    The whole chunk would read the file three times.  All positions of those tokens are compared.

    Raises:
        EngineError: See `preflight`.
    """
    head = chunk[:SHORT]
    with without_read_ahead(model.shards):
        return preflight(engine, head, 0, head.size, room=room)


def preflight(engine: Engine, chunk: Int32Array, first: int, last: int, *, room: int) -> Preflight:
    """Run one chunk twice in one batch shape and once in another.

    Args:
        engine: The baseline, loaded.
        chunk: (n_ctx,) int32.
        first: First scored position.
        last: One past the last.
        room: Sequences the engine's context holds: with two or more the other shape is the chunk beside a copy of
            itself, else the chunk fed in halves.

    Raises:
        EngineError: A logit is NaN or infinite.
        UnstableEngineError: The same shape did not repeat to the bit, or shapes differ beyond the limits above.
    """
    one = chunk[None, :]
    reference = collect(engine, one, first, last)
    finite = np.isfinite(reference.min(axis=1)) & np.isfinite(reference.max(axis=1))
    if not finite.all():
        raise EngineError(
            f"baseline, chunk 0, position {first + int(np.argmin(finite))}: logits are NaN or infinite; "
            "the model or the engine is broken"
        )
    started = time.monotonic()
    repeat_difference, repeat_disagreement = _compare(engine, one, first, reference)
    seconds = time.monotonic() - started
    if room > 1:
        other_shape = "the chunk beside a copy of itself"
        shape_difference, shape_disagreement = _compare(engine, np.repeat(one, 2, axis=0), first, reference)
    else:
        other_shape = "the chunk in halves"
        half = -(-chunk.size // 2)
        shape_difference, shape_disagreement = _compare(engine, one, first, reference, piece=half)
    result = Preflight(
        n_positions=last - first,
        repeat_max_difference=repeat_difference,
        repeat_disagreement=repeat_disagreement,
        shape_max_difference=shape_difference,
        shape_disagreement=shape_disagreement,
        other_shape=other_shape,
        tokens_per_second=chunk.size / max(seconds, 1e-9),
    )
    _judge(result)
    return result


def _judge(result: Preflight) -> None:
    if result.repeat_max_difference != 0:
        raise UnstableEngineError(
            f"the engine does not repeat itself: the same chunk run twice differs by up to "
            f"{result.repeat_max_difference:.3g} in a logit and in {result.repeat_disagreement:.1%} of the top tokens; "
            "try --no-repack, then -fa off, then fewer threads"
        )
    too_many = (
        result.shape_disagreement > MAX_SHAPE_DISAGREEMENT and result.shape_disagreement * result.n_positions > 1.5
    )
    if result.shape_max_difference > MAX_SHAPE_DIFFERENCE or too_many:
        raise UnstableEngineError(
            f"the batch shape alone changes logits by up to {result.shape_max_difference:.3g} and "
            f"{result.shape_disagreement:.1%} of the top tokens (limits {MAX_SHAPE_DIFFERENCE:g} and "
            f"{MAX_SHAPE_DISAGREEMENT:.0%}); try --no-repack, then -fa off"
        )


def _compare(
    engine: Engine, tokens: Int32Array, first: int, reference: Float32Array, *, piece: int | None = None
) -> tuple[float, float]:
    """Decode again and return the first sequence's largest logit difference and its share of other top tokens.

    Compared in the engine's own memory, some rows at a time: for a large vocabulary copies would cost as much as the
    decoding.
    """
    largest, n_other = 0.0, 0
    for part in engine.decode(tokens, first, first + len(reference), piece=piece):
        if part.sequence != 0:
            continue
        rows = reference[part.first - first : part.first - first + len(part.logits)]
        for start, stop in row_blocks(*rows.shape):
            ours, theirs = rows[start:stop], part.logits[start:stop]
            if np.array_equal(ours, theirs):
                continue
            difference = float(np.abs(ours - theirs).max())
            largest = max(largest, float("inf") if np.isnan(difference) else difference)
            n_other += int((ours.argmax(axis=1) != theirs.argmax(axis=1)).sum())
    return largest, n_other / len(reference)

"""The check before any pass: engines that repeat themselves, and those that do not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fakes import FakeEngine, fake_logits

from agreement.errors import EngineError, UnstableEngineError
from agreement.preflight import MAX_SHAPE_DIFFERENCE, Preflight, collect, preflight
from agreement.preflight import _judge as judge
from agreement.records import Int32Array

FIRST, LAST = 6, 11
STABLE = Preflight(256, 0.0, 0.0, 0.0, 0.0, "halves", 100.0)


def chunk(n: int = 12) -> Int32Array:
    return np.random.default_rng(0).integers(0, 16, n).astype(np.int32)


@pytest.mark.parametrize("rows_per_part", [None, 1, 2])
@pytest.mark.parametrize("piece", [None, 1, 5, 6, 12])
def test_collect_puts_parts_in_their_place(piece: int | None, rows_per_part: int | None) -> None:
    engine = FakeEngine(rows_per_part=rows_per_part)
    tokens = np.stack([chunk(), chunk()[::-1]])
    np.testing.assert_array_equal(collect(engine, tokens, FIRST, LAST, piece=piece), fake_logits(chunk(), 16)[6:11])


def test_an_engine_that_repeats_itself() -> None:
    engine = FakeEngine()
    result = preflight(engine, chunk(), FIRST, LAST, room=2)
    assert (result.n_positions, result.repeat_max_difference, result.repeat_disagreement) == (5, 0.0, 0.0)
    assert (result.shape_max_difference, result.shape_disagreement) == (0.0, 0.0)
    assert result.other_shape == "the chunk beside a copy of itself"
    assert result.tokens_per_second > 0
    assert engine.calls == [(1, None), (1, None), (2, None)]


def test_without_room_the_other_shape_is_the_chunk_in_halves() -> None:
    engine = FakeEngine()
    result = preflight(engine, chunk(11), FIRST, LAST - 1, room=1)
    assert result.other_shape == "the chunk in halves"
    assert engine.calls == [(1, None), (1, None), (1, 6)]  # 11 tokens: 6 and 5


def test_how_far_the_other_shape_is() -> None:
    # Token 0 gains 0.25 in the other shape; nothing else moves.
    result = preflight(FakeEngine(shape_shift=0.25), chunk(), FIRST, LAST, room=2)
    assert result.shape_max_difference == pytest.approx(0.25, abs=1e-6)
    assert result.repeat_max_difference == 0


def test_an_engine_that_does_not_repeat_itself() -> None:
    # The last logit moves by 1e-3 a call: far below anything that shows in a result, and still refused.
    with pytest.raises(UnstableEngineError, match=r"the same chunk run twice differs by up to 0\.001 .*--no-repack"):
        preflight(FakeEngine(unstable=True), chunk(), FIRST, LAST, room=2)


def test_an_engine_whose_shapes_differ() -> None:
    with pytest.raises(UnstableEngineError, match=r"the batch shape alone changes logits by up to 1\.5 .*limits 1 and"):
        preflight(FakeEngine(shape_shift=1.5), chunk(), FIRST, LAST, room=2)


@pytest.mark.parametrize(("nan_at", "position"), [(FIRST, 6), (8, 8), (LAST - 1, 10)])
def test_the_position_of_a_nan_is_named(nan_at: int, position: int) -> None:
    with pytest.raises(EngineError, match=f"baseline, chunk 0, position {position}: logits are NaN or infinite"):
        preflight(FakeEngine(nan_at=nan_at), chunk(), FIRST, LAST, room=2)


def test_a_nan_outside_the_scored_range_is_nobodys_business() -> None:
    assert preflight(FakeEngine(nan_at=FIRST - 1), chunk(), FIRST, LAST, room=2).repeat_max_difference == 0


class LateNan(FakeEngine):
    """Breaks in the third call only: the other shape."""

    def decode(self, tokens, first, last, *, piece=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        self.nan_at = FIRST if len(self.calls) == 2 else None
        return super().decode(tokens, first, last, piece=piece)


def test_a_nan_in_the_other_shape_counts_as_a_difference_without_end() -> None:
    with pytest.raises(UnstableEngineError, match="changes logits by up to inf"):
        preflight(LateNan(), chunk(), FIRST, LAST, room=2)


@pytest.mark.parametrize(
    ("changes", "stable"),
    [
        ({}, True),
        ({"repeat_max_difference": 1e-30}, False),
        ({"shape_max_difference": MAX_SHAPE_DIFFERENCE}, True),  # the limit itself is allowed
        ({"shape_max_difference": MAX_SHAPE_DIFFERENCE + 1e-6}, False),
        ({"shape_disagreement": 0.05}, True),
        ({"shape_disagreement": 13 / 256}, False),  # 5.08 %
        ({"n_positions": 10, "shape_disagreement": 0.1}, True),  # one position of ten may be a tie
        ({"n_positions": 10, "shape_disagreement": 0.2}, False),
    ],
)
def test_the_limits(changes: dict[str, float], stable: bool) -> None:
    result = replace(STABLE, **changes)  # type: ignore[arg-type]  # fields of two types
    if stable:
        judge(result)
        return
    with pytest.raises(UnstableEngineError):
        judge(result)

"""Scores against hand calculation, SciPy in float64, and what must hold for any logits."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.special import log_softmax
from scipy.stats import entropy

from agreement.errors import EngineError, IdentityError, StoreError
from agreement.records import Counts, Float32Array, Float64Array, PositionScores
from agreement.scoring import BaselineRows, count_chunk, default_top_k, encode_rows, position_scores, row_bytes, rows
from agreement.scoring import score_rows as score
from agreement.scoring.baseline import top_indices
from agreement.scoring.compact import n_listed
from agreement.scoring.idlist import pack_ids, packed_bytes, unpack_ids
from agreement.scoring.rows import BLOCK_ELEMENTS, row_blocks

LARGE = 151_936  # Qwen's vocabulary


def encode(logits: Float32Array, *, full: bool, top_k: int | None = None, targets: Any = 0, **kwargs: Any) -> Any:
    ids = np.broadcast_to(np.asarray(targets, np.int32), len(logits)).copy()
    k = top_k or default_top_k(logits.shape[1], full=full)
    return encode_rows(logits, ids, top_k=k, full=full, **kwargs)


def exact_kld(base: Float32Array, test: Float32Array) -> Float64Array:
    """Return (n,) divergences of float32 logits, worked out in float64 by SciPy's log-softmax."""
    a, b = log_softmax(base.astype(np.float64), axis=1), log_softmax(test.astype(np.float64), axis=1)
    kld: Float64Array = np.maximum((np.exp(a) * (a - b)).sum(axis=1), 0)  # below 0 is float64's own rounding
    return kld


def row(*values: float) -> Float32Array:
    return np.array([values], np.float32)


SIZES = st.sampled_from([1, 2, 3, 17, 300, 1500, 5000])


@st.composite
def logit_pairs(draw: st.DrawFn, *, extreme: bool = False) -> tuple[Float32Array, Float32Array]:
    """A baseline and a setting: gaussian, peaked, tied or constant, near each other or unrelated."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n, n_vocab = draw(st.integers(1, 3)), draw(SIZES)
    scale = draw(st.sampled_from([0.0, 0.1, 2.5, 8.0, *([60.0, 3000.0] if extreme else [])]))
    base = rng.normal(0, 1, (n, n_vocab)) * scale
    if draw(st.booleans()):
        base[:, rng.integers(0, n_vocab, 3)] += 15
    if draw(st.booleans()):
        base = np.round(base)  # ties
    noise = draw(st.sampled_from([0.0, 1e-3, 0.3, 3.0, *([100.0] if extreme else [])]))
    test = base + rng.normal(0, 1, base.shape) * noise
    if draw(st.integers(0, 3)) == 0:
        test = rng.permutation(test, axis=1)
    offset = draw(st.sampled_from([0.0, -20.0, 500.0]))
    return (base + offset).astype(np.float32), test.astype(np.float32)


# --- by hand ---


def test_two_tokens_by_hand() -> None:
    # log 3 and 0: probabilities 3/4 and 1/4.  The setting: 1/2 and 1/2.
    base = encode(row(math.log(3), 0), full=True, targets=1)
    assert base.top_ids.tolist() == [[0, 1]]
    assert base.target_logprob[0] == pytest.approx(math.log(1 / 4), abs=1e-6)
    assert base.logsumexp[0] == pytest.approx(math.log(4), abs=1e-6)
    test = score(base, row(5, 5))
    assert test.top[0] == 0  # of equal logits the lower id
    assert test.target_logprob[0] == pytest.approx(math.log(1 / 2), abs=1e-6)
    assert test.logsumexp[0] == pytest.approx(5 + math.log(2), abs=1e-6)
    # 3/4 log(3/4 / 1/2) + 1/4 log(1/4 / 1/2) = 3/4 log 1.5 - 1/4 log 2 = 0.304099 - 0.173287
    assert test.kld_low[0] == pytest.approx(0.130812, abs=1e-6)
    assert test.kld_high[0] == test.kld_low[0]


@pytest.mark.parametrize("full", [True, False])
def test_one_token_leaves_nothing_to_disagree_about(full: bool) -> None:
    base = encode(row(7), full=full)
    test = score(base, row(-3))
    assert (base.top_ids[0, 0], test.top[0]) == (0, 0)
    assert test.target_logprob[0] == 0
    assert test.kld_low[0] == 0
    assert test.kld_high[0] == pytest.approx(0, abs=1e-8)
    assert position_scores(base, test).base_margin[0] == math.inf


def test_scores_of_a_chunk_by_hand() -> None:
    scores = PositionScores(
        base_top=np.array([1, 2, 3, 4], np.int32),
        base_target_logprob=np.log(np.array([0.5, 0.25, 0.125, 1.0], np.float32)),
        base_margin=np.ones(4, np.float32),
        test_top=np.array([1, 5, 3, 7], np.int32),
        test_target_logprob=np.log(np.array([0.25, 0.25, 0.25, 0.5], np.float32)),
        kld_low=np.array([0.5, 0.25, 0.0, 1.0], np.float32),
        kld_high=np.array([0.75, 0.25, 0.0, 1.5], np.float32),
        target=np.array([1, 2, 9, 7], np.int32),
        ambiguous=np.array([False, True, False, True]),
    )
    got = count_chunk(scores)
    log2 = math.log(2)
    want = Counts(
        n=4,
        n_agree=2,  # positions 0 and 2
        nll_base=6 * log2,  # 1 + 2 + 3 + 0 bits
        nll_test=7 * log2,  # 2 + 2 + 2 + 1
        kld_low=1.75,
        kld_high=2.5,
        n_base_right=2,  # 0 and 1
        n_test_right=2,  # 0 and 3
        n_right_to_wrong=1,  # 1
        n_wrong_to_right=1,  # 3
        dp=-0.625,  # -0.25 + 0 + 0.125 - 0.5
        dp_squared=0.328125,  # 0.0625 + 0 + 0.015625 + 0.25
        n_ambiguous=2,
    )
    for name, value in vars(want).items():
        assert getattr(got, name) == pytest.approx(value, rel=1e-6), name
        assert isinstance(getattr(got, name), type(value)), name


def test_position_scores_lay_both_sides_together() -> None:
    base = encode(np.array([[0, 3, 1], [4, 0, 0]], np.float32), full=True, targets=[2, 0])
    test = score(base, np.array([[2, 0, 0], [4, 0, 0]], np.float32))
    scores = position_scores(base, test)
    assert scores.base_top.tolist() == [1, 0]
    assert scores.test_top.tolist() == [0, 0]
    assert scores.target.tolist() == [2, 0]
    np.testing.assert_allclose(scores.base_margin, [2, 4], rtol=1e-6)  # differences of logits: 3 - 1, 4 - 0
    assert not scores.ambiguous.any()
    assert count_chunk(scores).n_agree == 1


# --- against SciPy ---


@pytest.mark.parametrize("full", [True, False])
@settings(max_examples=50)
@given(pair=logit_pairs(), data=st.data())
def test_log_probabilities_are_scipys(full: bool, pair: tuple[Float32Array, Float32Array], data: st.DataObject) -> None:
    base_logits, test_logits = pair
    n, n_vocab = base_logits.shape
    targets = data.draw(hnp.arrays(np.int32, n, elements=st.integers(0, n_vocab - 1)))
    base = encode(base_logits, full=full, targets=targets)
    test = score(base, test_logits)
    for logits, got in ((base_logits, base.target_logprob), (test_logits, test.target_logprob)):
        want = np.take_along_axis(log_softmax(logits.astype(np.float64), axis=1), targets[:, None], axis=1)[:, 0]
        # logsumexp and the difference are each rounded to float32 at the size of the logits: 2^-24 of them.
        tolerance = 4 * 2.0**-24 * (10 + np.abs(logits).max())
        np.testing.assert_allclose(got, want, atol=tolerance)
    order = np.argsort(-base_logits, axis=1, kind="stable")[:, : base.top_ids.shape[1]]
    np.testing.assert_array_equal(base.top_ids, order)
    np.testing.assert_array_equal(test.top, test_logits.argmax(axis=1))


def full_tolerance(base: BaselineRows, base_logits: Float32Array, test_logits: Float32Array) -> Float64Array:
    """Return (n,) how far a full recording's KLD may be from the exact one; derived in docs/method.md.

    A code is off by at most half a step h, so p by a factor within exp(+-h), and each term p (log p - log q) by at
    most h p (1 + |log p - log q|) to first order.  Rounding in float32 adds 2^-24 of each number that goes in.
    """
    a = log_softmax(base_logits.astype(np.float64), axis=1)
    b = log_softmax(test_logits.astype(np.float64), axis=1)
    assert base.step is not None
    h = base.step.astype(np.float64) / 2
    quantised = 1.01 * h * (np.exp(a) * (1 + np.abs(a - b))).sum(axis=1)
    size = 20 + np.abs(base_logits).max(axis=1) + np.abs(test_logits).max(axis=1) + np.abs(a - b).max(axis=1)
    tolerance: Float64Array = quantised + 8 * 2.0**-24 * size
    return tolerance


@settings(max_examples=50)
@given(logit_pairs())
def test_full_divergence_is_the_exact_one_within_the_derived_error(pair: tuple[Float32Array, Float32Array]) -> None:
    base = encode(pair[0], full=True)
    test = score(base, pair[1])
    exact = exact_kld(*pair)
    assert (np.abs(test.kld_low - exact) <= full_tolerance(base, *pair)).all()
    np.testing.assert_array_equal(test.kld_low, test.kld_high)
    assert (test.kld_low >= 0).all()


def test_divergence_is_scipys_relative_entropy() -> None:
    rng = np.random.default_rng(1)
    base_logits = rng.normal(0, 2.5, (6, 1000)).astype(np.float32)
    test_logits = (base_logits + rng.normal(0, 0.5, base_logits.shape)).astype(np.float32)
    p = np.exp(log_softmax(base_logits.astype(np.float64), axis=1))
    q = np.exp(log_softmax(test_logits.astype(np.float64), axis=1))
    test = score(encode(base_logits, full=True), test_logits)
    np.testing.assert_allclose(test.kld_low, entropy(p, q, axis=1), rtol=1e-4)


@settings(max_examples=50)
@given(logit_pairs())
def test_divergence_of_equal_logits_is_what_codes_and_rounding_feign(pair: tuple[Float32Array, Float32Array]) -> None:
    base = encode(pair[0], full=True)
    assert (score(base, pair[0]).kld_low <= full_tolerance(base, pair[0], pair[0])).all()
    compact = score(encode(pair[0], full=False), pair[0])
    assert (compact.kld_low == 0).all()


@settings(max_examples=50)
@given(logit_pairs(extreme=True))
def test_codes_decode_within_half_a_step(pair: tuple[Float32Array, Float32Array]) -> None:
    base = encode(pair[0], full=True)
    decoded = base.low[:, None].astype(np.float64) + base.step[:, None].astype(np.float64) * base.codes
    true = log_softmax(pair[0].astype(np.float64), axis=1)
    rounding = 6 * 2.0**-24 * (20 + np.abs(pair[0]).max(axis=1) + np.abs(true).max(axis=1))
    assert (np.abs(decoded - true) <= (base.step / 2 + rounding)[:, None]).all()


def test_a_code_at_thirty_nats_is_as_documented() -> None:
    base = encode(row(30, 0, 15), full=True)
    assert base.step[0] == pytest.approx(30 / 65535)
    assert base.codes.tolist() == [[65535, 0, 32768]]  # 15 is 32767.5 steps up; halves go up


# --- bounds of compact recordings ---


def assert_bounds_hold(base_logits: Float32Array, test_logits: Float32Array, top_k: int | None = None) -> Float64Array:
    test = score(encode(base_logits, full=False, top_k=top_k), test_logits)
    exact = exact_kld(base_logits, test_logits)
    assert (test.kld_low <= exact).all(), (exact - test.kld_low).min()
    assert (test.kld_high >= exact).all(), (test.kld_high - exact).min()
    width: Float64Array = test.kld_high.astype(np.float64) - test.kld_low
    return width


@settings(max_examples=100)
@given(logit_pairs(extreme=True), st.sampled_from([None, 1, 2, 5]))
def test_bounds_hold_the_truth(pair: tuple[Float32Array, Float32Array], top_k: int | None) -> None:
    assert_bounds_hold(*pair, top_k)


@settings(max_examples=40)
@given(
    hnp.arrays(np.float32, 40, elements=st.floats(-1e4, 1e4, width=32)),
    hnp.arrays(np.float32, 40, elements=st.floats(-1e4, 1e4, width=32)),
)
@example(np.zeros(40, np.float32), np.linspace(0, 1e4, 40, dtype=np.float32))
def test_bounds_hold_for_values_drawn_to_hurt(base: Float32Array, test: Float32Array) -> None:
    # 40 values repeated over 4,000 tokens: 1,888 of them in the tail.
    assert_bounds_hold(np.tile(base, 100)[None], np.tile(test, 100)[None])
    assert_bounds_hold(np.tile(base, 100)[None], np.repeat(test, 100)[None])


@pytest.mark.parametrize("shift", [0.0, 0.3, 5.0])
def test_bounds_hold_where_the_tail_is_all_alike(shift: float) -> None:
    # Equal tail tokens: the entropy sum leaves one distribution only, so the interval must close up, too.
    base = np.zeros((1, 6000), np.float32)
    base[0, :2112] = np.linspace(3, 2, 2112)  # 64 exact ones and 2,048 listed
    test = base.copy()
    test[0, 2112:] += shift * np.sin(np.arange(6000 - 2112)).astype(np.float32)
    width = assert_bounds_hold(base, test)
    assert width[0] < 1e-3 + 0.05 * shift**2


def test_bounds_close_up_where_every_token_is_listed() -> None:
    rng = np.random.default_rng(5)
    base = (3 * rng.normal(size=(4, 2048))).astype(np.float32)
    test = (base + 0.3 * rng.normal(size=base.shape)).astype(np.float32)
    width = assert_bounds_hold(base, test)
    assert (width < 0.03 * exact_kld(base, test)).all()


def realistic(rng: np.random.Generator, n: int, *, floor: float = 2.5) -> Float32Array:
    """Return logits like a large model's: a broad mass of unlikely tokens and some twenty likely ones."""
    logits = rng.normal(0, floor, (n, LARGE))
    logits[:, rng.integers(0, LARGE, 20)] = rng.normal(18, 3, (n, 20))
    return logits.astype(np.float32)


def test_bounds_of_a_large_vocabulary_are_narrow() -> None:
    rng = np.random.default_rng(2)
    base = realistic(rng, 3)
    test = (base + rng.normal(0, 0.3, base.shape)).astype(np.float32)
    width = assert_bounds_hold(base, test)
    exact = exact_kld(base, test)
    assert (width < 2e-3).all()
    assert width.mean() < 0.1 * exact.mean()


@pytest.mark.parametrize("full", [True, False])
def test_a_recording_takes_the_bytes_announced(full: bool) -> None:
    base = encode(realistic(np.random.default_rng(3), 2), full=full)
    arrays = [v for f in fields(base) if isinstance(v := getattr(base, f.name), np.ndarray)]
    n_bytes = row_bytes(LARGE, full=full, top_k=base.top_ids.shape[1])
    assert sum(array.nbytes for array in arrays) == 2 * n_bytes
    if not full:
        assert n_bytes <= 0.0495 * (2 * LARGE + 8), "5 % of llama-perplexity's row, with room for heads of files"


@settings(max_examples=40)
@given(logit_pairs(extreme=True))
def test_what_decides_agreement_and_perplexity_is_equal_in_both_modes(pair: tuple[Float32Array, Float32Array]) -> None:
    bases = [encode(pair[0], full=full, top_k=4, targets=pair[0].shape[1] - 1) for full in (True, False)]
    tests = [score(base, pair[1]) for base in bases]
    for name in ("target", "target_logprob", "logsumexp", "top_ids", "top_logprobs"):
        assert getattr(bases[0], name).tobytes() == getattr(bases[1], name).tobytes(), name
    for name in ("top", "target_logprob", "logsumexp"):
        assert getattr(tests[0], name).tobytes() == getattr(tests[1], name).tobytes(), name


# --- lists of ids ---


@settings(max_examples=50)
@given(st.data())
def test_lists_of_ids_come_back(data: st.DataObject) -> None:
    n_vocab = data.draw(st.sampled_from([1, 2, 16, 1000, LARGE]))
    n = data.draw(st.integers(1, 3))
    k = data.draw(st.integers(0, min(n_vocab, 50)))
    one = st.lists(st.integers(0, n_vocab - 1), min_size=k, max_size=k, unique=True).map(sorted)
    ids = np.array(data.draw(st.lists(one, min_size=n, max_size=n)), np.int64).reshape(n, k)
    packed = pack_ids(ids, n_vocab)
    assert packed.shape == (n, packed_bytes(n_vocab, k))
    np.testing.assert_array_equal(unpack_ids(packed, n_vocab, k), ids)


@pytest.mark.parametrize("ids", [range(7996), range(LARGE - 7996, LARGE), range(0, 19 * 7996, 19)])
def test_long_lists_of_ids_at_the_ends(ids: range) -> None:
    rows = np.array([ids], np.int64)
    np.testing.assert_array_equal(unpack_ids(pack_ids(rows, LARGE), LARGE, 7996), rows)


def test_bytes_of_a_list_by_hand() -> None:
    # 151,936 / 7,996 = 19.0: 4 low bits of each id; high parts up to 151,935 >> 4 = 9,495.
    # 7,996 + 9,495 bits are 2,187 bytes; 4 x 7,996 bits are 3,998.
    assert packed_bytes(LARGE, 7996) == 2187 + 3998
    assert n_listed(LARGE, 64) == 7996
    assert n_listed(2048, 64) == 2048 - 64
    assert n_listed(40, 64) == 0


# --- order, ties, damage, threads ---


@settings(max_examples=50)
@given(
    st.sampled_from([(40, 8), (600, 32), (5000, 8), (8192, 32), (4096, 64)]),
    st.integers(0, 2**32),
    st.sampled_from([1, 3, 30, 10**6]),
)
def test_top_indices_are_those_of_a_stable_sort(size: tuple[int, int], seed: int, levels: int) -> None:
    n, k = size
    block = np.random.default_rng(seed).integers(-levels, levels, (2, n)).astype(np.float32)
    block[0, :3] = [0.0, -0.0, 0.0]  # equal, whatever their signs
    np.testing.assert_array_equal(top_indices(block, k), np.argsort(-block, axis=1, kind="stable")[:, :k])


def test_top_indices_of_a_large_vocabulary_and_of_no_rows() -> None:
    block = np.random.default_rng(0).normal(size=(2, LARGE)).astype(np.float32)
    block[1, ::1000] = 50  # 152 equal ones: the first 64 of them
    np.testing.assert_array_equal(top_indices(block, 64), np.argsort(-block, axis=1, kind="stable")[:, :64])
    assert top_indices(block[:0], 5).shape == (0, 5)
    assert top_indices(np.empty((0, 8), np.float32), 5).shape == (0, 5)


BAD = [
    (math.nan, 0, "NaN"),
    (math.nan, -1, "NaN"),
    (math.inf, 3, "infinite"),
    (-math.inf, 3, "infinite"),
    (-math.inf, -1, "infinite"),
]


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("n_vocab", [5, 300, 9000])
@pytest.mark.parametrize(("value", "where", "kind"), BAD)
def test_logits_that_are_no_numbers_are_named(value: float, where: int, kind: str, n_vocab: int, full: bool) -> None:
    good = np.random.default_rng(0).normal(size=(40, n_vocab)).astype(np.float32)
    bad = good.copy()
    bad[37, where] = value
    with pytest.raises(EngineError, match=f"logits are {kind} at row 37"):
        encode(bad, full=full)
    base = encode(good, full=full)
    with pytest.raises(EngineError, match=f"logits are {kind} at row 37"):
        score(base, bad)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("values", [(math.inf, -math.inf), (math.nan,) * 5, (math.inf,) * 5, (-math.inf,) * 5])
def test_rows_with_nothing_but_trouble(values: tuple[float, ...]) -> None:
    bad = np.zeros((2, 5), np.float32)
    bad[1, : len(values)] = values
    kind = "NaN" if math.isnan(values[0]) else "infinite"
    with pytest.raises(EngineError, match=f"logits are {kind} at row 1"):
        encode(bad, full=True)


def test_another_shape_is_refused() -> None:
    base = encode(np.zeros((2, 5), np.float32), full=True)
    with pytest.raises(IdentityError, match="the baseline has 2 positions of 5 tokens, these logits 2 of 6"):
        score(base, np.zeros((2, 6), np.float32))
    with pytest.raises(IdentityError, match="these logits 3 of 5"):
        score(base, np.zeros((3, 5), np.float32))


def test_a_recording_of_the_top_alone_cannot_be_scored_against() -> None:
    base = encode(np.zeros((2, 5), np.float32), full=True)
    with pytest.raises(StoreError, match="keeps nothing of the distribution"):
        score(replace(base, codes=None, low=None, step=None), np.zeros((2, 5), np.float32))


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("n_vocab", [2, 777, 30_000])
def test_threads_and_rows_together_change_no_bit(n_vocab: int, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "THREADED_ELEMENTS", 0)
    rng = np.random.default_rng(n_vocab)
    n = 2 * max(1, BLOCK_ELEMENTS // n_vocab) + 3 if n_vocab > 100 else 50
    base_logits = rng.normal(0, 3, (n, n_vocab)).astype(np.float32)
    test_logits = (base_logits + rng.normal(0, 0.3, base_logits.shape)).astype(np.float32)
    alone = encode(base_logits, full=full)
    alone_scores = score(alone, test_logits)
    with ThreadPoolExecutor(3) as pool:
        pooled = encode(base_logits, full=full, pool=pool)
        pooled_scores = score(alone, test_logits, pool=pool)
    first = encode(base_logits[:1].copy(), full=full)
    for f in fields(BaselineRows):
        if isinstance(value := getattr(alone, f.name), np.ndarray):
            assert value.tobytes() == getattr(pooled, f.name).tobytes(), f.name
            if f.name != "target":
                assert value[:1].tobytes() == getattr(first, f.name).tobytes(), f"{f.name}: depends on its neighbours"
    for name, value in vars(alone_scores).items():
        assert value.tobytes() == getattr(pooled_scores, name).tobytes(), name


def test_an_error_in_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "THREADED_ELEMENTS", 0)
    bad = np.zeros((4, BLOCK_ELEMENTS), np.float32)
    bad[3, 5] = math.nan
    with ThreadPoolExecutor(2) as pool, pytest.raises(EngineError, match="row 3"):
        encode(bad, full=True, pool=pool)


def test_blocks_of_rows_cover_all_and_hold_at_least_one() -> None:
    assert row_blocks(3, 10 * BLOCK_ELEMENTS) == [(0, 1), (1, 2), (2, 3)]
    assert row_blocks(5, BLOCK_ELEMENTS // 2) == [(0, 2), (2, 4), (4, 5)]
    assert row_blocks(0, 10) == []


def test_strided_logits_give_the_bits_of_their_copy() -> None:
    strided = np.asfortranarray(np.random.default_rng(0).normal(size=(3, 1500)).astype(np.float32))
    for full in (True, False):
        base, same = encode(strided, full=full), encode(np.ascontiguousarray(strided), full=full)
        assert base.logsumexp.tobytes() == same.logsumexp.tobytes()
        assert score(base, strided).kld_high.tobytes() == score(same, strided.copy(order="C")).kld_high.tobytes()


def test_inputs_are_only_read() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 5000)).astype(np.float32)
    logits.setflags(write=False)
    for full in (True, False):
        base = encode(logits, full=full)
        score(replace(base), logits)

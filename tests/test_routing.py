"""Routing policies: hand calculations, what the limits mean at their ends, and what must hold for any weights."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from agreement.errors import SettingError
from agreement.routing import Policy, drop_experts, kept_columns, parse_policy

# Two tokens, four experts each, best first.  Sums: 0.8 and 1.0.
WEIGHTS = np.array([[0.4, 0.2, 0.16, 0.04], [0.7, 0.1, 0.1, 0.1]], np.float32)


def kept(text: str, weights: NDArray[np.float32] = WEIGHTS, *, softmax_after: bool = False) -> list[str]:
    """Return the kept columns of each row as a string of 1 and 0."""
    mask = kept_columns(weights, parse_policy(text), softmax_after=softmax_after)
    assert mask.shape == weights.shape
    return ["".join(str(int(x)) for x in row) for row in mask]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("experts=1", ["1000", "1000"]),
        ("experts=3", ["1110", "1110"]),
        ("experts=9", ["1111", "1111"]),
        # Ratios to the best: 1, 0.5, 0.4, 0.1 and 1, 1/7, 1/7, 1/7.
        ("ser=1,0.45", ["1100", "1000"]),
        ("ser=1,0.125", ["1110", "1111"]),
        ("ser=2,0.45", ["1100", "1100"]),
        ("ser=3,0.9", ["1110", "1110"]),
        ("ser=2,1", ["1100", "1100"]),
        ("ser=2,0", ["1111", "1111"]),
        # Shares so far: 0.5, 0.75, 0.95, 1 and 0.7, 0.8, 0.9, 1.
        ("topp=0.01", ["1000", "1000"]),
        ("topp=0.6", ["1100", "1000"]),
        ("topp=0.76", ["1110", "1100"]),
        ("topp=0.96", ["1111", "1111"]),
        ("topp=1", ["1111", "1111"]),
    ],
)
def test_by_hand(text: str, rows: list[str]) -> None:
    assert kept(text) == rows


def test_scores_before_a_softmax() -> None:
    # Softmax of ln(0.4), ln(0.2), ... is 0.4/0.8, 0.2/0.8, ...: the shares and ratios of the table above.  A shift of
    # all scores changes nothing, however large.
    scores = np.log(WEIGHTS) + np.array([[300], [-300]], np.float32)
    for text in ("experts=3", "ser=1,0.45", "ser=1,0.125", "topp=0.6", "topp=0.76"):
        assert kept(text, scores, softmax_after=True) == kept(text)


def test_a_bias_may_put_a_lighter_expert_first() -> None:
    """Selection with a bias: the first expert's gate value is not the largest, and ratios are to the largest."""
    biased = np.array([[0.1, 0.4, 0.25]], np.float32)
    assert kept("ser=1,0.6", biased) == ["111"]  # 0.25 / 0.4 = 0.625; the first stays whatever it weighs
    assert kept("ser=1,0.7", biased) == ["110"]
    assert kept("ser=1,1", biased) == ["100"]
    assert kept("topp=0.6", biased) == ["110"]  # 0.1 / 0.75 = 0.13, 0.5 / 0.75 = 0.67


def test_equal_weights_at_the_largest_threshold() -> None:
    assert kept("ser=2,1", np.full((1, 4), 0.25, np.float32)) == ["1100"]


def test_weights_that_underflow_to_nothing() -> None:
    zeros = np.zeros((1, 3), np.float32)
    assert kept("topp=0.5", zeros) == ["100"]
    assert kept("topp=1", zeros) == ["111"]
    assert kept("ser=1,0", zeros) == ["111"]


def test_dropping_row_by_row() -> None:
    weights = np.repeat(WEIGHTS[:1], 4, axis=0)
    policies = (None, Policy("experts", 3), Policy("experts", 1))
    before = weights.copy()
    changed, n_kept = drop_experts(weights, policies, np.array([2, 0, 1, 2]))
    a, b, c, d = (float(x) for x in WEIGHTS[0])
    assert np.array_equal(changed, np.array([[a, 0, 0, 0], [a, b, c, d], [a, b, c, 0], [a, 0, 0, 0]], np.float32))
    assert n_kept.tolist() == [1, 4, 3, 1]
    assert changed.dtype == np.float32
    assert np.array_equal(weights, before)


def test_dropping_before_a_softmax() -> None:
    changed, n_kept = drop_experts(WEIGHTS, (Policy("experts", 2),), np.zeros(2, np.intp), softmax_after=True)
    assert np.array_equal(changed[:, :2], WEIGHTS[:, :2])
    assert np.isneginf(changed[:, 2:]).all()
    assert n_kept.tolist() == [2, 2]


@pytest.mark.parametrize("shape", [(0, 4), (3, 1), (0, 0)])
def test_no_rows_and_single_experts(shape: tuple[int, int]) -> None:
    weights = np.ones(shape, np.float32)
    policies = tuple(parse_policy(text) for text in ("experts=2", "ser=1,0.5", "topp=0.5"))
    for i in range(3):
        changed, n_kept = drop_experts(weights, policies, np.full(len(weights), i))
        assert np.array_equal(changed, weights)
        assert n_kept.tolist() == [shape[1]] * shape[0]


TEXTS = ["experts=1", "experts=12", "ser=4,0.2", "ser=1,0", "ser=3,1", "topp=0.8", "topp=1", "topp=0.0001"]


@pytest.mark.parametrize("text", TEXTS)
def test_canonical_names(text: str) -> None:
    assert str(parse_policy(text)) == text


def test_other_ways_to_write_a_policy() -> None:
    assert str(parse_policy(" ser=04,0.20 ")) == "ser=4,0.2"
    assert str(parse_policy("topp=.5")) == "topp=0.5"
    assert str(parse_policy("topp=1.0")) == "topp=1"


@pytest.mark.parametrize(
    "text",
    [
        "", "8", "experts", "experts=", "experts=-1", "experts=2.5", "experts=1_0", "experts=\u0663", "ser=4", "ser=4,",
        "ser=,0.2", "ser=4;0.2", "ser=4,0.2,1", "ser=4,nan", "ser=4,-0.2", "ser=4,1e-3", "topp", "topp=x", "topp=inf",
        "topp=.", "topk=4", "ser = 4,0.2",
    ],
)  # fmt: skip
def test_texts_that_are_no_policy(text: str) -> None:
    with pytest.raises(SettingError, match="expected experts=N, ser=K,T or topp=P"):
        parse_policy(text)


@pytest.mark.parametrize("text", ["topp=0.9+experts=7", "ser=4,0.2+topp=0.9", "topp=0.9+kv:a=int:1"])
def test_policies_are_not_joined(text: str) -> None:
    with pytest.raises(
        SettingError, match=r"a routing policy cannot be joined with '\+'; give each as a setting of its"
    ):
        parse_policy(text)


@pytest.mark.parametrize("text", ["experts=0", "ser=0,0.5"])
def test_keeping_no_expert(text: str) -> None:
    with pytest.raises(SettingError, match=f"{text}: at least one expert"):
        parse_policy(text)


@pytest.mark.parametrize("text", ["ser=2,1.5", "topp=1.01", "topp=0"])
def test_shares_out_of_range(text: str) -> None:
    with pytest.raises(SettingError, match=f"{text}: a share"):
        parse_policy(text)


shares = st.integers(1, 1000).map(lambda n: n / 1000)
policies = st.one_of(
    st.builds(Policy, st.just("experts"), st.integers(1, 10)),
    st.builds(Policy, st.just("ser"), st.integers(1, 10), shares),
    st.builds(Policy, st.just("topp"), st.just(1), shares),
)


@st.composite
def gate_weights(draw: st.DrawFn) -> NDArray[np.float32]:
    """Positive weights, each row from the largest to the smallest."""
    n, n_used = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    values = draw(st.lists(st.floats(2**-20, 1, width=32), min_size=n * n_used, max_size=n * n_used))
    return -np.sort(-np.array(values, np.float32).reshape(n, n_used), axis=1)


@given(policies)
def test_a_policy_reads_its_own_name(policy: Policy) -> None:
    assert parse_policy(str(policy)) == policy


@given(gate_weights(), policies)
def test_the_best_are_kept(weights: NDArray[np.float32], policy: Policy) -> None:
    """On weights without a bias, kept columns come first, none is changed, and the others are silent."""
    mask = kept_columns(weights, policy)
    assert mask[:, 0].all()
    assert (mask[:, :-1] >= mask[:, 1:]).all()
    assert (mask.sum(axis=1) >= min(policy.keep, weights.shape[1])).all()
    changed, n_kept = drop_experts(weights, (policy,), np.zeros(len(weights), np.intp))
    assert np.array_equal(changed, np.where(mask, weights, 0))
    assert np.array_equal(n_kept, mask.sum(axis=1))


@given(gate_weights(), st.integers(1, 10))
def test_the_ends_of_ser(weights: NDArray[np.float32], keep: int) -> None:
    only, all_of_them = Policy("ser", keep, 1.0), Policy("ser", keep, 0.0)
    assert np.array_equal(kept_columns(weights, only), kept_columns(weights, Policy("experts", keep)))
    assert kept_columns(weights, all_of_them).all()


@given(gate_weights(), shares)
def test_a_share_is_reached_and_not_before(weights: NDArray[np.float32], share: float) -> None:
    mask = kept_columns(weights, Policy("topp", 1, share))
    for row, keep in zip(weights.astype(np.float64), mask, strict=True):
        n = int(keep.sum())
        assert row[:n].sum() / row.sum() >= share - 1e-9
        if n > 1 and share < 1:
            assert row[: n - 1].sum() / row.sum() < share + 1e-9
    assert kept_columns(weights, Policy("topp", 1, 1.0)).all()

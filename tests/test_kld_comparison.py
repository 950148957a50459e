"""Two logits files against each other: by hand, against plain loops, and against what llama.cpp's tool printed."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from benchmarks import llama_perplexity
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agreement import kld
from agreement.errors import LogitsFileError
from agreement.kld import comparison, row_scores
from agreement.records import PositionScores

if TYPE_CHECKING:
    from agreement.records import Float32Array, Float64Array, Int32Array

GOLD = Path(__file__).parent / "gold" / "kld"


def write(path: Path, logits: Float32Array, *, nats: float = kld.LLAMA_CPP_NATS, targets: int = 0) -> kld.LogitsFile:
    """Write (n_chunk, n_rows, n_vocab) logits with n_ctx = 2 * n_rows + 2, so that first = n_rows + 1."""
    n_chunk, n_rows, n_vocab = logits.shape
    tokens = np.full((n_chunk, 2 * n_rows + 2), targets, dtype=np.int32)
    kld.write_logits_file(path, tokens, n_vocab, [kld.quantise(logits.reshape(-1, n_vocab), max_nats=nats)])
    return kld.open_logits_file(path)


def one_row(path: Path, *probabilities: float, nats: float = kld.LLAMA_CPP_NATS, target: int = 0) -> kld.LogitsFile:
    return write(path, np.log(np.array([[probabilities]])).astype(np.float32), nats=nats, targets=target)


def logits(*values: float) -> Float32Array:
    return np.array([[values]], dtype=np.float32)


# -------------------------------------------------------------------------------------------------------- by hand


def test_three_tokens_by_hand(tmp_path: Path) -> None:
    base = one_row(tmp_path / "b", 0.5, 0.25, 0.25, target=1)
    test = one_row(tmp_path / "t", 0.25, 0.5, 0.25, target=1)
    (chunk,) = kld.score_files(base, test)
    scores = chunk.scores
    # KLD = 0.5 ln(0.5 / 0.25) + 0.25 ln(0.25 / 0.5) + 0.25 ln 1 = 0.25 ln 2
    assert scores.kld_low[0] == pytest.approx(0.25 * np.log(2), abs=1e-6)
    assert scores.kld_high is scores.kld_low
    assert (scores.base_top[0], scores.test_top[0], scores.target[0]) == (0, 1, 1)
    assert scores.base_margin[0] == pytest.approx(np.log(2), abs=1e-6)
    assert scores.base_target_logprob[0] == pytest.approx(np.log(0.25), abs=1e-6)
    assert scores.test_target_logprob[0] == pytest.approx(np.log(0.5), abs=1e-6)
    assert not scores.ambiguous[0]
    assert not chunk.identical
    # 0.52 codes of ln 2 / 65535 each, and the room for float32
    assert chunk.kld_rounding[0] == pytest.approx(0.52 * np.log(2) / 65535 + 1e-5, rel=1e-4)
    assert chunk.clipped_mass[0] == 0
    dtypes = {f.name: getattr(scores, f.name).dtype for f in fields(PositionScores)}
    whole = {"base_top", "test_top", "target"}
    assert dtypes == {
        n: np.dtype(np.int32 if n in whole else np.bool_ if n == "ambiguous" else np.float32) for n in dtypes
    }


@pytest.mark.parametrize(
    ("base", "test", "ambiguous", "tops"),
    [
        ((0.4, 0.4, 0.2), (0.5, 0.3, 0.2), True, (0, 0)),  # a tie in the baseline: the first is taken, as the tool does
        ((0.5, 0.3, 0.2), (0.2, 0.4, 0.4), True, (0, 1)),  # a tie in the setting
        ((0.5, 0.3, 0.2), (0.3, 0.5, 0.2), False, (0, 1)),
        ((0.5, 0.25, 0.25), (0.5, 0.25, 0.25), False, (0, 0)),  # a tie of the second and the third is none
        # A gap of half a code's width or less may vanish: ln(0.4 / 0.4 (1 - 1e-7)) = 1e-7, codes are 1.06e-5 wide.
        ((0.4, 0.39999996, 0.2), (0.5, 0.3, 0.2), True, (0, 0)),
    ],
)
def test_ties(
    tmp_path: Path, base: tuple[float, ...], test: tuple[float, ...], ambiguous: bool, tops: tuple[int, int]
) -> None:
    (chunk,) = kld.score_files(one_row(tmp_path / "b", *base), one_row(tmp_path / "t", *test))
    assert bool(chunk.scores.ambiguous[0]) is ambiguous
    assert (chunk.scores.base_top[0], chunk.scores.test_top[0]) == tops
    assert (chunk.scores.base_margin[0] == 0) == (base[0] - base[1] < 1e-6)


def test_rows_without_spread(tmp_path: Path) -> None:
    flat, other = write(tmp_path / "b", logits(1, 1, 1, 1)), one_row(tmp_path / "t", 0.1, 0.2, 0.3, 0.4)
    (chunk,) = kld.score_files(flat, other)
    # -ln 4 - (ln 0.1 + ln 0.2 + ln 0.3 + ln 0.4) / 4
    assert chunk.scores.kld_low[0] == pytest.approx(-np.log(4) - np.log(0.1 * 0.2 * 0.3 * 0.4) / 4, abs=3e-5)
    assert (chunk.scores.base_top[0], chunk.scores.test_top[0], chunk.scores.ambiguous[0]) == (0, 3, True)
    (chunk,) = kld.score_files(other, flat)
    assert (chunk.scores.base_top[0], chunk.scores.test_top[0], chunk.scores.ambiguous[0]) == (3, 0, True)


def test_the_floor_of_16_nats(tmp_path: Path) -> None:
    # Log-probs 0, -15.9, -16.1 (and a ten-millionth): the last is left out though a 24 nat file holds it.
    base = write(tmp_path / "b", logits(0, -15.9, -16.1), nats=kld.IK_LLAMA_NATS)
    test = write(tmp_path / "t", logits(-10, -23, 0), nats=kld.IK_LLAMA_NATS)
    (chunk,) = kld.score_files(base, test)
    lp_base, lp_test = (kld.read_chunk(f, 0).log_probs(0, 1)[0].astype(np.float64) for f in (base, test))
    kept = np.exp(lp_base[:2]) @ (lp_base[:2] - lp_test[:2])
    everything = np.exp(lp_base) @ (lp_base - lp_test)
    assert chunk.scores.kld_low[0] == pytest.approx(kept, abs=1e-6)
    assert abs(everything - kept) > 1.5e-6  # e^-16.1 * 16.1 = 1.6e-6, so the line above tells them apart


def test_a_lead_of_more_than_the_floor(tmp_path: Path) -> None:
    base = write(tmp_path / "b", logits(-18, 0, -19, -20), nats=kld.IK_LLAMA_NATS)
    (chunk,) = kld.score_files(base, base)
    assert chunk.scores.base_margin[0] == pytest.approx(18, abs=2e-4)
    clipped = write(tmp_path / "c", logits(-18, 0, -19, -20))
    (chunk,) = kld.score_files(clipped, clipped)
    assert chunk.scores.base_margin[0] == pytest.approx(16, abs=2e-4)
    assert not chunk.scores.ambiguous[0]


def test_clipping_is_counted(tmp_path: Path) -> None:
    base = write(tmp_path / "b", logits(0, -1, -30), targets=2)
    test = write(tmp_path / "t", logits(0, -30, -1), targets=2)
    (chunk,) = kld.score_files(base, test)
    assert (chunk.n_base_targets_clipped, chunk.n_test_targets_clipped) == (1, 0)
    # Token 1 has p = e^-1 / (1 + e^-1) in the baseline and is clipped in the setting.
    assert chunk.clipped_mass[0] == pytest.approx(np.exp(-1) / (1 + np.exp(-1)), abs=1e-4)
    (chunk,) = kld.score_files(test, base)
    assert (chunk.n_base_targets_clipped, chunk.n_test_targets_clipped) == (0, 1)


def test_the_same_numbers_are_called_identical(tmp_path: Path) -> None:
    x = np.random.default_rng(1).standard_normal((3, 4, 7)).astype(np.float32)
    base = write(tmp_path / "b", x)
    x[2, 3] += np.linspace(0, 0.1, 7, dtype=np.float32)
    test = write(tmp_path / "t", x)
    assert [chunk.identical for chunk in kld.score_files(base, test)] == [True, True, False]
    assert all(chunk.identical for chunk in kld.score_files(base, base))


# ------------------------------------------------------------------------------------------- against plain loops


def reference(base: kld.LogitsFile, test: kld.LogitsFile) -> dict[str, Float64Array]:
    """Score row by row, in float64, the way the format's description says it."""
    result: dict[str, list[float]] = {
        name: [] for name in ("kld", "base_top", "test_top", "margin", "ambiguous", "clipped")
    }
    for one, other in zip(kld.iter_chunks(base), kld.iter_chunks(test), strict=True):
        for row in range(base.n_rows):
            lp_base = one.log_probs(row, row + 1)[0].astype(np.float64)
            lp_test = other.log_probs(row, row + 1)[0].astype(np.float64)
            total = sum(np.exp(b) * (b - t) for b, t in zip(lp_base, lp_test, strict=True) if b > -16)
            codes, test_codes = one.rows.codes[row], other.rows.codes[row]
            ranked = sorted(codes.tolist(), reverse=True)
            result["kld"].append(total)
            span = 65535 * float(other.rows.scale[row])
            limited = min(abs(span - 16), abs(span - 24)) < 1e-4
            lost = [
                np.exp(b) for b, c in zip(lp_base, other.rows.codes[row], strict=True) if limited and c == 0 and b > -16
            ]
            result["clipped"].append(sum(lost))
            result["base_top"].append(int(codes.argmax()))
            result["test_top"].append(int(test_codes.argmax()))
            result["margin"].append((ranked[0] - ranked[1]) * float(one.rows.scale[row]))
            tie = ranked[0] == ranked[1] or (test_codes == test_codes.max()).sum() > 1
            result["ambiguous"].append(tie)
    return {name: np.array(values, dtype=np.float64) for name, values in result.items()}


def joined(chunks: list[kld.ScoredChunk], name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.concatenate([getattr(chunk.scores, name) for chunk in chunks]).astype(np.float64)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(2, 60)),
    spread=st.sampled_from([0.0, 1e-4, 0.5, 3.0, 10.0, 40.0]),
    change=st.sampled_from([0.0, 1e-3, 1.0]),
    nats=st.tuples(*[st.sampled_from([kld.LLAMA_CPP_NATS, kld.IK_LLAMA_NATS])] * 2),
    block=st.sampled_from([1, 300, comparison.BLOCK_BYTES]),
    whole_rows=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_plain_loops_agree(
    tmp_path: Path,
    *,
    shape: tuple[int, int, int],
    spread: float,
    change: float,
    nats: tuple[float, float],
    block: int,
    whole_rows: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(shape) * spread).astype(np.float32)
    y = (x + rng.standard_normal(shape) * spread * change).astype(np.float32)
    base, test = write(tmp_path / "b", x, nats=nats[0]), write(tmp_path / "t", y, nats=nats[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "BLOCK_BYTES", block)  # so that blocks end inside chunks, and the reverse
        if whole_rows:  # the way for flat distributions over large vocabularies
            patch.setattr(row_scores, "_LONG_ROW", 0)
            patch.setattr(row_scores, "_MANY", -1)
        chunks = list(kld.score_files(base, test, n_threads=3))
    assert [chunk.index for chunk in chunks] == list(range(shape[0]))
    expected = reference(base, test)
    np.testing.assert_allclose(joined(chunks, "kld_low"), expected["kld"], rtol=1e-5, atol=5e-6)
    clipped = np.concatenate([chunk.clipped_mass for chunk in chunks])
    np.testing.assert_allclose(clipped, expected["clipped"], rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(joined(chunks, "base_margin"), expected["margin"], rtol=1e-6)
    for name in ("base_top", "test_top", "ambiguous"):
        np.testing.assert_array_equal(joined(chunks, name), expected[name])


# ------------------------------------------------------------------------------------- against llama.cpp's own tool


def test_the_tools_own_figures() -> None:
    """What `tests/gold/kld/record.py` recorded: the tool's statistics of experts=6 against base.kld.

    The tool compares exact logits of the setting with the file; here both come from files. So figures of the baseline
    alone agree to all printed digits, the others within `kld_rounding`, 1.1e-4 nat here (see docs/kld-format.md).
    """
    printed = llama_perplexity.parse_kld((GOLD / "experts-6.txt").read_text(encoding="utf-8"))
    base, test = kld.open_logits_file(GOLD / "base.kld"), kld.open_logits_file(GOLD / "experts-6.kld")
    chunks = list(kld.score_files(base, test))
    n = 4 * 31
    nll_base, nll_test = -joined(chunks, "base_target_logprob"), -joined(chunks, "test_target_logprob")
    divergence = joined(chunks, "kld_low")
    rounding = np.concatenate([chunk.kld_rounding for chunk in chunks]).astype(np.float64)
    clipped = np.concatenate([chunk.clipped_mass for chunk in chunks])
    assert 5e-5 < rounding.mean() < 1.4e-4
    assert clipped.max() < 1e-6  # so clipping hides less than a millionth times a few nats
    assert sum(chunk.n_base_targets_clipped + chunk.n_test_targets_clipped for chunk in chunks) == 0
    assert joined(chunks, "ambiguous").sum() == 0
    figures = printed.statistics

    def close(label: str, value: float, bound: float, digits: int = 6) -> None:
        assert abs(figures[label].value - value) <= bound + 0.5001 * 10.0**-digits, label

    close("Mean PPL(base)", np.exp(nll_base.mean()), 0)
    same = joined(chunks, "base_top") == joined(chunks, "test_top")
    close("Same top p", 100 * same.mean(), 0, digits=3)
    assert figures["Same top p"].error == pytest.approx(
        100 * np.sqrt(same.mean() * (1 - same.mean()) / (n - 1)), abs=6e-4
    )

    mean_rounding = rounding.mean()
    close("Mean ln(PPL(Q)/PPL(base))", (nll_test - nll_base).mean(), mean_rounding)
    close("Mean PPL(Q)", np.exp(nll_test.mean()), np.exp(nll_test.mean()) * np.expm1(mean_rounding))
    close("Mean KLD", divergence.mean(), mean_rounding + 1e-6)
    # Its standard error: sqrt((mean of squares - square of mean) / (n - 1)); |d sd| <= the largest change of a value.
    assert figures["Mean KLD"].error == pytest.approx(
        np.sqrt(divergence.var() / (n - 1)), abs=rounding.max() / np.sqrt(n)
    )
    quantiles = {
        "Maximum KLD": 1,
        "99.0% KLD": 0.99,
        "90.0% KLD": 0.9,
        "Median KLD": 0.5,
        "5.0% KLD": 0.05,
        "Minimum KLD": 0,
    }
    for label, fraction in quantiles.items():
        close(label, float(np.quantile(divergence, fraction)), rounding.max() + 2e-6)
    # A log-prob off by d moves a probability p by at most p (e^d - 1); printed in percent.
    moved = np.exp(-nll_test) - np.exp(-nll_base)
    bound = 100 * np.exp(-nll_test) * np.expm1(rounding)
    close("Mean Δp", 100 * moved.mean(), bound.mean(), digits=3)
    close("RMS Δp", 100 * np.sqrt((moved**2).mean()), bound.max(), digits=3)

    for line, end in zip(printed.lines, range(31, n + 1, 31), strict=True):  # the running table, over the chunks so far
        assert line.kld.value == pytest.approx(divergence[:end].mean(), abs=mean_rounding * 1.2 + 6e-6)
        assert line.ln_ratio.value == pytest.approx((nll_test - nll_base)[:end].mean(), abs=mean_rounding * 1.2 + 6e-6)
        assert line.same_top_percent.value == pytest.approx(100 * same[:end].mean(), abs=6e-4)


# ------------------------------------------------------------------------------------------------------- refusals


def zeros(n_chunk: int = 2, n_rows: int = 2, n_vocab: int = 4) -> Float32Array:
    return np.zeros((n_chunk, n_rows, n_vocab), dtype=np.float32)


@pytest.mark.parametrize(
    ("other", "target", "message"),
    [
        (zeros(n_rows=3), 0, "differ in n_ctx: 6 and 8; run both on the same text"),
        (zeros(n_vocab=5), 0, "differ in n_vocab: 4 and 5"),
        (zeros(n_chunk=3), 0, "differ in n_chunk: 2 and 3"),
        (zeros(), 1, "differ in tokens: 0 and 1 at position 0 of chunk 0"),
    ],
)
def test_files_that_do_not_belong_together(tmp_path: Path, other: Float32Array, target: int, message: str) -> None:
    base, test = write(tmp_path / "b", zeros()), write(tmp_path / "t", other, targets=target)
    with pytest.raises(LogitsFileError, match=message):
        kld.score_files(base, test)  # before the first chunk is asked for


def test_a_file_cut_short_is_scored_as_far_as_it_goes(tmp_path: Path) -> None:
    x = np.random.default_rng(2).standard_normal((3, 2, 4)).astype(np.float32)
    base = write(tmp_path / "b", x)
    (tmp_path / "t").write_bytes((tmp_path / "b").read_bytes()[:-1])
    test = kld.open_logits_file(tmp_path / "t", allow_truncated=True)
    assert [c.index for c in kld.score_files(base, test)] == [0, 1]
    assert [c.index for c in kld.score_files(test, base)] == [0, 1]


@pytest.mark.parametrize("side", ["b", "t"])
def test_damaged_codes_are_found_in_the_baseline(tmp_path: Path, side: str) -> None:
    x = np.random.default_rng(3).standard_normal((3, 2, 4)).astype(np.float32)
    files = {name: write(tmp_path / name, x) for name in ("b", "t")}
    path = tmp_path / side
    data = bytearray(path.read_bytes())
    start = len(data) - 16 + 8  # the four codes of the last row
    data[start:] = b"\xff\xff" * 4
    path.write_bytes(data)
    if side == "b":
        with pytest.raises(
            LogitsFileError, match=r"chunk 2, row 1: its probabilities sum to .*, not 1; the file is damaged"
        ):
            list(kld.score_files(files["b"], files["t"]))
    else:  # only its head is checked: four equal codes cannot be told from a tie
        assert bool(list(kld.score_files(files["b"], files["t"]))[-1].scores.ambiguous[-1])


def test_leaving_early_ends_the_threads(tmp_path: Path) -> None:
    x = np.random.default_rng(4).standard_normal((40, 2, 4)).astype(np.float32)
    base = write(tmp_path / "b", x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "BLOCK_BYTES", 1)
        run = kld.score_files(base, base)
        assert next(run).index == 0
        run.close()
    (tmp_path / "b").unlink()  # no file is held open (this would fail on Windows), and no ResourceWarning follows


def test_targets_follow_the_rows(tmp_path: Path) -> None:
    tokens: Int32Array = np.array([[0, 1, 2, 3, 4, 0, 1, 2]], dtype=np.int32)  # first = 4, rows for 4, 5, 6
    probabilities = np.arange(1, 16, dtype=np.float64).reshape(3, 5)
    rows = kld.quantise(np.log(probabilities).astype(np.float32))
    kld.write_logits_file(tmp_path / "b", tokens, 5, [rows])
    file = kld.open_logits_file(tmp_path / "b")
    (chunk,) = kld.score_files(file, file)
    assert chunk.scores.target.tolist() == [0, 1, 2]
    # rows 1..5, 6..10, 11..15 (sums 15, 40, 65), targets 0, 1, 2: 1/15, 7/40, 13/65
    np.testing.assert_allclose(np.exp(chunk.scores.base_target_logprob), [1 / 15, 7 / 40, 13 / 65], rtol=2e-5)

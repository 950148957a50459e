"""The logits file itself: round-trips, what it says, and every lie it can tell."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from agreement import kld
from agreement.errors import LogitsFileError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agreement.records import Float32Array, Int32Array

GOLD = Path(__file__).parent / "gold" / "kld"

# Two chunks of 6 tokens over 5 words: first = 3, rows = 6 - 1 - 3 = 2 a chunk, padded to 6 codes each.
TOKENS = np.array([[0, 1, 2, 3, 4, 0], [4, 3, 2, 1, 0, 4]], dtype=np.int32)
HEADER_BYTES = 8 + 3 * 4 + 2 * 6 * 4  # magic, three numbers, tokens: 68
ROW_BYTES = 2 * 4 + 6 * 2  # scale and minimum, 5 codes and one unused: 20


def logits(n_rows: int, n_vocab: int, spread: float = 2.0, seed: int = 1) -> Float32Array:
    return (np.random.default_rng(seed).standard_normal((n_rows, n_vocab)) * spread).astype(np.float32)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.kld"
    kld.write_logits_file(path, TOKENS, 5, [kld.quantise(logits(4, 5))])
    return path


def patched(path: Path, offset: int, new: bytes) -> Path:
    data = bytearray(path.read_bytes())
    data[offset : offset + len(new)] = new
    path.write_bytes(data)
    return path


# ------------------------------------------------------------------------------------------------------ quantising


def test_codes_by_hand() -> None:
    # exp: 1 + 1/2 + 1/4 = 7/4. lo = -2 ln 2, so codes are 65535, half of it (32767.5, to the even 32768), 0.
    rows = kld.quantise(np.log(np.array([[1, 0.5, 0.25]], dtype=np.float32)))
    assert rows.codes.tolist() == [[65535, 32768, 0]]
    assert rows.scale[0] == pytest.approx(2 * np.log(2) / 65535, rel=1e-6)
    assert rows.min_log_prob[0] == pytest.approx(np.log(0.25 / 1.75), rel=1e-6)


def test_clip_by_hand() -> None:
    # 16 nats: -40 is clipped to -16 and gets code 0; -8 is in the middle: 32767.5, to the even 32768.
    x = np.array([[0, -8, -40, -np.inf]], dtype=np.float32)
    assert kld.quantise(x).codes.tolist() == [[65535, 32768, 0, 0]]
    # 24 nats: -8 is two thirds up: 43690 exactly.
    assert kld.quantise(x, max_nats=kld.IK_LLAMA_NATS).codes.tolist() == [[65535, 43690, 0, 0]]


def test_equal_logits_have_no_spread() -> None:
    rows = kld.quantise(np.full((1, 4), 3.5, dtype=np.float32))
    assert rows.scale.tolist() == [0]
    assert rows.codes.tolist() == [[0, 0, 0, 0]]
    assert kld.dequantise(rows)[0] == pytest.approx(np.full(4, -np.log(4)), rel=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_none_are_not_stored(bad: float) -> None:
    x = logits(3, 5)
    x[1, 2] = bad
    with pytest.raises(LogitsFileError, match="row 1: the largest logit is"):
        kld.quantise(x)
    with pytest.raises(LogitsFileError, match="row 0: the largest logit is -inf"):
        kld.quantise(np.full((1, 3), -np.inf, dtype=np.float32))
    with pytest.raises(LogitsFileError, match=r"shape \(3,\)"):
        kld.quantise(np.zeros(3, dtype=np.float32))


@settings(deadline=None)
@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(2, 40)), elements=st.floats(-60, 60, width=32)),
    st.sampled_from([kld.LLAMA_CPP_NATS, kld.IK_LLAMA_NATS]),
)
def test_quantising_moves_a_log_prob_by_half_a_code(x: Float32Array, nats: float) -> None:
    rows = kld.quantise(x, max_nats=nats)
    wide = x.astype(np.float64)
    top = wide.max(axis=1, keepdims=True)
    exact = wide - top - np.log(np.exp(wide - top).sum(axis=1, keepdims=True))
    exact = np.maximum(exact, exact.max(axis=1, keepdims=True) - nats)
    # 0.52 codes: half by rounding, 0.02 by `1 / scale` in float32; 2e-5 for float32 sums of numbers up to 60.
    assert (np.abs(kld.dequantise(rows) - exact) <= 0.52 * rows.scale[:, None] + 2e-5).all()
    # Unequal codes never swap two tokens.
    for codes, row in zip(rows.codes, x, strict=True):
        order = np.argsort(row, kind="stable")
        assert (np.diff(codes[order].astype(int)) >= 0).all()


# ------------------------------------------------------------------------------------------------------ round-trips


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), n_ctx=st.integers(3, 12), n_chunk=st.integers(1, 4), n_vocab=st.integers(2, 20))
def test_what_is_written_is_read(tmp_path: Path, data: st.DataObject, n_ctx: int, n_chunk: int, n_vocab: int) -> None:
    tokens = data.draw(hnp.arrays(np.int32, (n_chunk, n_ctx), elements=st.integers(0, n_vocab - 1)))
    first = n_ctx // 2
    n_rows = n_ctx - 1 - first
    n = n_rows * n_chunk
    rows = kld.quantise(logits(n, n_vocab, data.draw(st.sampled_from([0.0, 0.1, 3.0, 30.0])), seed=n))
    cut = data.draw(st.integers(0, n))
    blocks = [
        kld.QuantisedRows(rows.codes[a:b], rows.scale[a:b], rows.min_log_prob[a:b]) for a, b in ((0, cut), (cut, n))
    ]
    path = tmp_path / "any.kld"
    size = kld.write_logits_file(path, tokens, n_vocab, blocks)
    assert size == path.stat().st_size
    file = kld.open_logits_file(path)
    assert (file.n_ctx, file.n_vocab, file.n_chunk, file.n_chunk_claimed) == (n_ctx, n_vocab, n_chunk, n_chunk)
    assert (file.first, file.n_rows, file.bytes_total, file.truncated) == (first, n_rows, size, False)
    np.testing.assert_array_equal(file.tokens, tokens)
    chunks = list(kld.iter_chunks(file))
    np.testing.assert_array_equal(np.concatenate([c.rows.codes for c in chunks]), rows.codes)
    np.testing.assert_array_equal(np.concatenate([c.rows.scale for c in chunks]), rows.scale)
    np.testing.assert_array_equal(np.concatenate([c.rows.min_log_prob for c in chunks]), rows.min_log_prob)
    for chunk in chunks:
        # Row r holds the logits at position first + r, its target is the token after it.
        np.testing.assert_array_equal(chunk.targets, tokens[chunk.index, first + 1 :])
        np.testing.assert_array_equal(chunk.log_probs(0, n_rows), kld.dequantise(chunk.rows))


@pytest.mark.parametrize("name", ["base.kld", "experts-6.kld"])
def test_a_file_of_the_tool_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    file = kld.open_logits_file(GOLD / name)
    assert (file.n_ctx, file.n_vocab, file.n_chunk, file.n_rows) == (64, 301, 4, 31)
    copy = tmp_path / "copy.kld"
    kld.write_logits_file(copy, file.tokens, file.n_vocab, (chunk.rows for chunk in kld.iter_chunks(file)))
    assert copy.read_bytes() == (GOLD / name).read_bytes()


def test_offsets_by_hand(small: Path) -> None:
    file = kld.open_logits_file(small)
    assert file.body_offset == HEADER_BYTES
    assert file.row_bytes == ROW_BYTES
    assert small.stat().st_size == HEADER_BYTES + 4 * ROW_BYTES
    data = small.read_bytes()
    assert struct.unpack("<8siii", data[:20]) == (b"_logits_", 6, 5, 2)
    scale, low, *codes = struct.unpack("<ff6H", data[HEADER_BYTES + ROW_BYTES : HEADER_BYTES + 2 * ROW_BYTES])
    rows = kld.read_chunk(file, 0).rows
    assert (rows.scale[1], rows.min_log_prob[1], rows.codes[1].tolist()) == (scale, low, codes[:5])
    assert codes[5] == 0


# -------------------------------------------------------------------------------------------------- who wrote it


def with_span(path: Path, spread: float, nats: float) -> kld.LogitsFile:
    x = np.zeros((4, 5), dtype=np.float32)
    x[:, 1] = -spread
    kld.write_logits_file(path, TOKENS, 5, [kld.quantise(x, max_nats=nats)])
    return kld.open_logits_file(path)


@pytest.mark.parametrize(
    ("spread", "nats", "writer"),
    [
        (9, kld.LLAMA_CPP_NATS, "unknown"),
        (15.9, kld.IK_LLAMA_NATS, "unknown"),
        (30, kld.LLAMA_CPP_NATS, "llama.cpp"),
        (16.1, kld.IK_LLAMA_NATS, "ik_llama.cpp"),
        (30, kld.IK_LLAMA_NATS, "ik_llama.cpp"),
        (30, 28, "unknown"),
    ],
)
def test_writer(tmp_path: Path, spread: float, nats: float, writer: str) -> None:
    assert with_span(tmp_path / "a.kld", spread, nats).writer == writer


def test_facts(tmp_path: Path) -> None:
    file = with_span(tmp_path / "a.kld", 30, kld.LLAMA_CPP_NATS)
    assert kld.facts(file) == {
        "file": str(file.path),
        "size": "148 bytes",  # 68 + 4 * 20
        "writer": "llama.cpp",
        "chunks": "2",
        "n_ctx": "6",
        "n_vocab": "5",
        "scored positions": "4 (2 a chunk, from position 3)",
        "rows looked at": "4 of 4",
        "clipped rows": "4 of 4",
        "widest row": "16.000 nats",
        "coarsest code": "0.000244 nats",  # 16 / 65535
    }


def test_a_long_file_is_sampled_and_every_row_is_seen_if_asked(tmp_path: Path) -> None:
    n_chunk, n_rows = 20, 31  # 620 rows
    x = logits(n_chunk * n_rows, 5)
    x[1] = [0, -1, -2, -3, -100]  # clipped; a sample of 256 in 620 takes rows 0, 2, 4, ...
    path = tmp_path / "long.kld"
    tokens = np.zeros((n_chunk, 64), dtype=np.int32)
    kld.write_logits_file(path, tokens, 5, [kld.quantise(x)])
    sampled, whole = kld.open_logits_file(path), kld.open_logits_file(path, every_row=True)
    assert (sampled.n_rows_seen, sampled.n_rows_clipped, sampled.writer) == (256, 0, "unknown")
    assert (whole.n_rows_seen, whole.n_rows_clipped, whole.writer) == (620, 1, "llama.cpp")
    patched(path, sampled.body_offset + sampled.row_bytes, struct.pack("<f", np.nan))
    assert kld.open_logits_file(path).writer == "unknown"
    message = "chunk 0, row 1: scale nan"  # whoever reads the row sees it
    with pytest.raises(LogitsFileError, match=message):
        kld.open_logits_file(path, every_row=True)
    with pytest.raises(LogitsFileError, match=message):
        kld.read_chunk(sampled, 0)
    with pytest.raises(LogitsFileError, match=message):
        list(kld.score_files(sampled, sampled))


# ---------------------------------------------------------------------------------------------------------- lies


@pytest.mark.parametrize(
    ("offset", "new", "message"),
    [
        (0, b"GGUF", "not a llama-perplexity logits file"),
        (8, struct.pack("<i", 2), "n_ctx 2 in the header leaves no scored position"),
        (8, struct.pack("<i", 0), "n_ctx 0 in the header"),
        (8, struct.pack("<i", -6), "n_ctx -6 in the header"),
        (8, struct.pack("<i", 2**31 - 1), "the header claims 2 chunks of 2147483647 tokens"),
        (12, struct.pack("<i", 0), "n_vocab 0 in the header"),
        (12, struct.pack("<i", -5), "n_vocab -5 in the header"),
        (12, struct.pack("<i", 2**31 - 1), "cut short: 0 of 2 chunks are whole"),
        (12, struct.pack("<i", 4), " 16 bytes after the last of 2 chunks"),  # rows of 16 bytes, not 20: 4 * 4 too many
        (12, struct.pack("<i", 7), "cut short: 1 of 2 chunks are whole"),
        (16, struct.pack("<i", 0), "n_chunk 0 in the header"),
        (16, struct.pack("<i", -2), "n_chunk -2 in the header"),
        (16, struct.pack("<i", 2**31 - 1), "the header claims 2147483647 chunks of 6 tokens"),
        (16, struct.pack("<i", 1), "bytes after the last of 1 chunks"),
        (16, struct.pack("<i", 3), "cut short: 1 of 3 chunks are whole"),
        (20 + 7 * 4, struct.pack("<i", 5), "token 5 at position 1 of chunk 1 is not in 0..4"),
        (20, struct.pack("<i", -1), "token -1 at position 0 of chunk 0"),
        (HEADER_BYTES, struct.pack("<f", np.nan), "chunk 0, row 0: scale nan.*not a number"),
        (HEADER_BYTES, struct.pack("<f", np.inf), "chunk 0, row 0: scale inf"),
        (HEADER_BYTES + 3 * ROW_BYTES, struct.pack("<f", -1e-4), "chunk 1, row 1: scale -.*a negative scale"),
        (HEADER_BYTES + 2 * ROW_BYTES + 4, struct.pack("<f", np.nan), "chunk 1, row 0: .*min_log_prob nan"),
        (
            HEADER_BYTES + 2 * ROW_BYTES + 4,
            struct.pack("<f", 1.0),
            "the best token's log-prob would be .* with 5 tokens",
        ),
        (HEADER_BYTES, b"\0" * ROW_BYTES, "chunk 0, row 0: scale 0.0, min_log_prob 0.0: the best token's log-prob"),
    ],
)
def test_lies(small: Path, offset: int, new: bytes, message: str) -> None:
    patched(small, offset, new)
    with pytest.raises(LogitsFileError, match=message) as error:
        kld.open_logits_file(small)
    assert str(small) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("n_bytes", [0, 5, 8, 19, 20, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 2 * ROW_BYTES - 1])
def test_a_file_without_one_whole_chunk(small: Path, n_bytes: int) -> None:
    small.write_bytes(small.read_bytes()[:n_bytes])
    for allow in (False, True):
        with pytest.raises(LogitsFileError):
            kld.open_logits_file(small, allow_truncated=allow)


def test_a_file_cut_short_gives_its_whole_chunks_if_asked(small: Path) -> None:
    whole = kld.read_chunk(kld.open_logits_file(small), 0).rows.codes.copy()
    small.write_bytes(small.read_bytes()[: HEADER_BYTES + 3 * ROW_BYTES])
    message = "cut short: 1 of 2 chunks are whole, then 20 of 40 bytes; its whole chunks can be used"
    with pytest.raises(LogitsFileError, match=message):
        kld.open_logits_file(small)
    file = kld.open_logits_file(small, allow_truncated=True)
    assert (file.n_chunk, file.n_chunk_claimed, file.truncated) == (1, 2, True)
    assert file.tokens.shape == (1, 6)
    assert kld.facts(file)["chunks"] == "1 of 2 (cut short)"
    np.testing.assert_array_equal(kld.read_chunk(file, 0).rows.codes, whole)
    with pytest.raises(LogitsFileError, match="no chunk 1; it has 1, counted from 0"):
        kld.read_chunk(file, 1)


def test_extra_bytes(small: Path) -> None:
    small.write_bytes(small.read_bytes() + b"\0")
    for allow in (False, True):
        with pytest.raises(LogitsFileError, match="1 bytes after the last of 2 chunks"):
            kld.open_logits_file(small, allow_truncated=allow)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(LogitsFileError, match="cannot be read"):
        kld.open_logits_file(tmp_path / "none.kld")
    with pytest.raises(LogitsFileError, match="cannot be read"):
        kld.open_logits_file(tmp_path)


def test_a_file_that_shrinks_after_it_was_opened(small: Path) -> None:
    file = kld.open_logits_file(small)
    small.write_bytes(small.read_bytes()[:-ROW_BYTES])
    with pytest.raises(LogitsFileError, match="became shorter"):
        list(kld.score_files(file, file))
    with pytest.raises(LogitsFileError, match="chunk 1 cannot be mapped"):
        kld.read_chunk(file, 1)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(numbers=st.tuples(*[st.integers(-(2**31), 2**31 - 1) | st.integers(0, 12)] * 3), rest=st.binary(max_size=400))
def test_any_header_is_refused_cheaply_or_right(tmp_path: Path, numbers: tuple[int, int, int], rest: bytes) -> None:
    path = tmp_path / "fuzz.kld"
    path.write_bytes(struct.pack("<8siii", b"_logits_", *numbers) + rest)
    tracemalloc.start()
    try:
        score_or_refuse(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20  # the reader's own buffers take 4 MB each, whatever the header claims


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_refused_or_harmless(small: Path, data: st.DataObject) -> None:
    original = small.read_bytes()
    damaged = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    length = data.draw(st.just(len(damaged)) | st.integers(0, len(damaged)))
    path = small.with_name("damaged.kld")
    path.write_bytes(bytes(damaged[:length]) + data.draw(st.binary(max_size=3)))
    score_or_refuse(path)


def score_or_refuse(path: Path) -> None:
    """Go through all of the file; whatever is not refused must be numbers."""
    try:
        file = kld.open_logits_file(path, allow_truncated=True)
        for chunk in kld.score_files(file, file):
            for values in (chunk.scores.kld_low, chunk.scores.base_target_logprob, chunk.scores.base_margin):
                assert np.isfinite(values).all()
            assert chunk.identical
    except LogitsFileError as error:
        assert "\n" not in str(error)  # noqa: PT017 - not every damage raises


# ------------------------------------------------------------------------------------------------------- writing


def rows(n: int, n_vocab: int = 5) -> kld.QuantisedRows:
    return kld.quantise(logits(n, n_vocab))


@pytest.mark.parametrize(
    ("tokens", "n_vocab", "blocks", "message"),
    [
        (TOKENS, 5, [rows(3)], "3 rows given, 4 expected"),
        (TOKENS, 5, [rows(3), rows(2)], "more than the 4 rows"),
        (TOKENS, 5, [], "0 rows given"),
        (TOKENS, 5, [rows(4, 6)], r"codes \(4, 6\)"),
        (TOKENS, 4, [rows(4, 4)], r"tokens from 0 to 4 are not all in 0\.\.3"),
        (TOKENS, 1, [rows(4)], "n_vocab 1"),
        (TOKENS[0], 5, [rows(4)], r"tokens of shape \(6,\)"),
        (TOKENS[:, :2], 5, [rows(4)], r"tokens of shape \(2, 2\)"),
        (TOKENS[:0], 5, [], r"tokens of shape \(0, 6\)"),
    ],
)
def test_what_no_file_can_hold(
    tmp_path: Path, tokens: Int32Array, n_vocab: int, blocks: list[kld.QuantisedRows], message: str
) -> None:
    with pytest.raises(LogitsFileError, match=message):
        kld.write_logits_file(tmp_path / "new.kld", tokens, n_vocab, blocks)
    assert list(tmp_path.iterdir()) == []


def test_bad_rows_are_not_written(tmp_path: Path) -> None:
    good = rows(4)
    bad = kld.QuantisedRows(good.codes, np.where([0, 1, 0, 0], np.float32(np.nan), good.scale), good.min_log_prob)
    with pytest.raises(LogitsFileError, match="row 1: scale nan"):
        kld.write_logits_file(tmp_path / "new.kld", TOKENS, 5, [bad])


def test_an_interrupted_write_leaves_the_old_file(small: Path) -> None:
    before = small.read_bytes()

    def blocks() -> Iterator[kld.QuantisedRows]:
        yield rows(2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kld.write_logits_file(small, TOKENS, 5, blocks())
    assert small.read_bytes() == before
    assert list(small.parent.iterdir()) == [small]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LogitsFileError, match="cannot be written"):
        kld.write_logits_file(tmp_path / "none" / "new.kld", TOKENS, 5, [rows(4)])

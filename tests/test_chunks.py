"""Chunks: what is scored, in which order, and what is left out."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agreement import chunks
from agreement.chunks import cut
from agreement.errors import CorpusError, StoreError, UsageError


def ids(n: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + n, dtype=np.int32)


@st.composite
def corpora(draw: st.DrawFn) -> list[tuple[str, np.ndarray]]:
    """Documents whose tokens are all different, so that a token tells where it came from."""
    sizes = draw(st.lists(st.integers(0, 70), min_size=1, max_size=6))
    starts = np.cumsum([0, *sizes])
    documents = [(f"d{i}.py", ids(n, int(starts[i]))) for i, n in enumerate(sizes)]
    return [*documents, ("long.py", ids(draw(st.integers(16, 60)), 10_000))]


ORDER_OF_SEED_0 = ("5.py", "3.py", "10.py", "7.py")

windows = st.integers(8, 16).flatmap(lambda n_ctx: st.tuples(st.just(n_ctx), st.integers(0, n_ctx - 2)))


def test_document_windows_by_hand() -> None:
    # 12 tokens, n_ctx 8, first 4, last 7: 3 scored a window, so windows start at 0, 3, 6, ...; the one at 6 would end
    # at 14 > 12. Position p predicts p + 1: targets 0+5..0+7 and 3+5..3+7. Tail: 12 - (3 + 8) = 1.
    out = cut([("a", ids(12))], n_ctx=8)
    order = np.argsort(out.tokens[:, 0])
    assert out.tokens[order].tolist() == [[0, 1, 2, 3, 4, 5, 6, 7], [3, 4, 5, 6, 7, 8, 9, 10]]
    assert out.targets[order].tolist() == [[5, 6, 7], [8, 9, 10]]
    assert (out.first, out.last, out.n_scored, out.n_ctx, out.n_chunks) == (4, 7, 3, 8, 2)
    assert out.cluster.tolist() == [0, 0]
    assert out.cluster_names == ("a",)
    assert out.notes == ("1 token(s) at the end of 1 text(s) left out: too few for a further window",)
    assert out.tokens.dtype == out.targets.dtype == out.cluster.dtype == np.int32


def test_joined_windows_by_hand() -> None:
    # 19 tokens in windows of 8: 0..7, 8..15, and 3 left. First scored position 8 // 2 = 4, last 7 exclusive.
    out = cut([("text", ids(19))], n_ctx=8, chunking="llama-perplexity", bos=99, seed=5)
    assert out.tokens.tolist() == [[99, 1, 2, 3, 4, 5, 6, 7], [99, 9, 10, 11, 12, 13, 14, 15]]
    assert out.targets.tolist() == [[5, 6, 7], [13, 14, 15]]
    assert out.cluster_names == ("chunk-0", "chunk-1")
    assert out.cluster.tolist() == [0, 1]
    assert out.seed == 5
    assert out.notes == ("3 token(s) at the end of 1 text(s) left out: too few for a further window",)


def test_joined_chunks_are_the_first_ones_whatever_the_seed() -> None:
    both = [cut([("t", ids(64))], n_ctx=8, chunking="llama-perplexity", n_chunks=3, seed=s) for s in (0, 1)]
    assert both[0].tokens[:, 0].tolist() == both[1].tokens[:, 0].tolist() == [0, 8, 16]
    assert both[0].cluster_names == ("chunk-0", "chunk-1", "chunk-2")
    assert both[0].fingerprint != both[1].fingerprint  # the seed is recorded


@pytest.mark.parametrize("n_ctx", [8, 9, 512, 2048])
def test_scored_range_is_that_of_llama_perplexity(n_ctx: int) -> None:
    # There: rows first .. n_ctx-2 with first = n_ctx/2, so n_ctx - 1 - first of them.
    out = cut([("t", ids(n_ctx))], n_ctx=n_ctx, chunking="llama-perplexity")
    assert out.n_scored == out.targets.shape[1] == n_ctx - 1 - n_ctx // 2
    assert out.targets[0].tolist() == list(range(n_ctx // 2 + 1, n_ctx))


@given(corpora(), windows, st.integers(-3, 3), st.one_of(st.none(), st.integers(0, 9)))
def test_scored_targets_tile_each_document(
    documents: list[tuple[str, np.ndarray]], window: tuple[int, int], seed: int, bos: int | None
) -> None:
    n_ctx, first = window
    out = cut(documents, n_ctx=n_ctx, first=first, seed=seed, bos=bos)
    tokens_of = dict(documents)
    n_cut = 0
    for c, name in enumerate(out.cluster_names):
        document = tokens_of[name]
        scored = np.concatenate(sorted(out.targets[out.cluster == c].tolist()))
        n_windows = int((out.cluster == c).sum())
        # Disjoint, contiguous, from the first target with full context on, up to less than a step before the end.
        assert scored.tolist() == document[first + 1 : first + 1 + n_windows * out.n_scored].tolist()
        assert 0 <= document.size - (first + 1) - scored.size < out.n_scored
        n_cut += n_windows
    assert n_cut == out.n_chunks
    assert set(out.cluster_names) == {name for name, tokens in documents if tokens.size >= n_ctx}
    # Inside a window, targets are the tokens one further on, whatever stands in place of the first token.
    assert np.array_equal(out.targets, out.tokens[:, first + 1 :])
    assert np.array_equal(np.diff(out.tokens[:, 1:]), np.ones((out.n_chunks, n_ctx - 2)))
    if bos is not None:
        assert (out.tokens[:, 0] == bos).all()


@given(corpora(), windows, st.integers(0, 5), st.data())
def test_a_prefix_of_a_run_is_the_shorter_run(
    documents: list[tuple[str, np.ndarray]], window: tuple[int, int], seed: int, data: st.DataObject
) -> None:
    n_ctx, first = window
    everything = cut(documents, n_ctx=n_ctx, first=first, seed=seed)
    k = data.draw(st.integers(1, everything.n_chunks))
    some = cut(documents, n_ctx=n_ctx, first=first, seed=seed, n_chunks=k)
    assert np.array_equal(some.tokens, everything.tokens[:k])
    assert np.array_equal(some.targets, everything.targets[:k])
    assert np.array_equal(some.cluster, everything.cluster[:k])
    assert some.cluster_names == everything.cluster_names[: len(some.cluster_names)]
    # As many clusters as can be: no document gives a second window before each has given one.
    assert len(some.cluster_names) == min(k, len(everything.cluster_names))
    counts = np.bincount(some.cluster)
    there = np.bincount(everything.cluster)[: counts.size]
    assert (counts >= np.minimum(there, counts.max() - 1)).all()


@pytest.mark.parametrize(("asked", "there"), [(None, 3), (2, 2), (3, 3), (9, 3)])
def test_one_window_a_document(asked: int | None, there: int) -> None:
    """Three documents of six windows each, and one too short: the first windows of a run that takes them in turns."""
    documents = [(name, ids(8 + 5 * 3)) for name in ("a", "b", "c")] + [("short", ids(7))]
    found = cut(documents, n_ctx=8, n_chunks=asked, one_each=True)
    every = cut(documents, n_ctx=8)
    assert (found.n_chunks, every.n_chunks) == (there, 18)
    assert found.cluster.tolist() == list(range(there))
    assert np.array_equal(found.tokens, every.tokens[:there])
    assert found.fingerprint == cut(documents, n_ctx=8, n_chunks=there).fingerprint


def test_selection_is_drawn_from_the_seed_and_fixed_for_good() -> None:
    documents = [(f"{i}.py", ids(40, 100 * i)) for i in range(12)]
    names = [cut(documents, n_ctx=8, n_chunks=4, seed=s).cluster_names for s in (0, 0, 1)]
    assert names[0] == names[1] != names[2]
    # Held literally: a changed order would change every fingerprint. Independent of the order they are given in:
    # `for i in $(seq 0 11); do printf '[0, "%s.py"]' $i | sha256sum | sed "s/-/$i/"; done | sort | head -4`
    assert names[0] == cut(documents[::-1], n_ctx=8, n_chunks=4, seed=0).cluster_names == ORDER_OF_SEED_0


def test_first_chunks_are_not_all_beginnings() -> None:
    # 40 documents of (163 - 8) // 3 + 1 = 52 windows: that all 40 draw window 0 has probability 52 ** -40.
    out = cut([(f"{i}", ids(163)) for i in range(40)], n_ctx=8, n_chunks=40)
    assert len(set(out.tokens[:, 0].tolist())) > 10
    assert set((out.tokens[:, 0] % 3).tolist()) == {0}


def test_the_fingerprint_covers_everything_but_the_notes() -> None:
    base = cut([("a", ids(30)), ("b", ids(30, 50))], n_ctx=8)
    changed: list[dict[str, Any]] = [
        {"tokens": base.tokens + 1},
        {"targets": base.targets + 1},
        {"cluster": base.cluster[::-1]},
        {"cluster_names": ("a", "c")},
        {"first": 3},
        {"last": 6},
        {"chunking": "llama-perplexity"},
        {"seed": 1},
        {"tokens": base.tokens.reshape(-1, 16)},  # the same bytes in another shape
    ]
    prints = [chunks.fingerprint(replace(base, **change)) for change in changed]
    assert len({base.fingerprint, *prints}) == len(changed) + 1
    assert chunks.fingerprint(replace(base, notes=("other",))) == base.fingerprint
    assert chunks.fingerprint(replace(base, tokens=np.asfortranarray(base.tokens, dtype=np.int64))) == base.fingerprint


def test_the_fingerprint_is_fixed_for_good() -> None:
    # sha256 over the documented bytes, spelled out here without the module:
    head = b'{"chunking":"document","cluster_names":["a"],"first":4,"last":7,"seed":0,"shapes":[[1,8],[1,3],[1]]}\n'
    body = b"".join(i.to_bytes(4, "little") for i in (*range(8), 5, 6, 7, 0))
    expected = hashlib.sha256(b"agreement-chunks-1\n" + head + body).hexdigest()
    assert cut([("a", ids(8))], n_ctx=8).fingerprint == expected


@given(corpora(), windows, st.integers(0, 5))
@settings(max_examples=30)
def test_arrays_there_and_back(documents: list[tuple[str, np.ndarray]], window: tuple[int, int], seed: int) -> None:
    out = cut(documents, n_ctx=window[0], first=window[1], seed=seed)
    arrays, meta = chunks.to_arrays(out)
    back = chunks.from_arrays(arrays, json.loads(json.dumps(meta)))
    assert back.fingerprint == out.fingerprint
    assert (back.notes, back.cluster_names, back.chunking) == (out.notes, out.cluster_names, out.chunking)
    assert np.array_equal(back.tokens, out.tokens)


@pytest.mark.parametrize("part", ["tokens", "targets", "cluster"])
def test_a_changed_array_is_refused(part: str) -> None:
    arrays, meta = chunks.to_arrays(cut([("a", ids(20))], n_ctx=8))
    arrays[part] = arrays[part].copy()
    arrays[part].flat[0] ^= 1
    with pytest.raises(StoreError, match="damaged"):
        chunks.from_arrays(arrays, meta)


@pytest.mark.parametrize(
    ("key", "value"), [("seed", None), ("chunking", "other"), ("first", "x"), ("cluster_names", 3), ("notes", None)]
)
def test_unreadable_meta_is_refused(key: str, value: object) -> None:
    arrays, meta = chunks.to_arrays(cut([("a", ids(20))], n_ctx=8))
    with pytest.raises(StoreError, match="record the baseline again"):
        chunks.from_arrays(arrays, {**meta, key: value})
    del meta[key]
    with pytest.raises(StoreError, match=key):
        chunks.from_arrays(arrays, meta)


def test_arrays_cannot_be_written_to() -> None:
    out = cut([("a", ids(20))], n_ctx=8)
    with pytest.raises(ValueError, match="read-only"):
        out.tokens[0, 0] = 1


def test_what_is_left_out_is_said() -> None:
    documents = [("long", ids(100)), ("fits", ids(8)), *((f"s{i}", ids(i)) for i in range(1, 6))]
    # long: (100 - 8) // 3 + 1 = 31 windows, ends at 30 * 3 + 8 = 98, tail 2. fits: 1 window. short: 1+2+3+4+5 = 15.
    assert cut(documents, n_ctx=8, n_chunks=1).notes == (
        "5 document(s) shorter than 8 tokens left out (15 tokens in all): s1, s2, s3 and 2 more",
        "2 token(s) at the end of 1 text(s) left out: too few for a further window",
        "1 of 32 chunks used",
        "1 of 2 documents long enough are used; ask for more chunks to use more",
    )
    more = cut(documents, n_ctx=8, n_chunks=33)
    assert more.n_chunks == 32
    assert more.notes[-1] == "33 chunks asked for, 32 there: all are used"
    assert cut(documents, n_ctx=8, n_chunks=32).notes == cut(documents, n_ctx=8).notes
    joined = cut([("t", ids(16))], n_ctx=8, chunking="llama-perplexity", n_chunks=3)
    assert joined.notes == ("3 chunks asked for, 2 there: all are used",)


@pytest.mark.parametrize(
    ("documents", "chunking", "message"),
    [
        ([], "document", "8 tokens are needed, there is no document"),
        (
            [("a", ids(7)), ("b", ids(5))],
            "document",
            r"8 tokens are needed in one document, the longest of 2 \(a\) has 7, all together 12; give more text",
        ),
        ([("a", ids(0))], "document", r"longest of 1 \(a\) has 0"),
        ([("t", ids(7))], "llama-perplexity", "8 tokens are needed, there are 7"),
    ],
)
def test_too_little_text(documents: list[tuple[str, np.ndarray]], chunking: Any, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        cut(documents, n_ctx=8, chunking=chunking)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_ctx": 7}, "context of 7 tokens is too small; give at least 8"),
        ({"n_ctx": -1}, "context of -1"),
        ({"first": 7}, "first scored position 7 is outside a context of 8; give 0 to 6"),
        ({"first": -1}, "first scored position -1"),
        ({"first": 3, "chunking": "llama-perplexity"}, "llama-perplexity scores from 4"),
        ({"n_chunks": 0}, "0 chunks: give at least 1"),
        ({"chunking": "lines"}, "chunking 'lines': give one of document, llama-perplexity"),
        ({"bos": -1}, "BOS token -1"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cut([("a", ids(20))], **{"n_ctx": 8, **arguments})


@pytest.mark.parametrize(
    ("documents", "chunking", "message"),
    [
        ([("a", ids(20)), ("a", ids(20))], "document", "same name"),
        ([("a", ids(20)), ("b", ids(20))], "llama-perplexity", "one joined text, not 2"),
        ([], "llama-perplexity", "one joined text, not 0"),
        ([("a", np.zeros((4, 5), np.int32))], "document", r"a: token ids must be one row of integers.*\(4, 5\)"),
        ([("a", np.zeros(20))], "document", "not float64"),
        ([("a", np.full(20, -1))], "document", "token id -1"),
        ([("a", np.full(20, 2**31))], "document", "2147483648"),
    ],
)
def test_bad_token_arrays(documents: list[tuple[str, np.ndarray]], chunking: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cut(documents, n_ctx=8, chunking=chunking)

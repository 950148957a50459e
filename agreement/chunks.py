"""Chunks: token ids cut into fixed windows with one scored range `[first, last)`; pure.

In: the token ids of documents, or of one joined text.  Out: `ChunkSet`.

Two ways to cut, laid out for one document of 12 tokens, `n_ctx = 8`, `first = 4`, `last = 7`:

    document           window 0 = tokens 0..7, targets 5 6 7;   window 1 = tokens 3..10, targets 8 9 10;   1 is left
    llama-perplexity   window 0 = tokens 0..7, targets 5 6 7;   4 are left

Windows of `document` overlap by their context, so that the targets of a document follow each other without a gap
and without a token scored twice. Windows of `llama-perplexity` do not overlap: half of all tokens are never scored,
as in that tool, whose numbers can then be laid beside ours.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agreement.errors import CorpusError, StoreError, UsageError
from agreement.records import Chunking, ChunkSet, Int32Array

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MIN_CTX = 8  # below this a window has no context worth the name, and `first` no room
CHUNKINGS: tuple[Chunking, ...] = ("document", "llama-perplexity")

_FORMAT = b"agreement-chunks-1\n"
_NAMES_SHOWN = 3

TokenArray = NDArray[np.integer[Any]]


class _Plan(NamedTuple):
    """Where the chosen windows start.

    Attributes:
        starts: One `(index of the text, first token of the window)` a chunk, in chunk order.
        cluster: One index into `cluster_names` a chunk.
        cluster_names: Names of the clusters that have a chunk, in order of first use.
        notes: What was left out.
    """

    starts: list[tuple[int, int]]
    cluster: list[int]
    cluster_names: tuple[str, ...]
    notes: tuple[str, ...]


def cut(
    documents_tokens: Sequence[tuple[str, TokenArray]],
    *,
    n_ctx: int = 512,
    chunking: Chunking = "document",
    n_chunks: int | None = None,
    seed: int = 0,
    first: int | None = None,
    bos: int | None = None,
    one_each: bool = False,
) -> ChunkSet:
    """Cut token ids into windows of `n_ctx` tokens.

    `document`: windows lie inside one document and step by `last - first` tokens. With `n_chunks`, documents take
    turns in an order drawn from `seed`, and so do the windows of one document: every document gives one window
    before any gives a second. The order of the chunks is the order of that draw, so the first k chunks of a run are
    the run with `n_chunks=k`.

    `llama-perplexity`: one joined text, windows side by side from its first token on, the first `n_chunks` of them,
    each its own cluster. `seed` is recorded and has no effect.

    The draw sorts by SHA-256 of seed, name and window instead of using a generator: it cannot change with the
    version of numpy, and a document added to the corpus does not reorder the others.

    Args:
        documents_tokens: `(name, token ids)`, ids of shape (n_tokens,) and any integer dtype. For `document` they
            are the text's own tokens, without special ones; for `llama-perplexity` there is exactly one entry,
            tokenised with what the model puts in front (a BOS, if it has one), as that tool does.
        n_ctx: Tokens a window.
        chunking: `document` or `llama-perplexity`.
        n_chunks: How many chunks at most; None for all.
        seed: Seed of the selection.
        first: First scored position of a window; every scored token has seen `first + 1` tokens. Default `n_ctx // 2`.
            The last one is always `n_ctx - 2`, the last position whose target lies in the window.
        bos: Token that replaces the first of each window if the model asks for one; targets are not touched.
        one_each: Of `document`, at most one window a document.

    Returns:
        At least one chunk.

    Raises:
        UsageError: An argument out of range, or arrays that are no token ids.
        CorpusError: No text is long enough for one window.
    """
    _check_arguments(n_ctx, chunking, n_chunks, first, bos)
    texts = _check_texts(documents_tokens, chunking)
    begin = n_ctx // 2 if first is None else first
    n_scored = n_ctx - 1 - begin
    _check_length(texts, n_ctx, chunking)
    if chunking == "document":
        plan = _plan_documents(texts, n_ctx, n_scored, n_chunks, seed, one_each=one_each)
    else:
        plan = _plan_joined(texts[0][1].size, n_ctx, n_chunks)

    offsets = np.arange(begin + 1, n_ctx)
    tokens = np.stack([texts[i][1][s : s + n_ctx] for i, s in plan.starts]).astype(np.int32)
    targets = np.ascontiguousarray(tokens[:, offsets])
    if bos is not None:
        tokens[:, 0] = bos
    return build(
        tokens=tokens,
        targets=targets,
        cluster=np.array(plan.cluster, dtype=np.int32),
        cluster_names=plan.cluster_names,
        first=begin,
        last=n_ctx - 1,
        chunking=chunking,
        seed=seed,
        notes=plan.notes,
    )


def _check_arguments(n_ctx: int, chunking: str, n_chunks: int | None, first: int | None, bos: int | None) -> None:
    if chunking not in CHUNKINGS:
        raise UsageError(f"chunking {chunking!r}: give one of {', '.join(CHUNKINGS)}")
    if n_ctx < MIN_CTX:
        raise UsageError(f"a context of {n_ctx} tokens is too small; give at least {MIN_CTX}")
    if first is not None and not 0 <= first < n_ctx - 1:
        raise UsageError(f"first scored position {first} is outside a context of {n_ctx}; give 0 to {n_ctx - 2}")
    if first not in (None, n_ctx // 2) and chunking == "llama-perplexity":
        raise UsageError(
            f"first scored position {first}: llama-perplexity scores from {n_ctx // 2} at a context of {n_ctx};"
            " leave it out, or cut by document"
        )
    if n_chunks is not None and n_chunks < 1:
        raise UsageError(f"{n_chunks} chunks: give at least 1, or leave it out for all")
    if bos is not None and bos < 0:
        raise UsageError(f"BOS token {bos} is not a token id; pass None for a model without one")


def _check_texts(
    documents_tokens: Sequence[tuple[str, TokenArray]], chunking: Chunking
) -> list[tuple[str, TokenArray]]:
    texts = [(name, np.asarray(ids)) for name, ids in documents_tokens]
    if chunking == "llama-perplexity" and len(texts) != 1:
        raise UsageError(f"llama-perplexity chunking takes one joined text, not {len(texts)}; join them first")
    if len({name for name, _ in texts}) != len(texts):
        raise UsageError("two documents have the same name; give each its own, results are grouped by it")
    for name, ids in texts:
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise UsageError(f"{name}: token ids must be one row of integers, not {ids.dtype} of shape {ids.shape}")
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) > np.iinfo(np.int32).max):
            raise UsageError(f"{name}: token id {int(ids.min())} to {int(ids.max())} is outside int32 from 0 on")
    return texts


def _check_length(texts: list[tuple[str, TokenArray]], n_ctx: int, chunking: Chunking) -> None:
    sizes = [ids.size for _, ids in texts]
    if max(sizes, default=0) >= n_ctx:
        return
    if chunking == "llama-perplexity":
        there = f"{n_ctx} tokens are needed, there are {sum(sizes)}"
    elif not texts:
        there = f"{n_ctx} tokens are needed, there is no document"
    else:
        longest = texts[sizes.index(max(sizes))][0]
        there = (
            f"{n_ctx} tokens are needed in one document, the longest of {len(texts)} ({longest}) has {max(sizes)},"
            f" all together {sum(sizes)}"
        )
    raise CorpusError(f"too little text for one chunk: {there}; give more text or a smaller context")


def _rank(seed: int, *key: object) -> bytes:
    """Return the sort key that stands for a random draw."""
    return hashlib.sha256(json.dumps([seed, *key]).encode()).digest()


def _drawn_windows(seed: int, name: str, n: int) -> list[int]:
    """Return the windows `0..n-1` of one document in drawn order.

    Drawn and not in text order: a short run takes one window a document, and first windows alone would be a sample
    of licence texts and imports.
    """
    return sorted(range(n), key=lambda window: _rank(seed, name, window))


def _plan_documents(
    texts: list[tuple[str, TokenArray]], n_ctx: int, step: int, n_chunks: int | None, seed: int, *, one_each: bool
) -> _Plan:
    long_enough = [i for i, (_, ids) in enumerate(texts) if ids.size >= n_ctx]
    if one_each:  # the first round
        n_chunks = min(n_chunks or len(long_enough), len(long_enough))
    turn = sorted(long_enough, key=lambda i: _rank(seed, texts[i][0]))
    windows = {i: (texts[i][1].size - n_ctx) // step + 1 for i in turn}
    drawn = [_drawn_windows(seed, texts[i][0], windows[i]) for i in turn]
    by_round = sorted((r, c, w) for c, order in enumerate(drawn) for r, w in enumerate(order))
    chosen = [(c, w) for _, c, w in by_round[:n_chunks]]
    n_clusters = max(c for c, _ in chosen) + 1
    tails = [texts[i][1].size - (windows[i] - 1) * step - n_ctx for i in turn]
    notes = [
        *_note_short([(name, ids.size) for name, ids in texts if ids.size < n_ctx], n_ctx),
        *_note_tail(sum(tails), sum(t > 0 for t in tails)),
        *_note_count(n_chunks, sum(windows.values())),
    ]
    if n_clusters < len(turn):
        notes.append(f"{n_clusters} of {len(turn)} documents long enough are used; ask for more chunks to use more")
    return _Plan(
        starts=[(turn[c], w * step) for c, w in chosen],
        cluster=[c for c, _ in chosen],
        cluster_names=tuple(texts[i][0] for i in turn[:n_clusters]),
        notes=tuple(notes),
    )


def _plan_joined(n_tokens: int, n_ctx: int, n_chunks: int | None) -> _Plan:
    there = n_tokens // n_ctx
    n = there if n_chunks is None else min(n_chunks, there)
    tail = n_tokens - there * n_ctx
    return _Plan(
        starts=[(0, k * n_ctx) for k in range(n)],
        cluster=list(range(n)),
        cluster_names=tuple(f"chunk-{k}" for k in range(n)),
        notes=(*_note_tail(tail, int(tail > 0)), *_note_count(n_chunks, there)),
    )


def _note_short(short: list[tuple[str, int]], n_ctx: int) -> list[str]:
    if not short:
        return []
    names = ", ".join(name for name, _ in short[:_NAMES_SHOWN])
    more = f" and {len(short) - _NAMES_SHOWN} more" if len(short) > _NAMES_SHOWN else ""
    total = sum(size for _, size in short)
    return [f"{len(short)} document(s) shorter than {n_ctx} tokens left out ({total} tokens in all): {names}{more}"]


def _note_tail(n_tokens: int, n_texts: int) -> list[str]:
    if not n_tokens:
        return []
    return [f"{n_tokens} token(s) at the end of {n_texts} text(s) left out: too few for a further window"]


def _note_count(asked: int | None, there: int) -> list[str]:
    if asked is None or asked == there:
        return []
    if asked > there:
        return [f"{asked} chunks asked for, {there} there: all are used"]
    return [f"{asked} of {there} chunks used"]


def build(
    *,
    tokens: Int32Array,
    targets: Int32Array,
    cluster: Int32Array,
    cluster_names: Sequence[str],
    first: int,
    last: int,
    chunking: Chunking,
    seed: int,
    notes: Sequence[str] = (),
) -> ChunkSet:
    """Return a `ChunkSet` with its fingerprint; the arrays given are made read-only, not copied."""
    for array in (tokens, targets, cluster):
        array.setflags(write=False)
    chunks = ChunkSet(tokens, targets, cluster, tuple(cluster_names), first, last, chunking, seed, tuple(notes), "")
    return replace(chunks, fingerprint=fingerprint(chunks))


def fingerprint(chunks: ChunkSet) -> str:
    """Return the SHA-256 of everything in `chunks` but its notes.

    The bytes hashed are a format line, one line of JSON with the small fields and shapes, and the three arrays as
    little-endian int32 in C order.
    """
    arrays = (chunks.tokens, chunks.targets, chunks.cluster)
    head = {**_meta(chunks), "shapes": [list(a.shape) for a in arrays]}
    digest = hashlib.sha256(_FORMAT)
    digest.update(json.dumps(head, sort_keys=True, separators=(",", ":")).encode() + b"\n")
    for array in arrays:
        digest.update(np.ascontiguousarray(array, dtype="<i4").tobytes())
    return digest.hexdigest()


def _meta(chunks: ChunkSet) -> dict[str, Any]:
    return {
        "cluster_names": list(chunks.cluster_names),
        "first": chunks.first,
        "last": chunks.last,
        "chunking": chunks.chunking,
        "seed": chunks.seed,
    }


def to_arrays(chunks: ChunkSet) -> tuple[dict[str, Int32Array], dict[str, Any]]:
    """Return the arrays of `chunks` and the rest of it as plain JSON values; `from_arrays` takes them back."""
    arrays = {"tokens": chunks.tokens, "targets": chunks.targets, "cluster": chunks.cluster}
    return arrays, {**_meta(chunks), "notes": list(chunks.notes), "fingerprint": chunks.fingerprint}


def from_arrays(arrays: Mapping[str, Int32Array], meta: Mapping[str, Any]) -> ChunkSet:
    """Return the `ChunkSet` that `to_arrays` took apart.

    Raises:
        StoreError: A part is missing or of the wrong kind, or the fingerprint does not match.
    """
    try:
        chunks = build(
            **{name: np.array(arrays[name], dtype=np.int32) for name in ("tokens", "targets", "cluster")},
            cluster_names=[str(name) for name in meta["cluster_names"]],
            first=int(meta["first"]),
            last=int(meta["last"]),
            chunking=_chunking(meta["chunking"]),
            seed=int(meta["seed"]),
            notes=[str(note) for note in meta["notes"]],
        )
        stored = str(meta["fingerprint"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise StoreError(f"stored chunks cannot be read ({error!r}); record the baseline again") from error
    if chunks.fingerprint != stored:
        raise StoreError(
            f"stored chunks are damaged: fingerprint {chunks.fingerprint[:12]}, recorded {stored[:12]};"
            " record the baseline again"
        )
    return chunks


def _chunking(name: object) -> Chunking:
    for chunking in CHUNKINGS:
        if chunking == name:
            return chunking
    raise ValueError(f"chunking {name!r}")

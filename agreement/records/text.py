"""Text and token windows: what flows from `corpus` and `chunks` to the passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agreement.records.arrays import Int32Array


@dataclass(frozen=True)
class Document:
    """One source text: the unit that is drawn at random, so the unit of every interval.

    Attributes:
        name: Path relative to the corpus root, with forward slashes; unique within a corpus.
        text: The whole text.
        language: What kind of text it is, e.g. `python` or `prose`; empty if unknown.
        sha256: Hex digest of the text's UTF-8 bytes.
    """

    name: str
    text: str
    language: str
    sha256: str


@dataclass(frozen=True)
class Skipped:
    """A source that was left out, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Corpus:
    """A list of documents in a fixed order.

    Attributes:
        name: For people; not part of the fingerprint.
        documents: In the order in which chunks are cut.
        skipped: Everything that was seen and not used.
        fingerprint: Hex digest of names and text digests in order.
        notes: Remarks about the source, one line each, for people; not part of the fingerprint.
    """

    name: str
    documents: tuple[Document, ...]
    skipped: tuple[Skipped, ...]
    fingerprint: str
    notes: tuple[str, ...] = ()


Chunking = Literal["document", "llama-perplexity"]


@dataclass(frozen=True)
class ChunkSet:
    """Fixed token windows, the same for every pass of a run.

    Position `p` of a chunk is scored if `first <= p < last`: the logits after `tokens[: p + 1]` are compared, and
    the target is `targets[c, p - first]`.

    Attributes:
        tokens: (n_chunks, n_ctx) int32, as they are decoded (BOS already in place where the model asks for it).
        targets: (n_chunks, n_scored) int32, the true next token at each scored position.
        cluster: (n_chunks,) int32, index into `cluster_names`: chunks with the same one were not drawn independently.
        cluster_names: One a cluster: the document's name, or `chunk-N` where chunks are not cut by document.
        first: First scored position.
        last: One past the last scored position; at most n_ctx - 1.
        chunking: How the text was cut.
        seed: Seed of the selection.
        notes: What was left out in cutting, one line each, for people.
        fingerprint: Hex digest of everything above but the notes.
    """

    tokens: Int32Array
    targets: Int32Array
    cluster: Int32Array
    cluster_names: tuple[str, ...]
    first: int
    last: int
    chunking: Chunking
    seed: int
    notes: tuple[str, ...]
    fingerprint: str

    @property
    def n_chunks(self) -> int:
        """Number of chunks."""
        return int(self.tokens.shape[0])

    @property
    def n_ctx(self) -> int:
        """Tokens a chunk."""
        return int(self.tokens.shape[1])

    @property
    def n_scored(self) -> int:
        """Scored positions a chunk."""
        return self.last - self.first

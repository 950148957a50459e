"""Corpora: text sources to documents.

In: a file, a folder, a git checkout, a frozen folder, a spec, a data set or a corpus saved before.
Out: `Corpus`, in an order that depends on names alone, with everything that was left out and why.

Nothing here uses the network, and `datasets` is imported only where a data set is read or written.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from agreement.corpus.collection import Collection, Selection, build, counted
from agreement.corpus.languages import language_of
from agreement.corpus.listing import list_folder, list_git
from agreement.corpus.manifest import collect_manifest, freeze, read_manifest, write_manifest
from agreement.corpus.rules import AS_GIVEN, Rules
from agreement.corpus.saved import (
    TABLE_SUFFIXES,
    collect_dataset,
    collect_saved,
    from_dataset,
    is_dataset_folder,
    save,
    to_dataset,
)
from agreement.corpus.spec import collect_spec, read_spec, write_stdlib_spec
from agreement.errors import CorpusError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agreement.records import Corpus

__all__ = [
    "Rules",
    "Selection",
    "build",
    "counted",
    "freeze",
    "from_dataset",
    "joined_text",
    "language_of",
    "load",
    "save",
    "to_dataset",
    "write_manifest",
    "write_stdlib_spec",
]


def load(
    source: str | Path,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    languages: Sequence[str] = (),
    n_documents: int | None = None,
    seed: int = 0,
    rules: Rules | None = None,
) -> Corpus:
    """Load a corpus.

    Args:
        source: One of: a text file (one document); a `.toml` spec; a `.jsonl` or `.parquet` file with a column
            `text`; a folder, read whole; a git checkout, of which tracked files are read; a folder frozen with
            `write_manifest`; a folder written by `save` or by `Dataset.save_to_disk`.
        include: Glob patterns, of which a document's name must match one; `*` also crosses `/`, and a pattern without
            `/` may match the last part alone.
        exclude: Glob patterns of documents to leave out.
        languages: Languages to keep, e.g. `python` or `prose`.
        n_documents: How many documents at most, drawn with `seed`.
        seed: Seed of that draw; without `n_documents` it has no effect.
        rules: What counts as usable text. By default the limits of `Rules` for files found in a folder, and none for
            a file or data set that is named itself, which only must be text.

    Returns:
        At least one document, sorted by name.

    Raises:
        CorpusError: The source is not there, is damaged, or has no usable text.
        UsageError: `n_documents` below 1.
    """
    path = Path(source)
    try:
        there = bool(str(source)) and path.exists()
    except (OSError, ValueError) as error:
        raise CorpusError(f"corpus {str(source)!r}: cannot be looked at ({error})") from error
    if not there:
        raise CorpusError(f"corpus {str(source)!r}: not there; give a file, a folder or a corpus spec")
    selection = Selection(tuple(include), tuple(exclude), tuple(languages), n_documents, seed)
    into = Collection(selection, rules)
    name = _collect_folder(path, into) if path.is_dir() else _collect_file(path, into)
    return into.corpus(name, str(source))


def _collect_file(path: Path, into: Collection) -> str:
    """Add what a file names or holds; return the corpus's name."""
    if not path.is_file():
        raise CorpusError(f"corpus {str(path)!r}: neither a regular file nor a folder; write it to a file first")
    if path.suffix == ".toml":
        spec = read_spec(path)
        collect_spec(spec, into)
        return spec.name
    if path.suffix in TABLE_SUFFIXES:
        collect_dataset(path, into)
    else:
        into.rules = into.rules or AS_GIVEN
        into.add_file(path.name, path)
    return path.name


def _collect_folder(path: Path, into: Collection) -> str:
    """Add what a folder holds; return the corpus's name."""
    saved = collect_saved(path, into)
    if saved is not None:
        return saved
    manifest = read_manifest(path)
    if manifest is not None:
        collect_manifest(path, manifest, into)
        return manifest.name
    if is_dataset_folder(path):
        collect_dataset(path, into)
        return path.resolve().name
    listing = list_git(path) if (path / ".git").exists() else list_folder(path)
    if isinstance(listing, str):
        into.notes.append(listing)
        listing = list_folder(path)
    into.skipped += listing.skipped
    into.notes += listing.notes
    for name, file in listing.files:
        into.add_file(name, file)
    return listing.name


def joined_text(corpus: Corpus) -> str:
    """Return all texts one after the other without a separator, and without one closing newline.

    This is what `cat FILES > all.txt; llama-perplexity -f all.txt` evaluates: that tool drops one newline at the end
    of a file it reads.
    """
    text = "".join(document.text for document in corpus.documents)
    return text.removesuffix("\n")

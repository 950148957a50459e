"""Saved corpora and data sets: the only place that imports `datasets`, when it is needed (the import takes a second).

A saved corpus is a folder: `corpus.json` (name, what was left out, notes, fingerprint) and `dataset/`, a
`datasets.Dataset` with one row a document and the columns `name`, `text`, `language`, `sha256`.
Everything here reads and writes local files; nothing asks a hub.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agreement.corpus.collection import Collection, Selection, fingerprint
from agreement.corpus.folders import new_folder
from agreement.corpus.languages import language_of
from agreement.corpus.marked import read_marked
from agreement.errors import CorpusError
from agreement.records import Corpus, Skipped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from datasets import Dataset

COLUMNS = ("name", "text", "language", "sha256")
FILE_NAME = "corpus.json"
TABLE_SUFFIXES = (".jsonl", ".parquet")
_DATASET = "dataset"
_MARK = "agreement-corpus"
_VERSION = 1


def to_dataset(corpus: Corpus) -> Dataset:
    """Return a `datasets.Dataset` with one row a document and the columns `COLUMNS`, all strings, in corpus order."""
    from datasets import Dataset, Features, Value  # noqa: PLC0415  # slow to import

    columns = {column: [getattr(document, column) for document in corpus.documents] for column in COLUMNS}
    return Dataset.from_dict(columns, features=Features({column: Value("string") for column in COLUMNS}))


def from_dataset(dataset: Dataset, *, name: str = "dataset", selection: Selection | None = None) -> Corpus:
    """Return the rows of a `datasets.Dataset` as a corpus, sorted by name.

    Args:
        dataset: Needs the column `text`. `name` defaults to `row-N`, `language` to what the name tells; `sha256`, if
            there, is checked.
        name: Name of the corpus.
        selection: Which rows are wanted.

    Raises:
        CorpusError: No column `text`, several splits, a digest that does not match, or no usable row.
    """
    into = Collection(selection or Selection())
    _collect_rows(dataset, name, into)
    return into.corpus(name, name)


def _collect_rows(dataset: Any, where: str, into: Collection) -> list[tuple[str, str]]:
    """Add every row to `into` and return the names and text digests of all rows that have text, in order."""
    if isinstance(dataset, dict):  # a DatasetDict
        raise CorpusError(f"{where}: a data set of several splits ({', '.join(dataset)}); give one of them")
    if "text" not in dataset.column_names:
        raise CorpusError(
            f"{where}: no column 'text', only {', '.join(dataset.column_names)}; rename the one with text"
        )
    all_rows = []
    width = len(str(max(len(dataset) - 1, 0)))
    for number, row in enumerate(dataset):
        name = str(row.get("name") or f"row-{number:0{width}}")
        text = row["text"]
        if text is None:
            into.skip(name, "empty: no text in this row")
            continue
        if not isinstance(text, str):
            raise CorpusError(f"{where}: {name} has a {type(text).__name__} under 'text'; it must be a string")
        digest = hashlib.sha256(text.encode()).hexdigest()
        if row.get("sha256") not in (None, "", digest):
            raise CorpusError(f"{where}: {name} is not the text of its SHA-256 {row['sha256'][:12]}; build it again")
        language = row.get("language")
        into.add_text(name, text, str(language_of(name) if language is None else language))
        all_rows.append((name, digest))
    return all_rows


def save(corpus: Corpus, path: str | Path) -> None:
    """Write a corpus to a new folder; it appears whole or not at all.

    Raises:
        CorpusError: Something is there already, or the files cannot be written.
    """
    head = {
        "format": _MARK,
        "version": _VERSION,
        "name": corpus.name,
        "fingerprint": corpus.fingerprint,
        "notes": list(corpus.notes),
        "skipped": [list(astuple(skipped)) for skipped in corpus.skipped],
    }
    with new_folder(Path(path)) as partial:
        with _no_progress_bars():
            to_dataset(corpus).save_to_disk(str(partial / _DATASET))
        (partial / FILE_NAME).write_text(json.dumps(head, indent=1) + "\n", encoding="utf-8")


def collect_saved(folder: Path, into: Collection) -> str | None:
    """Add the documents of a saved corpus and return its name, or None if the folder is not one.

    Raises:
        CorpusError: The corpus is damaged.
    """
    head = read_marked(folder / FILE_NAME, _MARK, _VERSION)
    if head is None:
        return None
    rows = _collect_rows(_from_disk(folder / _DATASET), str(folder), into)
    try:
        if fingerprint(rows) != head["fingerprint"]:
            raise CorpusError(f"{folder}: the documents are not those that were saved; build the corpus again")
        into.skipped += [Skipped(str(name), str(reason)) for name, reason in head["skipped"]]
        into.notes += [str(note) for note in head["notes"]]
        return str(head["name"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorpusError(f"{folder / FILE_NAME}: damaged ({error!r}); build the corpus again") from error


def is_dataset_folder(folder: Path) -> bool:
    """Say whether a folder was written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    return (folder / "dataset_dict.json").is_file() or all(
        (folder / name).is_file() for name in ("dataset_info.json", "state.json")
    )


def collect_dataset(path: Path, into: Collection) -> None:
    """Add the rows of a data set: a `save_to_disk` folder, a `.parquet` or a `.jsonl` file.

    Raises:
        CorpusError: It cannot be read, or has no column `text`.
    """
    _collect_rows(_from_disk(path) if path.is_dir() else _from_table(path), str(path), into)


def _from_disk(folder: Path) -> Any:
    from datasets import load_from_disk  # noqa: PLC0415  # slow to import

    try:
        return load_from_disk(str(folder))
    except Exception as error:  # whatever a damaged folder makes of itself in Arrow, JSON or the file system
        raise CorpusError(f"{folder}: cannot be read as a data set ({_one_line(error)}); build it again") from error


def _from_table(path: Path) -> Any:
    from datasets import Dataset  # noqa: PLC0415  # slow to import

    read = Dataset.from_parquet if path.suffix == ".parquet" else Dataset.from_json
    try:
        # In memory with a throw-away cache: reading a file leaves nothing behind in the user's cache folder.
        with tempfile.TemporaryDirectory() as cache, _no_progress_bars():
            return read(str(path), cache_dir=cache, keep_in_memory=True)
    except Exception as error:  # as above
        raise CorpusError(f"{path}: cannot be read as {path.suffix[1:]} ({_one_line(error)})") from error


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars  # noqa: PLC0415  # slow

    disabled_before = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not disabled_before:
            enable_progress_bars()


def _one_line(error: Exception) -> str:
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {' '.join(str(cause).split())[:200]}"

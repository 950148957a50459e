"""Manifests: a corpus folder frozen file by file, and checked before it is read.

`manifest.json` beside the texts:

    {"format": "agreement-corpus-manifest", "version": 1, "name": "...", "files": [
      {"name": "a/b.py.txt", "source": "a/b.py", "size": 1234, "sha256": "...", "language": "python",
       "date": "2025-01-31"}, ...]}

`name` is relative to the folder, `source` says where the text comes from, `size` is in bytes, `sha256` is of the bytes,
`date` is when it was written or taken.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from datetime import date as calendar_date
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from agreement.corpus.collection import Collection, Selection, counted, matches
from agreement.corpus.folders import new_folder
from agreement.corpus.languages import language_of
from agreement.corpus.listing import list_folder
from agreement.corpus.marked import read_marked
from agreement.errors import CorpusError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agreement.corpus.rules import Rules

FILE_NAME = "manifest.json"
_MARK = "agreement-corpus-manifest"
_VERSION = 1
_NAMES_SHOWN = 3


@dataclass(frozen=True)
class Frozen:
    """One file of a manifest; see the module for the fields."""

    name: str
    source: str
    size: int
    sha256: str
    language: str
    date: str


@dataclass(frozen=True)
class Manifest:
    """A frozen corpus folder: its name and its files, sorted by name."""

    name: str
    files: tuple[Frozen, ...]


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a folder, or None if it has none of ours.

    Raises:
        CorpusError: The manifest is damaged or names a file outside the folder.
    """
    path = folder / FILE_NAME
    content = read_marked(path, _MARK, _VERSION)
    if content is None:
        return None
    try:
        files = tuple(_frozen(entry) for entry in content["files"])
        manifest = Manifest(str(content["name"]), tuple(sorted(files, key=lambda file: file.name)))
    except (KeyError, TypeError, ValueError) as error:
        raise CorpusError(f"{path}: damaged ({error!r}); restore it or freeze the folder again") from error
    if len({file.name for file in files}) != len(files):
        raise CorpusError(f"{path}: a file is listed twice; freeze the folder again")
    return manifest


def _frozen(entry: Any) -> Frozen:
    one = Frozen(**{field.name: entry[field.name] for field in fields(Frozen)})
    for field in fields(Frozen):
        wanted = int if field.name == "size" else str
        if type(getattr(one, field.name)) is not wanted:
            raise TypeError(f"{field.name} of {one.name!r}")
    parts = PurePosixPath(one.name).parts
    if not parts or ".." in parts or PurePosixPath(one.name).is_absolute():
        raise ValueError(f"name {one.name!r} is outside the folder")
    return one


def collect_manifest(folder: Path, manifest: Manifest, into: Collection) -> None:
    """Check every file of a manifest and add it; files that are not listed are recorded as left out.

    Raises:
        CorpusError: A file is missing or not as it was frozen; the message names it.
    """
    listed = {file.name for file in manifest.files}
    for file in manifest.files:
        path = folder / file.name
        _check_frozen(folder, path, file)
        into.add_file(file.name, path, file.language)
    there = list_folder(folder)
    into.skipped += there.skipped
    for name, _ in there.files:
        if name not in listed and name != FILE_NAME:
            into.skip(name, f"not listed in {FILE_NAME}")


def _check_frozen(folder: Path, path: Path, file: Frozen) -> None:
    if not path.resolve().is_relative_to(folder.resolve()):
        raise CorpusError(f"{path}: links to a file outside the corpus folder; restore it or freeze the folder again")
    if not path.is_file():
        raise CorpusError(f"{path}: listed in {FILE_NAME} and missing; restore it or freeze the folder again")
    try:
        size = path.stat().st_size
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if size == file.size else ""
    except OSError as error:
        raise CorpusError(f"{path}: listed in {FILE_NAME} and unreadable ({error.strerror})") from error
    if size != file.size:
        raise CorpusError(f"{path}: {size} bytes, frozen with {file.size}; restore it or freeze the folder again")
    if digest != file.sha256:
        raise CorpusError(
            f"{path}: SHA-256 {digest[:12]}, frozen with {file.sha256[:12]}; restore it or freeze the folder again"
        )


def write_manifest(
    folder: str | Path,
    *,
    source: str | Mapping[str, str],
    date: str | Mapping[str, str],
    name: str | None = None,
    languages: Mapping[str, str] | None = None,
    rules: Rules | None = None,
) -> Path:
    """Freeze a corpus folder: write `manifest.json` over all its files.

    Args:
        folder: The folder; every file in it must be usable text.
        source: Where the texts come from: one for all, or one for each file name.
        date: Day they were written or taken, `YYYY-MM-DD`: one for all, or one for each file name.
        name: Name of the corpus; default the folder's.
        languages: Language for each file name; where none is given, the one its source's name tells, else its own.
        rules: What counts as usable text.

    Returns:
        Path of the manifest. An older one is replaced.

    Raises:
        CorpusError: No text, or a file that is not usable: remove it first.
        UsageError: A date that is none, or a file without source or date.
    """
    root = Path(folder)
    if not root.is_dir():
        raise CorpusError(f"{root}: not a folder; give the folder to freeze")
    into = Collection(Selection(), rules)
    there = list_folder(root)
    into.skipped += there.skipped
    for file_name, path in there.files:
        if file_name != FILE_NAME:
            into.add_file(file_name, path)
    if into.skipped:
        shown = ", ".join(f"{s.name} ({s.reason})" for s in into.skipped[:_NAMES_SHOWN])
        raise CorpusError(f"{root}: {len(into.skipped)} file(s) cannot be frozen: {shown}; remove them first")
    corpus = into.corpus(name or there.name, str(root))
    files = []
    for document in corpus.documents:
        origin = _for_file(source, document.name, "source")
        files.append(
            Frozen(
                name=document.name,
                source=origin,
                size=len(document.text.encode()),
                sha256=document.sha256,
                language=(languages or {}).get(document.name) or language_of(origin) or document.language,
                date=_checked_date(_for_file(date, document.name, "date")),
            )
        )
    return _write(root / FILE_NAME, Manifest(corpus.name, tuple(files)))


def freeze(
    project: str | Path, patterns: Sequence[str], folder: str | Path, *, date: str, name: str | None = None
) -> Path:
    """Copy files of a project into a new corpus folder, as text files, and freeze it.

    `a/b.py` becomes `a/b.py.txt`, so that no tool takes it for code of the project; its `source` stays `a/b.py`.

    Args:
        project: Root of the project.
        patterns: Which files, as glob patterns on the path below the root; see `collection.matches`.
        folder: The corpus folder; must not exist.
        date: Day of the copy, `YYYY-MM-DD`.
        name: Name of the corpus; default the folder's.

    Returns:
        Path of the manifest. The folder appears whole or not at all.

    Raises:
        CorpusError: The folder is there already, no file matches, or one that does is not usable text.
        UsageError: A date that is none.
    """
    root, target = Path(project), Path(folder)
    _checked_date(date)
    chosen = [(found, path) for found, path in list_folder(root).files if matches(found, patterns)]
    if not chosen:
        raise CorpusError(f"{root}: no file matches {', '.join(patterns) or 'an empty list of patterns'}")
    check = Collection(Selection())
    for found, path in chosen:
        check.add_file(found, path)
    if check.skipped:
        first, counts = check.skipped[0], counted(check.skipped)
        raise CorpusError(f"{root}: {sum(counts.values())} file(s) are not usable text, {first.name}: {first.reason}")
    with new_folder(target) as partial:
        for found, _ in chosen:
            copy = partial / f"{found}.txt"
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(check.documents[found].text.encode())
        sources = {f"{found}.txt": found for found, _ in chosen}
        write_manifest(partial, source=sources, date=date, name=name or target.name)
    return target / FILE_NAME


def _for_file(given: str | Mapping[str, str], name: str, what: str) -> str:
    if isinstance(given, str):
        return given
    if name not in given:
        raise UsageError(f"{name}: no {what} given for this file; add it, or give one for all")
    return given[name]


def _checked_date(text: str) -> str:
    try:
        return calendar_date.fromisoformat(text).isoformat()
    except ValueError as error:
        raise UsageError(f"date {text!r}: give a day as YYYY-MM-DD") from error


def _write(path: Path, manifest: Manifest) -> Path:
    content = {
        "format": _MARK,
        "version": _VERSION,
        "name": manifest.name,
        "files": [asdict(file) for file in manifest.files],
    }
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
    return path

"""Specs: a corpus as a TOML file that names texts this machine already has.

    [corpus]
    format = 1
    name = "stdlib"
    kind = "stdlib"                     # the running Python's standard library
    made_on = "CPython 3.11.7"
    files = ["argparse.py", "json/*.py"]

    [sha256]                            # of the texts on `made_on`; another Python has other ones
    "argparse.py" = "..."

The texts differ from one Python version to the next, so a digest that does not match is a note, not an error.
"""

from __future__ import annotations

import json
import platform
import sysconfig
import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from agreement.corpus.collection import Collection, Selection
from agreement.errors import CorpusError

if TYPE_CHECKING:
    from collections.abc import Sequence

_FORMAT = 1
_KINDS = ("stdlib",)
_NAMES_SHOWN = 3


@dataclass(frozen=True)
class Spec:
    """A corpus spec; see the module for the fields.

    Attributes:
        name: Name of the corpus.
        files: Names or glob patterns below the root.
        made_on: The Python the digests are of; empty if the spec has none.
        sha256: Digest by file name.
    """

    name: str
    files: tuple[str, ...]
    made_on: str
    sha256: dict[str, str]


def read_spec(path: Path) -> Spec:
    """Read a spec.

    Raises:
        CorpusError: Not TOML, or not a spec that this version can carry out.
    """
    try:
        content = tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:  # also what tomllib and a wrong encoding raise
        raise CorpusError(f"{path}: not a corpus spec in TOML ({error})") from error
    table = content.get("corpus")
    if not isinstance(table, dict):
        raise CorpusError(f"{path}: no [corpus] table; a .toml file given as a corpus is a corpus spec")
    if table.get("format") != _FORMAT:
        raise CorpusError(f"{path}: format {table.get('format')!r}, this program reads format = {_FORMAT}")
    if table.get("kind") not in _KINDS:
        raise CorpusError(f"{path}: kind {table.get('kind')!r}; known: {', '.join(_KINDS)}")
    files, digests = table.get("files"), content.get("sha256", {})
    if not isinstance(files, list) or not files or not all(isinstance(name, str) for name in files):
        raise CorpusError(f"{path}: files must be a list of file names or patterns")
    for name in files:
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or PurePosixPath(name).is_absolute():
            raise CorpusError(f"{path}: {name!r} is not a name below the standard library's folder")
    if not isinstance(digests, dict) or not all(isinstance(digest, str) for digest in digests.values()):
        raise CorpusError(f"{path}: [sha256] must give one digest a file name")
    return Spec(_text(table, "name") or path.stem, tuple(files), _text(table, "made_on"), digests)


def _text(table: dict[str, Any], key: str) -> str:
    return str(table.get(key, ""))


def stdlib_root() -> Path:
    """Return the folder of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def this_python() -> str:
    """Return e.g. `CPython 3.11.7`."""
    return f"{platform.python_implementation()} {platform.python_version()}"


def collect_spec(spec: Spec, into: Collection) -> None:
    """Add the files a spec names, and note where they are not those it was made on."""
    root = stdlib_root()
    names: set[str] = set()
    for pattern in spec.files:
        found = {path.relative_to(root).as_posix() for path in root.glob(pattern) if path.is_file()}
        if not found:
            into.skip(pattern, f"missing: not in the standard library of {this_python()}")
        names |= found
    for name in sorted(names):
        into.add_file(name, root / name)
    known = [document for name, document in into.documents.items() if name in spec.sha256]
    other = [document.name for document in known if document.sha256 != spec.sha256[document.name]]
    if other:
        more = f" and {len(other) - _NAMES_SHOWN} more" if len(other) > _NAMES_SHOWN else ""
        into.notes.append(
            f"{len(other)} of {len(known)} files are not as on {spec.made_on or 'the Python this spec was made on'}"
            f" (this is {this_python()}): {', '.join(other[:_NAMES_SHOWN])}{more}"
        )


def write_stdlib_spec(path: str | Path, files: Sequence[str], *, name: str = "stdlib") -> None:
    """Write a spec of standard library files with the digests of the running Python.

    Raises:
        CorpusError: A file is not there or not usable text.
    """
    into = Collection(Selection())
    collect_spec(Spec(name, tuple(files), "", {}), into)
    if into.skipped:
        first = into.skipped[0]
        raise CorpusError(f"{first.name}: {first.reason}; leave it out of the spec")
    corpus = into.corpus(name, str(path))
    lines = [
        "# Standard library files, named and not copied. Digests are of the Python named below.",
        "[corpus]",
        f"format = {_FORMAT}",
        f"name = {json.dumps(name)}",
        f"kind = {json.dumps(_KINDS[0])}",
        f"made_on = {json.dumps(this_python())}",
        "files = [",
        *(f"    {json.dumps(file)}," for file in sorted(files)),
        "]",
        "",
        "[sha256]",
        *(f"{json.dumps(document.name)} = {json.dumps(document.sha256)}" for document in corpus.documents),
    ]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")

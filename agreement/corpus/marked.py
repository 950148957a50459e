"""Marked JSON files: `manifest.json` and `corpus.json` of this package, told from others of the same name.

Many folders have a `manifest.json` of their own (web applications do), so a file is ours only if it says so under
`format`, with a version this package reads.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from agreement.errors import CorpusError

if TYPE_CHECKING:
    from pathlib import Path


def read_marked(path: Path, mark: str, version: int) -> dict[str, Any] | None:
    """Return the content of a marked file, or None if there is none or it is somebody else's.

    Args:
        path: The file.
        mark: Value of its `format`.
        version: Highest value of its `version` that can be read.

    Raises:
        CorpusError: The file cannot be read, bears the mark and is damaged, or is of a later version.
    """
    if not path.is_file():
        return None
    try:
        data = path.read_bytes()
    except OSError as error:  # read as an ordinary folder, its files would go unchecked
        raise CorpusError(f"{path}: cannot be read ({error.strerror}); make it readable") from error
    ours = f'"{mark}"'.encode() in data
    try:
        content = json.loads(data)
    except ValueError as error:
        if ours:
            raise CorpusError(f"{path}: damaged ({error}); restore it or build the corpus again") from error
        return None
    if not isinstance(content, dict) or content.get("format") != mark:
        return None
    found = content.get("version")
    if not isinstance(found, int) or not 1 <= found <= version:
        raise CorpusError(f"{path}: version {found!r}, this program reads up to {version}; use a newer one")
    return content

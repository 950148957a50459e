"""Rules: which bytes are usable text, and if not, the reason.

In: the bytes of one file.  Out: its text, or `Unusable` with a reason that starts with its kind, a colon and details.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import PurePosixPath

from agreement.corpus.languages import language_of
from agreement.errors import UsageError

# A comment that says so belongs to the head of a file; further down it may be what the file is about.
_HEAD_LINES = 10
_GENERATED = re.compile(
    r"@gen"
    r"erated\b|\bDO NOT "
    r"EDIT\b|\bCode gen"
    r"erated by\b"  # split, so that this file is not one itself
    r"|(?i:\bauto(?:matically |-| )?gen"
    r"erated (?:by|from|file)\b|\bfile (?:is|was) auto(?:matically |-)?generated\b)"
)
_LOCK_FILES = frozenset(
    {
        "cargo.lock",
        "composer.lock",
        "go.sum",
        "package-lock.json",
        "pnpm-lock.yaml",
        "poetry.lock",
        "uv.lock",
        "yarn.lock",
    }
)
_MINIFIED_NAME = re.compile(r"\.min\.(?:c|m)?(?:js|css|html)$")
_MINIFIED_LANGUAGES = frozenset({"javascript", "css", "html"})
_MINIFIED_MEAN_LINE = 300  # characters; hand-written lines of these languages average below 60
_MINIFIED_MIN_SIZE = 1_000  # characters; a short one-liner is no proof


class Unusable(Exception):  # noqa: N818  # not an error: an answer with a reason
    """A source is not usable text; the message is the reason."""


@dataclass(frozen=True)
class Rules:
    """Limits of what is taken as text.

    Attributes:
        max_bytes: Largest file in bytes.
        max_line: Longest line in characters.
        keep_generated: Take files that say they are generated, minified files and lock files.
    """

    max_bytes: int = 5_000_000
    max_line: int = 5_000
    keep_generated: bool = False

    def __post_init__(self) -> None:
        """Refuse limits that would leave nothing."""
        for name in ("max_bytes", "max_line"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: give at least 1")


# What was named by the user, one file or rows of a data set, is meant: only what cannot be text at all is refused.
AS_GIVEN = Rules(max_bytes=sys.maxsize, max_line=sys.maxsize, keep_generated=True)


def check_size(size: int, rules: Rules) -> None:
    """Raise `Unusable` for a file of more than `rules.max_bytes` bytes."""
    if size > rules.max_bytes:
        raise Unusable(f"too large: {size} bytes, limit {rules.max_bytes}")


def decode(data: bytes) -> str:
    """Return the text of a file, newlines and a byte order mark as they are.

    Raises:
        Unusable: A NUL byte, or bytes that are not UTF-8.
    """
    nul = data.find(b"\0")
    if nul >= 0:
        raise Unusable(f"binary: NUL byte at offset {nul}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unusable(f"not UTF-8: byte {data[error.start]:#04x} at offset {error.start}") from error


def check_text(name: str, text: str, rules: Rules) -> None:
    """Raise `Unusable` for text that is empty, generated, or has too long a line."""
    if not text.strip("\ufeff \t\r\n\f\v"):
        raise Unusable("empty")
    if not rules.keep_generated:
        _check_generated(name, text)
    longest = max(len(line) for line in text.split("\n"))
    if longest > rules.max_line:
        raise Unusable(f"line too long: {longest} characters, limit {rules.max_line}")


def _check_generated(name: str, text: str) -> None:
    base = PurePosixPath(name.lower()).name
    if base in _LOCK_FILES:
        raise Unusable("generated: a lock file")
    if _MINIFIED_NAME.search(base) or (
        language_of(name) in _MINIFIED_LANGUAGES
        and len(text) >= _MINIFIED_MIN_SIZE
        and len(text) / (text.count("\n") + 1) > _MINIFIED_MEAN_LINE
    ):
        raise Unusable("generated: minified")
    for number, line in enumerate(text.split("\n", _HEAD_LINES)[:_HEAD_LINES], start=1):
        found = _GENERATED.search(line)
        if found:
            raise Unusable(f"generated: {found[0]!r} in line {number}")

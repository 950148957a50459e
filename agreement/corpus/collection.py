"""Collection: sources one after the other, kept or left out with a reason, then a `Corpus`."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from agreement.corpus.languages import language_of
from agreement.corpus.rules import AS_GIVEN, Rules, Unusable, check_size, check_text, decode
from agreement.errors import CorpusError, UsageError
from agreement.records import Corpus, Document, Skipped

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

_FORMAT = b"agreement-corpus-1\n"
# How the reasons begin of what the selection leaves out.
_NOT_INCLUDED, _EXCLUDED, _OTHER_LANGUAGE = "not included", "excluded", "other language"
_NAMES_SHOWN = 3


@dataclass(frozen=True)
class Selection:
    """Which of the usable documents are wanted.

    Attributes:
        include: Glob patterns; a document must match one of them. Empty for all.
        exclude: Glob patterns; a document that matches one of them is left out.
        languages: Languages wanted, as `language_of` names them. Empty for all.
        n_documents: How many documents at most, drawn with `seed`; None for all.
        seed: Seed of that draw.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()
    n_documents: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse a count that leaves nothing."""
        if self.n_documents is not None and self.n_documents < 1:
            raise UsageError(f"{self.n_documents} documents: give at least 1, or leave it out for all")


@dataclass
class Collection:
    """A corpus being put together.

    Attributes:
        selection: Which documents are wanted.
        rules: What counts as usable text; None for `Rules()` on files and `AS_GIVEN` on rows of a data set.
        documents: Taken so far, by name.
        skipped: Left out so far.
        notes: Remarks so far.
    """

    selection: Selection
    rules: Rules | None = None
    documents: dict[str, Document] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _by_digest: dict[str, str] = field(default_factory=dict)

    def skip(self, name: str, reason: str) -> None:
        """Record a source that is not used."""
        self.skipped.append(Skipped(name, reason))

    def add_file(self, name: str, path: Path, language: str | None = None) -> None:
        """Read a file and take it, or record why not."""
        try:
            language = language_of(name) if language is None else language
            self._check_wanted(name, language)
            rules = self.rules or Rules()
            self._add(name, _read(path, rules), language, rules)
        except Unusable as reason:
            self.skip(name, str(reason))

    def add_text(self, name: str, text: str, language: str) -> None:
        """Take a text, or record why not."""
        try:
            self._check_wanted(name, language)
            self._add(name, decode(text.encode()), language, self.rules or AS_GIVEN)
        except Unusable as reason:
            self.skip(name, str(reason))

    def _check_wanted(self, name: str, language: str) -> None:
        wanted = self.selection
        if wanted.include and not matches(name, wanted.include):
            raise Unusable(f"{_NOT_INCLUDED}: matches no pattern given")
        if matches(name, wanted.exclude):
            raise Unusable(f"{_EXCLUDED}: matches a pattern given")
        if wanted.languages and language not in wanted.languages:
            raise Unusable(f"{_OTHER_LANGUAGE}: {language or 'unknown'}")

    def _add(self, name: str, text: str, language: str, rules: Rules) -> None:
        check_text(name, text, rules)
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digest in self._by_digest:
            raise Unusable(f"duplicate: same text as {self._by_digest[digest]}")
        if name in self.documents:
            raise CorpusError(f"two documents are named {name!r}; give each its own name")
        self._by_digest[digest] = name
        self.documents[name] = Document(name, text, language, digest)

    def _why_none(self) -> str:
        """Say why there is no document: what the selection left out and what there was, else the other reasons."""
        counts = counted(self.skipped)
        wanted, parts = self.selection, []
        if n := counts.pop(_NOT_INCLUDED, 0):
            parts.append(f"{n} match no --include {shlex.join(wanted.include)} ({self._examples(_NOT_INCLUDED)})")
        if n := counts.pop(_EXCLUDED, 0):
            parts.append(f"{n} match --exclude {shlex.join(wanted.exclude)} ({self._examples(_EXCLUDED)})")
        if n := counts.pop(_OTHER_LANGUAGE, 0):
            found = Counter(s.reason.partition(": ")[2] for s in self.skipped if s.reason.startswith(_OTHER_LANGUAGE))
            there = ", ".join(f"{m} {language}" for language, m in sorted(found.items(), key=lambda f: (-f[1], f[0])))
            parts.append(f"{n} are not --language {shlex.join(wanted.languages)} (there are {there})")
        others = [f"{n} {kind}" for kind, n in counts.items()]
        if parts:
            return f"no document is left: {'; '.join([*parts, *others])}; change what is asked for"
        seen = f"{len(self.skipped)} left out: {', '.join(others)}" if others else "nothing there"
        return f"no usable text ({seen}); give UTF-8 text files"

    def _examples(self, reason: str) -> str:
        names = sorted(s.name for s in self.skipped if s.reason.startswith(reason))
        return "such as " + ", ".join(names[:_NAMES_SHOWN])

    def corpus(self, name: str, where: str) -> Corpus:
        """Return the documents taken, sorted by name, as a corpus.

        Args:
            name: Name of the corpus.
            where: The source as the user gave it, for the message.

        Raises:
            CorpusError: There is none.
        """
        documents = sorted(self.documents.values(), key=lambda document: document.name)
        if not documents:
            raise CorpusError(f"{where}: {self._why_none()}")
        limit = self.selection.n_documents
        if limit is not None and limit < len(documents):
            seed = self.selection.seed
            drawn = sorted(documents, key=lambda d: hashlib.sha256(json.dumps([seed, d.name]).encode()).digest())
            self.notes.append(f"{limit} of {len(documents)} documents drawn with seed {seed}")
            documents = sorted(drawn[:limit], key=lambda document: document.name)
        elif limit is not None and limit > len(documents):
            self.notes.append(f"{limit} documents asked for, {len(documents)} there: all are used")
        skipped = sorted(self.skipped, key=lambda s: (s.name, s.reason))
        return build(name, documents, skipped, self.notes)


def build(
    name: str, documents: Sequence[Document], skipped: Sequence[Skipped] = (), notes: Sequence[str] = ()
) -> Corpus:
    """Return a corpus of `documents` in the order given, with its fingerprint."""
    digest = fingerprint((document.name, document.sha256) for document in documents)
    return Corpus(name, tuple(documents), tuple(skipped), digest, tuple(notes))


def fingerprint(names_and_digests: Iterable[tuple[str, str]]) -> str:
    """Return the SHA-256 over a format line and a JSON list of `[name, text digest]` in order."""
    listed = json.dumps([list(pair) for pair in names_and_digests], separators=(",", ":"))
    return hashlib.sha256(_FORMAT + listed.encode()).hexdigest()


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Say whether a name matches a shell pattern; `*` also crosses `/`, and without `/` the last part is enough."""
    base = name.rsplit("/", 1)[-1]
    return any(
        fnmatchcase(name, pattern) or ("/" not in pattern and fnmatchcase(base, pattern)) for pattern in patterns
    )


def counted(skipped: Iterable[Skipped]) -> dict[str, int]:
    """Return how many sources were left out for each kind of reason, the most frequent first."""
    counts = Counter(one.reason.partition(":")[0] for one in skipped)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _read(path: Path, rules: Rules) -> str:
    try:
        check_size(path.stat().st_size, rules)
        data = path.read_bytes()
    except OSError as error:
        raise Unusable(f"unreadable: {error.strerror or error}") from error
    return decode(data)

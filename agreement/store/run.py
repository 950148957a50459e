"""A run directory: what was run, the chunks, the baseline's recording and each setting's scores.

```
NAME/
  run.json                      format version, identity, settings, state of each pass
  chunks.agr                    token windows, targets, clusters
  baseline/chunk-000000.agr     one file a chunk
  settings/experts=6/chunk-...  one file a chunk
  report.json                   what the table and the gate read
  engine.log  timings.jsonl     volatile: not part of what a resumed run reproduces
```

In: identity, chunks and scores as plain values and arrays.  Out: the same, checked, or a `StoreError`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from agreement.errors import IdentityError, StoreError
from agreement.store.arrays import Arrays, array_names, read_arrays, write_arrays, write_file

FORMAT = "agreement-run"
FORMAT_VERSION = 1
BASELINE_PASS = "baseline"  # noqa: S105  # a pass over the corpus, not a password
CHUNKS_FILE = "chunks.agr"
RUN_FILE = "run.json"
TIMINGS_FILE = "timings.jsonl"
# What a run that was killed before it began may have left.
_BEFORE_A_RUN = frozenset(
    {"lock", "engine.log", TIMINGS_FILE, CHUNKS_FILE, f"{CHUNKS_FILE}.partial", f"{RUN_FILE}.partial"}
)
LOCK_WAIT_SECONDS = 3.0  # a killed run's worker needs a moment to let go of the lock it inherited


def pass_folder(name: str) -> str:
    """Return the folder of a pass inside a run; names are kept readable and made safe for any file system."""
    if name == BASELINE_PASS:
        return BASELINE_PASS
    return "settings/" + quote(name, safe="=,+")


class RunStore:
    """One run directory, opened.

    Attributes:
        path: The directory.
        header: The content of `run.json`: `identity`, `about`, `settings` (names in order) and `passes`.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path = path
        self.header = header

    @classmethod
    def create(
        cls, path: Path, identity: dict[str, Any], about: dict[str, Any], chunks: tuple[Arrays, dict[str, Any]]
    ) -> RunStore:
        """Make a run directory with its chunks and, last of all, its `run.json`: with that it is a run.

        Raises:
            StoreError: There is a run at `path` already, something else is in the way, or it cannot be written.
        """
        if (path / RUN_FILE).exists():
            raise StoreError(f"{path} already holds a run; continue it with --resume or choose another -o")
        refuse_foreign(path)
        store = cls(path, {"identity": identity, "about": about, "settings": [], "passes": {}})
        make_folder(path)
        arrays, meta = chunks
        write_arrays(path / CHUNKS_FILE, arrays, meta, durable=True)
        store.save_header()
        return store

    @classmethod
    def open(cls, path: Path) -> RunStore:
        """Open an existing run.

        Raises:
            StoreError: No run there, a damaged `run.json`, or another format version.
        """
        file = path / RUN_FILE
        try:
            header = json.loads(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise StoreError(f"{path} is not a run directory (no run.json); make one with `agreement sweep`") from None
        except (OSError, ValueError) as error:
            raise StoreError(f"{file} cannot be read ({error}); record the run again") from error
        if not isinstance(header, dict) or header.pop("format", None) != FORMAT:
            raise StoreError(f"{file} is not a run of agreement")
        version = header.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise StoreError(
                f"{file} has format version {version}, this program reads {FORMAT_VERSION}; record it again"
            )
        missing = {"identity", "about", "settings", "passes"} - header.keys()
        if missing:
            raise StoreError(f"{file} lacks {min(missing)!r}; record the run again")
        _check_header(file, header)
        return cls(path, header)

    def save_header(self) -> None:
        """Write `run.json`: the same content gives the same bytes."""
        data = {"format": FORMAT, "format_version": FORMAT_VERSION, **self.header}
        text = json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        write_file(self.path / RUN_FILE, text.encode(), durable=True)

    def has_any_chunk(self) -> bool:
        """Say whether any pass has left a chunk."""
        return any(True for _ in self.path.glob("*/chunk-*")) or any(True for _ in self.path.glob("*/*/chunk-*"))

    def discard(self) -> None:
        """Take back a run that has no chunk yet, so that another can be made in its place; log and timings stay."""
        for name in (RUN_FILE, CHUNKS_FILE):
            (self.path / name).unlink(missing_ok=True)
        folders = sorted((p for p in self.path.rglob("*") if p.is_dir()), reverse=True)
        for folder in folders:
            with contextlib.suppress(OSError):  # not empty: not ours
                folder.rmdir()

    def require_identity(self, identity: dict[str, Any], *, ignore: tuple[str, ...] = ()) -> None:
        """Refuse to go on if something differs that must be equal.

        Raises:
            IdentityError: Names the first field that differs, with both values.
        """
        ours, theirs = dict(_flatten(self.header["identity"])), dict(_flatten(identity))
        # Fields that a person gave come before digests and lists of what followed from them.
        for field in sorted(ours.keys() | theirs.keys(), key=lambda f: (f.endswith("fingerprint") or " " in f, f)):
            if field.split(".")[0] in ignore or ours.get(field) == theirs.get(field):
                continue
            raise IdentityError(
                f"{self.path} was recorded with {field} = {ours.get(field)}, now it is {theirs.get(field)}; "
                "use the same, or start a new run with another -o"
            )

    @contextlib.contextmanager
    def lock(self) -> Iterator[int]:
        """Hold the run for writing; yields the lock's file descriptor, for a worker process to inherit.

        Raises:
            StoreError: Another process holds it.
        """
        make_folder(self.path)
        with lock_file(self.path / ".lock", f"{self.path} is in use by another process") as descriptor:
            yield descriptor

    def chunk_path(self, pass_name: str, index: int) -> Path:
        """Return the file of one chunk of one pass."""
        return self.path / pass_folder(pass_name) / f"chunk-{index:06d}.agr"

    def has_chunk(self, pass_name: str, index: int) -> bool:
        """Say whether that chunk is there; files appear only whole."""
        return self.chunk_path(pass_name, index).exists()

    def write_chunk(self, pass_name: str, index: int, arrays: Arrays, meta: dict[str, Any]) -> None:
        """Write one chunk of one pass."""
        path = self.chunk_path(pass_name, index)
        make_folder(path.parent)
        write_arrays(path, arrays, {"pass": pass_name, "chunk": index, **meta})

    def read_chunk(
        self, pass_name: str, index: int, names: tuple[str, ...] | None = None
    ) -> tuple[Arrays, dict[str, Any]]:
        """Read one chunk of one pass; see `read_arrays`.

        Raises:
            StoreError: It is missing, damaged, or belongs to another pass or chunk.
        """
        path = self.chunk_path(pass_name, index)
        arrays, meta = read_arrays(path, names)
        if (meta.get("pass"), meta.get("chunk")) != (pass_name, index):
            raise StoreError(f"{path} holds chunk {meta.get('chunk')} of {meta.get('pass')}; delete it and --resume")
        return arrays, meta

    def array_names(self, pass_name: str, index: int) -> tuple[str, ...]:
        """Return the names of the arrays of one chunk of one pass."""
        return array_names(self.chunk_path(pass_name, index))

    def read_chunks(self) -> tuple[Arrays, dict[str, Any]]:
        """Read the token windows of the run."""
        return read_arrays(self.path / CHUNKS_FILE)

    def finish_pass(self, pass_name: str, facts: dict[str, Any]) -> None:
        """Note in `run.json` that a pass is complete, with what the engine proved."""
        self.header["passes"][pass_name] = facts
        self.save_header()

    @property
    def n_chunks(self) -> int:
        """Chunks of a whole pass."""
        n: int = self.header["identity"].get("chunks", {}).get("n_chunks", 0)
        return n

    def is_finished(self, pass_name: str) -> bool:
        """Say whether `run.json` calls the pass complete, and no chunk of it has been taken away since."""
        return pass_name in self.header["passes"] and all(self.has_chunk(pass_name, i) for i in range(self.n_chunks))

    def require_chunks(self, pass_name: str) -> None:
        """Refuse a pass that `run.json` calls complete and of which chunks have been taken away since.

        Raises:
            StoreError: Names the first file that is missing.
        """
        missing = [i for i in range(self.n_chunks) if not self.has_chunk(pass_name, i)]
        if missing and pass_name in self.header["passes"]:
            more = f", and {len(missing) - 1} more of {pass_name}" if len(missing) > 1 else ""
            raise StoreError(
                f"{self.chunk_path(pass_name, missing[0])} is missing{more}; run again with --resume to record it"
            )

    def verify(self, pass_name: str, *, contents: bool = False) -> None:
        """Check every chunk file of a complete pass: there, whole, of this pass and chunk, its header intact.

        Reads a few kilobytes a file, however large it is; bytes that changed inside an array are found only with
        `contents`, which reads everything and compares the hashes.

        Raises:
            StoreError: Names the first file that is missing or damaged, and how many more are.
        """
        found: list[StoreError] = []
        for index in range(self.n_chunks):
            try:
                self.read_chunk(pass_name, index, None if contents else ())
            except StoreError as error:
                found.append(error)
        if found:
            more = f" ({len(found) - 1} more of {pass_name} are missing or damaged)" if len(found) > 1 else ""
            raise StoreError(f"{found[0]}{more}") from found[0]

    def write_report(self, data: dict[str, Any]) -> None:
        """Write `report.json`; keys keep their order, which is the order in which a report shows its facts."""
        text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        write_file(self.path / "report.json", text.encode(), durable=True)

    def read_report(self) -> dict[str, Any]:
        """Read `report.json`.

        Raises:
            StoreError: There is none, or it is damaged.
        """
        return read_json(self.path / "report.json", "no report yet; finish the run with --resume", "run with --resume")

    def add_timing(self, entry: dict[str, Any]) -> None:
        """Append one line to `timings.jsonl`.

        Raises:
            StoreError: The file system refuses.
        """
        file = self.path / TIMINGS_FILE
        try:
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(entry, sort_keys=True) + "\n")
        except OSError as error:
            raise StoreError(f"cannot write {file}: {error.strerror or error}; free space, then --resume") from error

    def read_timings(self) -> list[dict[str, Any]]:
        """Return the whole lines of `timings.jsonl`; a line cut short by a kill is passed over."""
        try:
            lines = (self.path / TIMINGS_FILE).read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        entries = []
        for line in lines:
            with contextlib.suppress(ValueError):
                entries.append(json.loads(line))
        return entries


def _check_header(file: Path, header: dict[str, Any]) -> None:
    """Refuse a `run.json` whose parts are not of their kinds."""
    for field, kind in (("identity", dict), ("about", dict), ("settings", list), ("passes", dict)):
        if not isinstance(header[field], kind):
            raise StoreError(f"{file} is damaged: {field} is {header[field]!r:.40}; record the run again")
    chunks = header["identity"].get("chunks", {})
    n_chunks = chunks.get("n_chunks", 0) if isinstance(chunks, dict) else chunks
    if not isinstance(chunks, dict) or not isinstance(n_chunks, int) or n_chunks < 0:
        raise StoreError(f"{file} is damaged: n_chunks is {n_chunks!r:.40}; record the run again")
    for name in header["settings"]:
        if not isinstance(name, str):
            raise StoreError(f"{file} is damaged: a setting is named {name!r:.40}; record the run again")


def refuse_foreign(path: Path) -> None:
    """Refuse a path where something else than a run lies.

    Raises:
        StoreError: A file, or a folder with anything in it that no run leaves behind.
    """
    if not path.exists() or (path / RUN_FILE).exists():
        return
    if not path.is_dir() or any(p.name.lstrip(".") not in _BEFORE_A_RUN for p in path.iterdir()):
        raise StoreError(f"{path} exists and is not a run directory; choose another -o")


def read_json(path: Path, when_missing: str, advice: str = "make it again") -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        StoreError: The file is missing (with `when_missing`), unreadable or not an object (with `advice`).
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(f"{path}: {when_missing}") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error.strerror or error}); {advice}") from error
    except ValueError as error:  # also what bytes that are no UTF-8 raise
        raise StoreError(f"{path} is not JSON ({error}); {advice}") from error
    if not isinstance(data, dict):
        raise StoreError(f"{path} is not a JSON object; {advice}")
    return data


@contextlib.contextmanager
def lock_file(path: Path, message: str) -> Iterator[int]:
    """Hold an exclusive lock on `path`, which is created if need be.

    Raises:
        StoreError: Another process holds it (with `message`), or the file system refuses.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StoreError(f"cannot lock {path}: {error.strerror or error}; choose another place") from error
    try:
        deadline = time.monotonic() + LOCK_WAIT_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StoreError(f"{message}; wait for it to end") from None
                time.sleep(0.05)
        yield descriptor
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder with its parents.

    Raises:
        StoreError: The file system refuses.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot make {path}: {error.strerror or error}; choose another place") from error


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value

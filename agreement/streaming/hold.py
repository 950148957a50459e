"""Hold part of a model file in memory: its pages stay while everything else comes and goes.

In: a model and how many bytes to hold.  Out: `Hold`, a context manager whose pages are locked until it closes.

A prompt pass over a model larger than memory goes round the file, and the page cache drops each page just before it is
needed again.  Locked pages are not dropped, and the engine's own mapping of the file finds them in the cache: its
numbers are the same, it only waits less.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from agreement.errors import ModelFileError
from agreement.model_file import size_text
from agreement.model_file.header import Tensor
from agreement.model_file.shards import read_shards
from agreement.records import ModelFile

_STEP = 32 << 20  # bytes locked at a time: how far a limit may be overshot before it is looked at again
_CAP_IPC_LOCK = 14  # its bit in `CapEff`, see linux/capability.h
_TRY_LESS = (errno.ENOMEM, errno.EAGAIN)  # over RLIMIT_MEMLOCK, or no page to be had
_ROUTED = "_exps."
_EMBEDDING = "token_embd."


@dataclass(frozen=True)
class Span:
    """Bytes `[start, stop)` of a file."""

    path: str
    start: int
    stop: int

    @property
    def n_bytes(self) -> int:
        """Its length."""
        return self.stop - self.start


def hold_order(model: ModelFile) -> tuple[Span, ...]:
    """Return the model's bytes in the order in which holding them helps most.

    First what every token reads, then the routed experts, both in the file's order; the token embedding comes last,
    since of it only the rows of the tokens at hand are read.  (A model whose output layer is the embedding reads all
    of it, so there it counts as the first kind.)  Among experts the order does not matter: a pass goes round all of
    them and gains in proportion to what is held.

    Raises:
        ModelFileError: The file cannot be read.
    """
    headers = read_shards(model.path)
    has_output = any(t.name == "output.weight" for h in headers for t in h.tensors)

    def rank(tensor: Tensor) -> int:
        if _ROUTED in tensor.name:
            return 1
        return 2 if has_output and tensor.name.startswith(_EMBEDDING) else 0

    ranked = sorted(
        ((rank(t), i, t.start, t.n_bytes) for i, h in enumerate(headers) for t in h.tensors if t.n_bytes),
    )
    spans: list[Span] = []
    for _, shard, start, n_bytes in ranked:
        path = headers[shard].path
        if spans and spans[-1].path == path and 0 <= start - spans[-1].stop < mmap.PAGESIZE:
            spans[-1] = Span(path, spans[-1].start, start + n_bytes)
        else:
            spans.append(Span(path, start, start + n_bytes))
    return tuple(spans)


def lock_allowance(status: Path = Path("/proc/self/status"), uid_map: Path = Path("/proc/self/uid_map")) -> int | None:
    """Return how many bytes this process may lock: None for no limit, 0 where the system offers no locking.

    Root and holders of CAP_IPC_LOCK may lock everything, others as much as RLIMIT_MEMLOCK says (`ulimit -l`).

    Args:
        status: File that shows the capabilities; another one in tests.
        uid_map: File that shows the user namespace: the right counts only in the machine's own, not for the root of a
            container without privileges.
    """
    if sys.platform == "win32":
        return 0
    import resource  # noqa: PLC0415  # not there on Windows

    if _may_lock_all(status) and _in_first_namespace(uid_map):
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    largest = hard if hard == resource.RLIM_INFINITY else max(soft, hard)  # the soft one may be raised to the hard one
    return None if largest == resource.RLIM_INFINITY else largest


def _may_lock_all(status: Path) -> bool:
    try:
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    masks = [line.split()[1] for line in lines if line.startswith("CapEff:")]
    return bool(masks) and bool(int(masks[0], 16) >> _CAP_IPC_LOCK & 1)


def _in_first_namespace(uid_map: Path) -> bool:
    try:
        fields = uid_map.read_text(encoding="ascii", errors="replace").split()
    except OSError:  # a kernel without user namespaces
        return True
    return fields == ["0", "0", "4294967295"]


class Hold:
    """Locks up to `n_bytes` of `spans`, in their order, until closed.

    Locking reads what is not in memory yet, so it costs one reading of what is held, once.  Where the system refuses,
    what could be locked stays locked and `note` says what is missing and what it would have saved.

    Args:
        spans: From `hold_order`.
        n_bytes: How much to hold; 0 holds nothing.
        room: Asked before each step for the bytes that may still be taken; the hold stops where a step would leave
            less than `keep_free`.  A memory limit that shrank meanwhile so makes a smaller hold, not a killed process.
        keep_free: Bytes to leave.

    Attributes:
        asked: Bytes asked for.
        held: Bytes locked now.
        note: One line, empty if all of it is held.

    Raises:
        ModelFileError: A file cannot be opened.
    """

    def __init__(
        self,
        spans: tuple[Span, ...],
        n_bytes: int,
        *,
        room: Callable[[], int] | None = None,
        keep_free: int = 0,
    ) -> None:
        self.asked, self.held, self.note = n_bytes, 0, ""
        self._maps: dict[str, _Mapping] = {}
        self._steps: list[tuple[_Mapping, int, int]] = []
        try:
            self._lock(spans, n_bytes, room, keep_free)
        except BaseException:
            self.close()
            raise

    def _lock(self, spans: tuple[Span, ...], n_bytes: int, room: Callable[[], int] | None, keep_free: int) -> None:
        allowance = lock_allowance()
        if allowance is not None:
            _raise_soft_limit()
        for span in _pieces(spans, n_bytes):
            if room is not None and room() < keep_free + span.n_bytes:
                self.note = self._missing("the memory that may be used has become less")
                return
            mapping = self._maps.get(span.path) or _Mapping(span.path)
            self._maps[span.path] = mapping
            error = mapping.lock(span.start, span.n_bytes)
            if error:
                advice = "" if allowance is None else "; raise `ulimit -l` or run as root"
                reason = "not enough memory" if error in _TRY_LESS and allowance is None else os.strerror(error)
                self.note = self._missing(f"{reason}{advice}")
                return
            self._steps.append((mapping, span.start, span.n_bytes))
            self.held += span.n_bytes

    def _missing(self, reason: str) -> str:
        left = size_text(self.asked - self.held)
        return (
            f"held {size_text(self.held)} of {size_text(self.asked)} ({reason}); "
            f"every reading of the weights takes up to {left} more from disk than planned"
        )

    def shrink(self, n_bytes: int) -> int:
        """Let go of the last locked steps until at most `n_bytes` are held; return the bytes let go."""
        before = self.held
        while self._steps and self.held > n_bytes:
            mapping, start, length = self._steps.pop()
            mapping.unlock(start, length)
            self.held -= length
        return before - self.held

    def close(self) -> None:
        """Let go of everything; pages stay in the page cache until the kernel wants them."""
        self.shrink(0)
        for mapping in self._maps.values():
            mapping.close()
        self._maps.clear()

    def __enter__(self) -> Self:
        """Return the hold; it is locked already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let go."""
        self.close()


def _pieces(spans: tuple[Span, ...], n_bytes: int) -> Iterator[Span]:
    """Cut the first `n_bytes` of `spans` in whole pages and steps.

    A span's last page is taken whole, as far as its file may go: `mlock` does so anyway.  Its first page is left to
    the span before it.
    """
    page, left = mmap.PAGESIZE, n_bytes
    for span in spans:
        start = span.start // page * page
        stop = -(-span.stop // page) * page
        while start < stop and left >= page:
            length = min(_STEP, stop - start, left // page * page)
            yield Span(span.path, start, start + length)
            start += length
            left -= length
        if left < page:
            return


def _raise_soft_limit() -> None:
    """Raise this process's soft RLIMIT_MEMLOCK to its hard one, which needs no right."""
    if sys.platform == "win32":
        return
    import resource  # noqa: PLC0415  # not there on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))


class _Mapping:
    """A file mapped for reading, and `mlock` on parts of it."""

    def __init__(self, path: str) -> None:
        try:
            with open(path, "rb") as file:  # noqa: PTH123  # paths travel as text in the records
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ModelFileError(f"{path}: cannot be held in memory ({reason})") from error
        # A read-only mapping has no address through ctypes' buffers; an array over it knows its own.
        self._view: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = np.frombuffer(self._map, np.uint8)
        self._address = int(self._view.ctypes.data)
        self._libc = ctypes.CDLL(None, use_errno=True) if sys.platform != "win32" else None

    def lock(self, start: int, length: int) -> int:
        """Lock bytes; return 0, or the number of the error."""
        return self._call("mlock", start, length)

    def unlock(self, start: int, length: int) -> int:
        """Let go of bytes; return 0, or the number of the error."""
        return self._call("munlock", start, length)

    def _call(self, name: str, start: int, length: int) -> int:
        if self._libc is None:
            return errno.ENOSYS
        function = getattr(self._libc, name)
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        function.restype = ctypes.c_int
        return 0 if function(self._address + start, length) == 0 else ctypes.get_errno()

    def close(self) -> None:
        self._view = None
        self._map.close()

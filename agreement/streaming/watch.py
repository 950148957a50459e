"""While a pass runs: let go of held weights as soon as memory becomes tight.

In: what is held, and a function that tells the memory still to be had.  Out: fewer bytes held, and a note.

The plan leaves room for an error of its own, but a control group's limit may be lowered meanwhile, another process may
take memory, or activations may be larger than the engine said.  Held pages are the one thing that can be given back at
once and costs only reading.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from agreement.model_file import size_text

_INTERVAL = 0.1  # seconds: memory fills at some hundred megabytes a second while a micro-batch begins


class Shrinkable(Protocol):
    """What `RoomWatch` needs of a `Hold`."""

    held: int

    def shrink(self, n_bytes: int) -> int:
        """Keep at most `n_bytes`; return the bytes let go."""
        ...


class RoomWatch:
    """Looks ten times a second, in a thread of its own, for as long as it is entered.

    Args:
        hold: What may be let go of.
        room: Returns the bytes that may still be taken.
        least: Below so many, what is missing to `enough` is let go.
        enough: Bytes that are enough again.
        interval: Seconds between two looks.

    Attributes:
        let_go: Bytes let go so far.
    """

    def __init__(
        self,
        hold: Shrinkable,
        room: Callable[[], int],
        *,
        least: int,
        enough: int,
        interval: float = _INTERVAL,
    ) -> None:
        self.let_go = 0
        self._hold, self._room, self._least, self._enough = hold, room, least, enough
        self._interval = interval
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory watch", daemon=True)

    def look(self) -> None:
        """Look once."""
        room = self._room()
        if self._hold.held and room < self._least:
            self.let_go += self._hold.shrink(max(0, self._hold.held - (self._enough - room)))

    def note(self) -> str:
        """Return one line on what was let go, empty for nothing."""
        if not self.let_go:
            return ""
        return (
            f"memory became tight: {size_text(self.let_go)} of what was held let go, {size_text(self._hold.held)} are "
            "still held; what was let go is read again with every micro-batch"
        )

    def _watch(self) -> None:
        while not self._end.wait(self._interval):
            self.look()

    def __enter__(self) -> Self:
        """Begin to look."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop looking."""
        self._end.set()
        self._thread.join()

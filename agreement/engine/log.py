"""The engine's log: whole lines from the fragments that llama.cpp hands over, and what they prove.

In: text fragments.  Out: lines, and the lines that say whether an override took effect.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

from agreement.engine.base import SettingProof

_OVERRIDE = re.compile(r"Using metadata override \(\s*(?P<type>\w+)\) '(?P<key>[^']+)' = (?P<value>.*)")
_N_EXPERT_USED = re.compile(r"n_expert_used\s*= (?P<n>\d+)")
# What `ggml_abort` prints; a debugger's trace of the stack may follow.
_ABORT = re.compile(r"[^/\\]+\.(?:c|h|m|cc|cu|cpp|hpp):\d+: .+")
_NO_MEMORY = re.compile(r"alloc|reserve|out of memory|insufficient memory|not enough", re.IGNORECASE)
KEPT_LINES = 2000
NOTHING = "the engine logged nothing"


class EngineLog:
    """Collects lines; llama.cpp writes one line in several fragments, and only the newline ends it."""

    def __init__(self, listener: Callable[[str], None] | None = None) -> None:
        self._rest = ""
        self._listener = listener
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.n_lines = 0  # seen, those that are kept no more included
        self.overrides: list[str] = []
        self.n_expert_used: int | None = None

    def feed(self, fragment: str) -> None:
        """Take the next fragment."""
        *whole, self._rest = (self._rest + fragment).split("\n")
        for line in whole:
            self._line(line)

    def _line(self, line: str) -> None:
        self.lines.append(line)
        self.n_lines += 1
        if match := _OVERRIDE.search(line):
            self.overrides.append(f"{match['key']}={match['type']}:{match['value'].strip()}")
        elif (match := _N_EXPERT_USED.search(line)) and self.n_expert_used is None:
            self.n_expert_used = int(match["n"])
        if self._listener is not None:
            self._listener(line)

    def proof(self) -> SettingProof:
        """Return what the lines so far say of overrides."""
        return SettingProof(overrides=tuple(dict.fromkeys(self.overrides)), n_expert_used=self.n_expert_used)

    def last_words(self, n: int = 3, *, since: int = 0) -> str:
        """Return the last lines that are not empty, joined, or the engine's own failed check, for an error message.

        Args:
            n: How many at most.
            since: `n_lines` at the time before which lines do not count.
        """
        recent = list(self.lines)[-(self.n_lines - since) :] if self.n_lines > since else []
        lines = [line.strip() for line in recent if line.strip().strip(".")]
        failed = [match[0] for line in lines if (match := _ABORT.search(line))]
        return (failed[-1] if failed else " | ".join(lines[-n:])) or NOTHING


def lacks_memory(words: str) -> bool:
    """Say whether an engine's last words tell of memory that it did not get, or of nothing at all."""
    return words == NOTHING or _NO_MEMORY.search(words) is not None

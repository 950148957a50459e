"""Small runs for tests: text, corpora, options, and what a run directory holds.

In: seeds and sizes.  Out: folders of text, and run directories as plain values to compare.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from agreement.plan import ChunkOptions
from agreement.records import EngineOptions

# What a resumed run need not reproduce: logs, speeds, and the lock.
VOLATILE = frozenset({"engine.log", "timings.jsonl", ".lock"})
# One thread: tiny models gain nothing from more, and tests share the machine.  No repacking: see `--no-repack`.
ONE_AT_A_TIME = EngineOptions(n_threads=1, n_batch=64, repack=False)
FOUR_AT_A_TIME = EngineOptions(n_threads=1, n_batch=256, repack=False)
SHORT = ChunkOptions(n_ctx=64, n_chunks=12)

_WORDS = (
    "the", "return", "self", "in", "of", "a", "function", "takes", "one", "list", "and", "gives", "its", "sum", "=",
    "other", "tests", "run", "every", "night", "on", "an", "old", "machine", "that", "nobody", "has", "seen", "since",
)  # fmt: skip


def make_text(seed: int, n_words: int) -> str:
    """Return lines of words drawn with `seed`; about two and a half of the tiny models' tokens a word."""
    draw = random.Random(seed)
    words = [draw.choice(_WORDS) + ("\n" if draw.random() < 0.1 else " ") for _ in range(n_words)]
    return "".join(words)


def write_corpus(folder: Path, *, n_documents: int = 4, n_words: int = 200, seed: int = 0) -> Path:
    """Write `n_documents` text files into a new folder and return it."""
    folder.mkdir(parents=True)
    for i in range(n_documents):
        (folder / f"document-{i}.txt").write_text(make_text(1000 * seed + i, n_words), encoding="utf-8")
    return folder


def snapshot(run: Path) -> dict[str, bytes]:
    """Return the content of every file below `run` that a resumed run must reproduce, by relative name."""
    files = (p for p in sorted(run.rglob("*")) if p.is_file() and p.name not in VOLATILE)
    return {str(p.relative_to(run)): p.read_bytes() for p in files}


def names(folder: Path) -> set[str]:
    """Return the relative name of everything below `folder`, hidden files included."""
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def command_line(*arguments: str | Path) -> list[str]:
    """Return the command that runs `agreement` with `arguments` under this interpreter."""
    return [sys.executable, "-m", "agreement", *map(str, arguments)]


def run_command(
    *arguments: str | Path, cwd: Path | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run `agreement` with `arguments` to its end."""
    return subprocess.run(
        command_line(*arguments), capture_output=True, text=True, check=False, cwd=cwd, timeout=timeout
    )


def children(pid: int) -> list[int]:
    """Return the processes whose parent is `pid`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def wait_for(condition: Callable[[], object], *, seconds: float = 120) -> None:
    """Wait until `condition()` is true.

    Raises:
        TimeoutError: It has not become true in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing after {seconds} s")
        time.sleep(0.005)

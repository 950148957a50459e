"""How fast two logits files are scored, beside how fast the disk reads them, and in how much memory.

    python tests/benchmarks/kld_stream.py --gigabytes 2            # makes two files of 2 GB; needs 4 GB of disk
    python tests/benchmarks/kld_stream.py --gigabytes 0.3 --flat   # the worst case: every token counts

In: sizes. Out: one line a measurement: seconds, MB a second over the bytes of the files read, peak resident memory of
the process that did it. Each runs in a process of its own, first with the files dropped from the page cache
("cold", Linux), then with them in it ("warm"). The contents are like a large model's: a vocabulary of 151,936 of which
about 1 % have a log-probability above -16.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the package beside this file, installed or not

from agreement import kld

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agreement.records import Float32Array

N_VOCAB = 151_936
N_CTX = 512
DISTINCT = 32  # rows made; the file repeats them, since making a row takes longer than scoring it


def rows(seed: int, *, flat: bool) -> Float32Array:
    """Return (DISTINCT, N_VOCAB) float32 logits; `seed` 0 is the baseline, others are that and some noise."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((DISTINCT, N_VOCAB), dtype=np.float32)
    if not flat:
        logits *= np.float32(2.5)
        likely = rng.integers(0, N_VOCAB, size=(DISTINCT, 20))
        np.put_along_axis(logits, likely, rng.normal(18, 3, size=likely.shape).astype(np.float32), axis=1)
    if seed:
        logits += np.random.default_rng(seed).standard_normal(logits.shape, dtype=np.float32) * np.float32(0.3)
    return logits


def make(path: Path, seed: int, n_chunk: int, *, flat: bool) -> None:
    """Write one file."""
    n_rows = N_CTX - 1 - N_CTX // 2
    some = kld.quantise(rows(seed, flat=flat))

    def blocks() -> Iterator[kld.QuantisedRows]:
        left = n_chunk * n_rows
        while left > 0:
            part = slice(min(left, DISTINCT))
            yield kld.QuantisedRows(some.codes[part], some.scale[part], some.min_log_prob[part])
            left -= DISTINCT

    tokens = np.random.default_rng(9).integers(0, N_VOCAB, size=(n_chunk, N_CTX)).astype(np.int32)
    kld.write_logits_file(path, tokens, N_VOCAB, blocks())


def read_raw(paths: list[Path]) -> None:
    """Read the files one after the other and look at nothing."""
    buffer = memoryview(bytearray(1 << 22))
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):  # type: ignore[attr-defined]  # an unbuffered binary file has it
                pass


def measure(task: str, paths: list[Path]) -> None:
    """Do one task and print what it took as JSON; this runs in a process of its own."""
    start = time.perf_counter()
    if task == "read":
        read_raw(paths)
    elif task == "open":
        for path in paths:
            kld.open_logits_file(path)
    else:
        base, test = (kld.open_logits_file(path) for path in paths)
        n = sum(chunk.scores.kld_low.size for chunk in kld.score_files(base, test))
        assert n == base.n_chunk * base.n_rows
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "peak_mb": peak_memory() / 1e6}))


def peak_memory() -> int:
    """Return the largest resident size of this process so far, in bytes.

    From the kernel's own record where there is one: `getrusage` also counts what the parent held when it forked.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        (line,) = (line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def drop_from_cache(paths: list[Path]) -> None:
    """Ask the kernel to forget the files' pages; needs no rights."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run(task: str, paths: list[Path], *, cold: bool) -> dict[str, float]:
    """Measure a task in a fresh process."""
    if cold:
        drop_from_cache(paths)
    command = [sys.executable, str(Path(__file__).resolve()), "--task", task, *map(str, paths)]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))


def main() -> None:
    """Make the files and print the table."""
    parser = argparse.ArgumentParser(description="Streaming speed of two logits files.")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of each file")
    parser.add_argument("--flat", action="store_true", help="distributions in which every token counts")
    parser.add_argument("--folder", type=Path, help="where to make the files (default: a temporary folder)")
    parser.add_argument("--task", choices=["read", "open", "score"], help=argparse.SUPPRESS)
    parser.add_argument("paths", type=Path, nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        measure(options.task, options.paths)
        return
    row_bytes = 8 + 2 * N_VOCAB
    n_chunk = max(1, round(options.gigabytes * 1e9 / (row_bytes * (N_CTX - 1 - N_CTX // 2))))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        paths = [Path(folder) / "base.kld", Path(folder) / "test.kld"]
        for seed, path in enumerate(paths):
            make(path, seed, n_chunk, flat=options.flat)
        size = sum(path.stat().st_size for path in paths)
        print(f"two files of {size / 2e9:.3f} GB, {n_chunk} chunks of {N_CTX}, vocabulary {N_VOCAB:,}")
        print(f"{'':6}{'task':8}{'seconds':>9}{'MB/s':>9}{'peak MB':>9}")
        speed: dict[tuple[str, bool], float] = {}
        for cold in (True, False):
            for task in ("read", "open", "score"):
                result = run(task, paths, cold=cold)
                speed[task, cold] = size / 1e6 / result["seconds"]
                label = "cold" if cold else "warm"
                print(
                    f"{label:6}{task:8}{result['seconds']:9.2f}{speed[task, cold]:9.0f}{result['peak_mb']:9.0f}",
                    flush=True,
                )
        for cold in (True, False):
            share = speed["score", cold] / speed["read", cold]
            print(f"{'cold' if cold else 'warm'}: scored at {share:.2f} of the speed of plain reading")


if __name__ == "__main__":
    main()

"""A model larger than its memory: bytes read and wall time of a sweep against `llama-perplexity`'s five passes.

    python tests/benchmarks/streaming.py                     # the comparison: needs root, Linux, about ten minutes
    python tests/benchmarks/streaming.py --repeats 3         # medians of three
    python tests/benchmarks/streaming.py --skip-tool --growth  # bytes and time against settings and chunks
    python tests/benchmarks/streaming.py -- --passes separate  # further arguments go to `agreement sweep`

A synthetic model of many small experts (1.14 GB) runs in a control group whose memory limit is the file's size over
1.3 and whose reads are throttled to 200 MB/s.  The file's pages are dropped before each run; what counts as read is
what the group's block device delivered.  The tool makes its base file and one `--kl-divergence` run a setting, once
with its default batch settings and once with its best ones; ours is one `agreement sweep`.  Same build, text, chunks,
threads.  The agreement figures of both are compared.

Control groups of version 1 (memory and blkio) and of version 2 (memory and io) are found by their mounts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import llama_perplexity
import synthetic

from agreement.corpus import joined_text, load
from agreement.demo import CORPORA

EXPERTS = (7, 6, 4, 2)
GROUP = "agreement-streaming"
KEY = "qwen3moe.expert_used_count=int"
POLICIES = ("ser=4,0.5", "ser=2,0.5", "ser=1,0.5")  # there are only seven cuts below eight
BEST = ("-b", "4096", "-ub", "4096")


class BenchmarkError(RuntimeError):
    """The machine does not offer what the measurement needs."""


@dataclass(frozen=True)
class Cost:
    """What one command took.

    Attributes:
        read: Bytes the block device delivered.
        seconds: Wall time.
        peak: Most memory the group held, file pages included, bytes.
    """

    read: int
    seconds: float
    peak: int

    def __add__(self, other: Cost) -> Cost:
        """Return the cost of both, one after the other."""
        return Cost(self.read + other.read, self.seconds + other.seconds, max(self.peak, other.peak))


def block_device(path: Path) -> str:
    """Return `MAJOR:MINOR` of the whole disk under a file's filesystem."""
    device = path.stat().st_dev
    place = Path("/sys/dev/block") / f"{os.major(device)}:{os.minor(device)}"
    if not place.exists():
        raise BenchmarkError(f"{path} is on no block device (an overlay or a network?); set TMPDIR to one that is")
    place = place.resolve()
    if (place / "partition").exists():  # throttling is by disk
        place = place.parent
    return (place / "dev").read_text(encoding="ascii").strip()


class Box:
    """A control group with a memory limit and a throttled disk; removed at the end.

    Args:
        limit: Memory, bytes.
        speed: Reads, bytes a second.
        device: From `block_device`.
    """

    def __init__(self, limit: int, speed: int, device: str) -> None:
        self._device = device
        v1 = [Path("/sys/fs/cgroup") / name for name in ("memory", "blkio")]
        self._v2 = not all((place / "cgroup.procs").exists() for place in v1)
        roots = [Path("/sys/fs/cgroup")] if self._v2 else v1
        self.folders = [root / GROUP for root in roots]
        try:
            for folder in self.folders:
                folder.mkdir(exist_ok=True)
            if self._v2:
                self._write("memory.max", str(limit))
                self._write("memory.swap.max", "0")
                self._write("io.max", f"{device} rbps={speed}")
            else:
                self._write("memory.limit_in_bytes", str(limit))
                self._write("blkio.throttle.read_bps_device", f"{device} {speed}")
        except OSError as error:
            raise BenchmarkError(f"{error}: needs root, and the controllers memory and blkio (or io)") from error

    def _find(self, name: str) -> Path:
        return next((f / name for f in self.folders if (f / name).exists()), self.folders[0] / name)

    def _write(self, name: str, text: str) -> None:
        self._find(name).write_text(text, encoding="ascii")

    def _read_bytes(self) -> int:
        if self._v2:
            found = re.search(
                rf"^{self._device} .*rbytes=(\d+)", self._find("io.stat").read_text("ascii"), re.MULTILINE
            )
        else:
            text = self._find("blkio.throttle.io_service_bytes_recursive").read_text("ascii")
            found = re.search(rf"^{self._device} Read (\d+)", text, re.MULTILINE)
        return int(found[1]) if found else 0

    def run(self, command: Sequence[str], *, cold: Sequence[Path]) -> tuple[Cost, str]:
        """Run a command in the group; return its cost and everything it printed.

        Args:
            command: What to run.
            cold: Files whose pages are dropped first.
        """
        for path in cold:
            drop_pages(path)
        if not self._v2:
            self._write("memory.force_empty", "0")  # pages of the run before are no longer charged to the group
            self._write("memory.max_usage_in_bytes", "0")
        before, started = self._read_bytes(), time.monotonic()
        inside = "; ".join(f"echo $$ > {folder / 'cgroup.procs'}" for folder in self.folders)
        done = subprocess.run(
            ["/bin/sh", "-c", f'{inside}; exec "$@"', "sh", *command], check=False, capture_output=True, text=True
        )
        seconds = time.monotonic() - started
        if done.returncode != 0:
            raise BenchmarkError(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()[-600:]}")
        name = "memory.peak" if self._v2 else "memory.max_usage_in_bytes"
        peak = self._find(name)
        most = int(peak.read_text("ascii")) if peak.exists() else 0
        return Cost(self._read_bytes() - before, seconds, most), done.stdout + done.stderr

    def close(self) -> None:
        """Remove the group."""
        for folder in self.folders:
            with contextlib.suppress(OSError):  # a process that is still ending
                folder.rmdir()


@contextlib.contextmanager
def box(model: Path, ratio: float, speed: int) -> Iterator[Box]:
    """Give a group whose limit is the model's size over `ratio`."""
    group = Box(int(model.stat().st_size / ratio), speed, block_device(model))
    try:
        yield group
    finally:
        group.close()


def drop_pages(path: Path) -> None:
    """Drop a file's pages from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run_tool(group: Box, files: Files, given: argparse.Namespace, batch: Sequence[str]) -> tuple[Cost, list[float]]:
    """Run the tool's five passes; return their cost and its agreement of each setting, percent."""
    program = llama_perplexity.build()
    common = [str(program), "-m", str(files.model), "-c", str(given.ctx), "-t", str(given.threads), *batch]
    common += ["--kl-divergence-base", str(files.base)]
    total, _ = group.run([*common, "-f", str(files.text), "--chunks", str(given.chunks)], cold=[files.model])
    shares = []
    for n in EXPERTS:
        command = [*common, "--kl-divergence", "--override-kv", f"{KEY}:{n}"]
        cost, output = group.run(command, cold=[files.model])
        total += cost
        shares.append(llama_perplexity.parse_kld(output).lines[-1].same_top_percent.value)
        print(f"    {n} experts: {cost.read / 1e9:.2f} GB, {cost.seconds:.1f} s", flush=True)
    return total, shares


@dataclass(frozen=True)
class Files:
    """Where things are."""

    model: Path
    text: Path
    base: Path
    out: Path


@dataclass(frozen=True)
class Sweep:
    """What one `agreement sweep` cost, found and had planned."""

    cost: Cost
    shares: list[float]
    planned: int | None
    seconds: float | None
    passes: str


def run_ours(
    group: Box, files: Files, given: argparse.Namespace, experts: Sequence[int], chunks: int, extra: Sequence[str]
) -> Sweep:
    """Run `agreement sweep`."""
    shutil.rmtree(files.out, ignore_errors=True)
    command = [sys.executable, "-m", "agreement", "sweep", str(files.model), str(files.text), "-o", str(files.out)]
    command += ["--experts", ",".join(map(str, experts)), "--chunking", "llama-perplexity", "-t", str(given.threads)]
    command += ["-c", str(given.ctx), "--chunks", str(chunks), *extra]
    cost, _ = group.run(command, cold=[files.model])
    settings = json.loads((files.out / "report.json").read_text(encoding="utf-8"))["settings"]
    sums = [{k: sum(s["counts"][k]) for k in ("n", "n_agree")} for s in settings]
    lines = (files.out / "timings.jsonl").read_text(encoding="utf-8").splitlines()
    reading = [entry for entry in map(json.loads, lines) if entry["pass"] == "reading"]
    planned, expected = (reading[0][key] if reading else None for key in ("bytes_planned", "seconds_planned"))
    run = json.loads((files.out / "run.json").read_text(encoding="utf-8"))
    passes = run["identity"]["recording"].get("passes", "separate")
    return Sweep(cost, [100.0 * s["n_agree"] / s["n"] for s in sums], planned, expected, passes)


def row(name: str, costs: Sequence[Cost]) -> str:
    """Return a line of the table, medians."""
    read, seconds, peak = (statistics.median(getattr(c, field) for c in costs) for field in ("read", "seconds", "peak"))
    return f"| {name} | {read / 1e9:.2f} GB | {seconds:.1f} s | {peak / 1e6:.0f} MB |"


@dataclass(frozen=True)
class Round:
    """Ours and the tool's two ways, one after the other."""

    ours: Sweep
    best: Cost
    default: Cost
    shares: list[float]


def one_round(group: Box, files: Files, given: argparse.Namespace, extra: Sequence[str]) -> Round:
    """Run all three once."""
    print("  agreement sweep", flush=True)
    ours = run_ours(group, files, given, EXPERTS, given.chunks, extra)
    print(f"    {ours.cost.read / 1e9:.2f} GB, {ours.cost.seconds:.1f} s")
    print(f"  llama-perplexity {' '.join(BEST)}", flush=True)
    best, shares = run_tool(group, files, given, BEST)
    print("  llama-perplexity, default batch settings", flush=True)
    default, _ = run_tool(group, files, given, ())
    return Round(ours, best, default, shares)


def compare(group: Box, files: Files, given: argparse.Namespace, extra: Sequence[str]) -> bool:
    """Print the comparison with the tool, medians over rounds; return whether every goal is met."""
    rounds = [one_round(group, files, given, extra) for _ in range(given.repeats)]
    print("\n| five passes | read | wall time | peak memory |\n|---|---|---|---|")
    print(row("llama-perplexity, default", [r.default for r in rounds]))
    print(row(f"llama-perplexity {' '.join(BEST)}", [r.best for r in rounds]))
    print(row("agreement sweep", [r.ours.cost for r in rounds]))
    for r in rounds:
        if r.ours.planned is not None:
            share = r.ours.cost.read / r.ours.planned
            print(f"planned {r.ours.planned / 1e9:.2f} GB ({share:.2f} of it was read), {r.ours.seconds} s of reading")
        print(f"agreement, ours {' / '.join(f'{s:.3f}' for s in r.ours.shares)} %, the tool's "
              f"{' / '.join(f'{s:.3f}' for s in r.shares)} %")  # fmt: skip
    goals = [
        ("bytes against default", [r.ours.cost.read / r.default.read for r in rounds], 1 / 10),
        ("bytes against best", [r.ours.cost.read / r.best.read for r in rounds], 1 / 2),
        ("time against default", [r.ours.cost.seconds / r.default.seconds for r in rounds], 1 / 4),
        ("time against best", [r.ours.cost.seconds / r.best.seconds for r in rounds], 2 / 3),
        ("largest difference of agreement, points", [max_difference(r.ours.shares, r.shares) for r in rounds], 0.05),
    ]
    for name, values, goal in goals:
        median = statistics.median(values)
        each = ", ".join(f"{value:.3f}" for value in values)
        print(f"{'met   ' if median <= goal else 'MISSED'} {name}: {median:.3f} ({each}), goal {goal:.3f}")
    return all(statistics.median(values) <= goal for _, values, goal in goals)


def max_difference(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the largest difference between figures at the same place."""
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def growth(group: Box, files: Files, given: argparse.Namespace, extra: Sequence[str]) -> None:
    """Print bytes and time against the number of settings and of chunks, the plan's prediction beside them."""
    print("\n| run | passes | planned | read | planned reading | wall time |\n|---|---|---|---|---|---|", flush=True)
    for n_settings, chunks in ((1, 8), (2, 8), (5, 8), (10, 8), (4, 8), (4, 24), (4, 96)):
        settings = EXPERTS if n_settings == len(EXPERTS) else tuple(range(7, 7 - min(n_settings, 7), -1))
        policies = [word for p in POLICIES[: n_settings - len(settings)] for word in ("--setting", p)]
        found = run_ours(group, files, given, settings, chunks, [*policies, *extra])
        planned = "-" if found.planned is None else f"{found.planned / 1e9:.2f} GB"
        seconds = "-" if found.seconds is None else f"{found.seconds:.1f} s"
        cost = found.cost
        name = f"{n_settings} settings, {chunks} chunks"
        read = f"{cost.read / 1e9:.2f} GB"
        print(f"| {name} | {found.passes} | {planned} | {read} | {seconds} | {cost.seconds:.1f} s |", flush=True)


def main() -> int:
    """Measure and print; the exit code says whether the goals are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="A model made by synthetic.py; without it one is made.")
    parser.add_argument("--ratio", type=float, default=1.3, help="Size of the model over the memory limit.")
    parser.add_argument("--speed", type=int, default=200_000_000, help="Disk, bytes a second.")
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=1, help="Rounds of the comparison; medians are judged.")
    parser.add_argument("--skip-tool", action="store_true", help="Leave the comparison out.")
    parser.add_argument("--growth", action="store_true", help="Also measure against settings and chunks.")
    parser.add_argument("extra", nargs="*", help="Further arguments of `agreement sweep`, after --.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        folder = Path(name)
        model = given.model or synthetic.write_synthetic(folder / "synthetic.gguf", "experts")
        files = Files(model, folder / "text.txt", folder / "base", folder / "run")
        files.text.write_text(joined_text(load(CORPORA["heldout-code"])), encoding="utf-8")
        try:
            with box(model, given.ratio, given.speed) as group:
                met = True if given.skip_tool else compare(group, files, given, given.extra)
                if given.growth:
                    growth(group, files, given, given.extra)
        except BenchmarkError as error:
            print(error, file=sys.stderr)
            return 1
    return 0 if met else 3


if __name__ == "__main__":
    raise SystemExit(main())

"""What this process really read and how much memory it takes, from the kernel's own counters.

In: the files of `/proc` and of the control group that limits memory.  Out: bytes, or None where nothing can be read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agreement.memory import Memory

_PROC = Path("/proc")


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one process, bytes.

    Attributes:
        anonymous: What belongs to the process alone now: it cannot be dropped and read again.
        peak: The most that was resident at any time, pages of mapped files included.
    """

    anonymous: int
    peak: int


@dataclass(frozen=True)
class Counters:
    """What a run has cost the process that reads the weights.

    Attributes:
        bytes_read: From disk; None where the system does not say.
        peak: Most memory that was resident, bytes, file pages included; None as above.
        beside: Most memory taken beside the weights after a micro-batch, bytes; None as above, or before the first.
        notes: What went otherwise than planned, one line each.
    """

    bytes_read: int | None
    peak: int | None
    beside: int | None = None
    notes: tuple[str, ...] = ()


def bytes_read(pid: int | None = None, *, proc: Path = _PROC) -> int | None:
    """Return the bytes a process has caused to be read from storage so far, read-ahead and page faults included.

    Pages that were in memory already are not counted, so over a run the increase is what the disk delivered.  A child
    that has ended and was waited for is part of its parent's count (proc(5), `/proc/PID/io`).

    Args:
        pid: The process; None for this one.
        proc: Where `/proc` is; another folder in tests.

    Returns:
        None where the counter is missing or may not be read (another system, another user's process).
    """
    return _field(proc / ("self" if pid is None else str(pid)) / "io", "read_bytes:")


def memory_use(pid: int | None = None, *, proc: Path = _PROC) -> MemoryUse | None:
    """Return the memory of a process; arguments and None as for `bytes_read`."""
    place = proc / ("self" if pid is None else str(pid)) / "status"
    anonymous, peak = _field(place, "RssAnon:"), _field(place, "VmHWM:")
    if anonymous is None or peak is None:
        return None
    return MemoryUse(anonymous * 1024, peak * 1024)  # the file's `kB` are KiB


def memory_available(memory: Memory, *, proc: Path = _PROC) -> int:
    """Return the bytes that can still be taken now: what is free, and file pages that can be dropped.

    The machine's share is `MemAvailable`.  Where a control group sets the limit, what its processes hold is taken off
    that limit, file pages that nobody locked left out.  Each of them may bind, those of groups above too, so the
    smallest one is the answer.

    Args:
        memory: From `agreement.memory.read_memory`; its source names the limit's file.
        proc: Where `/proc` is; another folder in tests.
    """
    machine = _field(proc / "meminfo", "MemAvailable:")
    available = memory.machine if machine is None else machine * 1024
    limits = memory.limits or ((memory.limit, memory.source),)
    return max(0, min(available, *(_left(limit, source) for limit, source in limits)))


def _left(limit: int, source: str) -> int:
    """Return what is left below one limit; all of it where nothing says what is taken."""
    if source == "machine":
        return limit
    group = Path(source).parent
    used = _whole(group / "memory.usage_in_bytes")
    prefix = "total_"  # version 1 counts the groups below only in these
    if used is None:
        used, prefix = _whole(group / "memory.current"), ""
    if used is None:
        return limit
    stat = group / "memory.stat"
    droppable = sum(_field(stat, f"{prefix}{kind}_file") or 0 for kind in ("active", "inactive"))
    return limit - used + droppable


def memory_kills(*, proc: Path = _PROC) -> int | None:
    """Return how many processes of this machine were killed for want of memory, the machine's or a control group's.

    Args:
        proc: Where `/proc` is; another folder in tests.

    Returns:
        None where the kernel does not count them (before Linux 4.13, other systems).
    """
    return _field(proc / "vmstat", "oom_kill")


def _whole(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _field(path: Path, name: str) -> int | None:
    """Return the number after `name` at the start of a line."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        words = line.split()
        if len(words) >= 2 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return None

"""How much memory this process may use: the machine's, or less if a control group says so.

In: the files under `/proc` and the control groups' mounts.  Out: bytes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_V1_LIMIT = "memory.limit_in_bytes"
_V2_LIMITS = ("memory.max", "memory.high")  # above `high` the kernel reclaims pages as if there were no more


@dataclass(frozen=True)
class Memory:
    """What may be used, and why.

    Attributes:
        machine: Memory of the machine, bytes.
        limit: What this process may use, bytes: the smallest limit that applies.
        source: `machine`, or the file that sets the limit.
        limits: Every limit that applies, bytes, with its file: a larger one of a group above may bind first, where
            others in that group take memory.
    """

    machine: int
    limit: int
    source: str
    limits: tuple[tuple[int, str], ...] = ()


def memory_limit() -> int:
    """Return the bytes of memory this process may use; see `read_memory`."""
    return read_memory().limit


def read_memory(root: Path = Path("/")) -> Memory:
    """Read the machine's memory and every control-group limit on this process, of version 1 and 2.

    A group's limit binds all groups below it, so each ancestor up to the mount is read.  Files that are missing or
    unreadable set no limit: not every system has them.

    Args:
        root: Where `/proc` and the mounts are looked up; another one in tests.
    """
    machine = _machine(root)
    found = [(_limit(path), str(path)) for path in _limit_files(root)]
    limits = tuple((value, path) for value, path in found if value is not None and value < machine)
    limit, source = min(limits, key=lambda pair: pair[0], default=(machine, "machine"))
    return Memory(machine, limit, source, limits)


def _machine(root: Path) -> int:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024  # the file's `kB` are KiB
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _limit(path: Path) -> int | None:
    """Return a limit file's number; None for `max`, an absent or an unreadable file."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdecimal() else None


def _limit_files(root: Path) -> list[Path]:
    groups = _groups(root)
    files: list[Path] = []
    for kind, mount, mounted in _mounts(root):
        group = groups.get(kind)
        if group is None:
            continue
        # A mount shows the subtree below `mounted`; in a container that is often the process's own group.
        inside = group[len(mounted) :] if mounted != "/" and group.startswith(mounted) else group
        names = _V2_LIMITS if kind == "v2" else (_V1_LIMIT,)
        place = mount / inside.strip("/")
        while place.is_relative_to(mount):
            files += [place / name for name in names]
            place = place.parent
    return files


def _groups(root: Path) -> dict[str, str]:
    """Return this process's group: `v2`, and `v1` for the memory controller."""
    groups: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0" and not controllers:
            groups["v2"] = group
        elif "memory" in controllers.split(","):
            groups["v1"] = group
    return groups


def _mounts(root: Path) -> list[tuple[str, Path, str]]:
    """Return kind, mount point and mounted group of each mount that may carry memory limits (proc(5), mountinfo)."""
    mounts: list[tuple[str, Path, str]] = []
    for line in _lines(root / "proc/self/mountinfo"):
        fields, _, tail = line.partition(" - ")
        parts, kind = fields.split(), tail.split()
        if len(parts) < 5 or len(kind) < 3:
            continue
        point = root / parts[4].lstrip("/")
        if kind[0] == "cgroup2":
            mounts.append(("v2", point, parts[3]))
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            mounts.append(("v1", point, parts[3]))
    return mounts

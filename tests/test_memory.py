from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from agreement.memory import memory_limit, read_memory

if TYPE_CHECKING:
    from pathlib import Path

MACHINE = 16 * 2**30
V2 = "30 20 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
OTHER = "31 23 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n20 1 8:1 / / rw - ext4 /dev/sda1 rw\nnonsense\n"


def fake(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": f"MemTotal: {MACHINE // 1024} kB\nMemFree: 1 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_groups(tmp_path: Path) -> None:
    memory = read_memory(fake(tmp_path, {}))
    assert (memory.machine, memory.limit, memory.source) == (MACHINE, MACHINE, "machine")


def test_version_2_smallest_of_all_ancestors(tmp_path: Path) -> None:
    root = fake(
        tmp_path,
        {
            "proc/self/mountinfo": OTHER + V2.format(root="/"),
            "proc/self/cgroup": "0::/user/job\n",
            "sys/fs/cgroup/user/job/memory.max": "5000000000\n",
            "sys/fs/cgroup/user/job/memory.high": "max\n",
            "sys/fs/cgroup/user/memory.max": "4000000000\n",
            "sys/fs/cgroup/user/memory.high": "max\n",
            "sys/fs/cgroup/memory.max": "max\n",
        },
    )
    memory = read_memory(root)
    assert (memory.machine, memory.limit) == (MACHINE, 4_000_000_000)
    assert memory.source.endswith("/sys/fs/cgroup/user/memory.max")


def test_version_2_high_binds_too(tmp_path: Path) -> None:
    root = fake(
        tmp_path,
        {
            "proc/self/mountinfo": V2.format(root="/"),
            "proc/self/cgroup": "0::/job\n",
            "sys/fs/cgroup/job/memory.max": "5000000000\n",
            "sys/fs/cgroup/job/memory.high": "3000000000\n",
        },
    )
    assert read_memory(root).limit == 3_000_000_000


def test_version_1(tmp_path: Path) -> None:
    root = fake(
        tmp_path,
        {
            "proc/self/mountinfo": OTHER + V1.format(root="/"),
            "proc/self/cgroup": "9:cpu,cpuacct:/\n4:memory:/job/a\n0::/\n",
            "sys/fs/cgroup/memory/job/a/memory.limit_in_bytes": "1200000000\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9223372036854771712\n",  # version 1's `none`
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert read_memory(root).limit == 1_200_000_000


def test_container_sees_its_own_group_as_the_mount(tmp_path: Path) -> None:
    root = fake(
        tmp_path,
        {
            "proc/self/mountinfo": V1.format(root="/docker/abc"),
            "proc/self/cgroup": "4:memory:/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "2000000000\n",
        },
    )
    assert read_memory(root).limit == 2_000_000_000


def test_limit_above_the_machine_is_none(tmp_path: Path) -> None:
    root = fake(
        tmp_path,
        {
            "proc/self/mountinfo": V2.format(root="/"),
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": str(2 * MACHINE),
        },
    )
    assert read_memory(root).source == "machine"


@pytest.mark.parametrize("text", ["", "none\n", "-1\n"])
def test_unreadable_limits_are_none(text: str, tmp_path: Path) -> None:
    root = fake(
        tmp_path,
        {
            "proc/self/mountinfo": V2.format(root="/"),
            "proc/self/cgroup": "0::/gone\n\n",
            "sys/fs/cgroup/memory.max": text,
        },
    )
    assert read_memory(root).limit == MACHINE


def test_system_without_proc(tmp_path: Path) -> None:
    expected = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert read_memory(tmp_path / "empty").limit == expected


def test_this_machine() -> None:
    memory = read_memory()
    assert 2**20 < memory_limit() <= memory.machine

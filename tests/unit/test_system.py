"""What the kernel's files say of free memory: of the machine, and of the control groups of either version."""

import sys
from pathlib import Path

import pytest

from dovetail import system

MEMINFO = """MemTotal:       24684096 kB
MemFree:        18322704 kB
MemAvailable:   19888928 kB
Buffers:           22052 kB
Cached:          1750336 kB
HugePages_Total:       0
"""
AVAILABLE = 19888928 * 1024
STAT = """anon 104857600
file 31457280
kernel 5242880
shmem 4096
inactive_file 2000000
active_file 1000000
unevictable 0
"""
STAT_1 = """cache 31457280
rss 104857600
inactive_file 5
active_file 5
hierarchical_memory_limit 9223372036854771712
total_cache 31457280
total_inactive_file 2000000
total_active_file 1000000
"""
FILES = 3000000  # bytes of either, which the kernel takes back when it needs them
UNLIMITED = "9223372036854771712\n"


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without control groups: `proc` and `groups` are its /proc and /sys/fs/cgroup."""
    write(tmp_path / "proc/meminfo", MEMINFO)
    monkeypatch.setattr(system, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(system, "_CGROUPS", tmp_path / "groups")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def group(folder: Path, limit: str, used: int) -> None:
    write(folder / "memory.max", limit)
    write(folder / "memory.current", f"{used}\n")
    write(folder / "memory.stat", STAT)


def group_1(folder: Path, limit: str, used: int) -> None:
    write(folder / "memory.limit_in_bytes", limit)
    write(folder / "memory.usage_in_bytes", f"{used}\n")
    write(folder / "memory.stat", STAT_1)


@pytest.mark.usefixtures("kernel")
def test_a_machine_without_groups() -> None:
    assert system.free_memory() == AVAILABLE


def test_where_nothing_is_known(kernel: Path) -> None:
    (kernel / "proc/meminfo").unlink()
    assert system.free_memory() is None
    write(kernel / "proc/meminfo", "MemTotal:       24684096 kB\n")
    assert system.free_memory() is None


def test_version_2(kernel: Path) -> None:
    """The tightest group on the way up counts; one without a limit does not."""
    write(kernel / "proc/self/cgroup", "0::/jobs/mine\n")
    group(kernel / "groups/jobs/mine", "max\n", 50_000_000)
    assert system.free_memory() == AVAILABLE
    group(kernel / "groups/jobs", "900000000\n", 100_000_000)
    assert system.free_memory() == 800_000_000 + FILES
    group(kernel / "groups/jobs/mine", "70000000\n", 50_000_000)
    assert system.free_memory() == 20_000_000 + FILES
    group(kernel / "groups", "60000000\n", 80_000_000)
    assert system.free_memory() == 0, "over its limit"


def test_a_container_that_sees_its_group_as_the_root(kernel: Path) -> None:
    write(kernel / "proc/self/cgroup", "0::/\n")
    group(kernel / "groups", "70000000\n", 50_000_000)
    assert system.free_memory() == 20_000_000 + FILES


def test_version_1(kernel: Path) -> None:
    """Beside an empty tree of version 2; a container's own path may not be there, and its root is then its group."""
    write(kernel / "proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/jobs/mine\n0::/\n")
    group_1(kernel / "groups/memory", UNLIMITED, 50_000_000)
    assert system.free_memory() == AVAILABLE
    group_1(kernel / "groups/memory", "70000000\n", 50_000_000)
    assert system.free_memory() == 20_000_000 + FILES
    group_1(kernel / "groups/memory/jobs/mine", "60000000\n", 50_000_000)
    assert system.free_memory() == 10_000_000 + FILES


def test_kills_are_counted_in_either_version(kernel: Path) -> None:
    assert system.out_of_memory_kills() == 0
    write(kernel / "proc/vmstat", "pgfault 12\noom_kill 1\n")
    write(kernel / "proc/self/cgroup", "4:memory:/mine\n0::/two\n")
    write(kernel / "groups/memory/mine/memory.oom_control", "under_oom 0\noom_kill 2\n")
    write(kernel / "groups/two/memory.events", "oom 9\noom_kill 4\n")
    assert system.out_of_memory_kills() == 7


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_this_machine_has_memory() -> None:
    found = system.free_memory()
    assert found is not None and found > 0

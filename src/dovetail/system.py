"""What the kernel knows of processes: their states, their children, the memory left, and whether it killed any for want of it.

Linux tells by /proc and prctl. Elsewhere each function gives the answer that costs least: nothing is known.
"""

import contextlib
import ctypes
import math
import os
import resource
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # prctl(2)


def kernel_state(pid: int) -> str:
    """The letter that ps shows: R, S, D (waits inside the kernel), T (stopped), t (traced), Z; "" where not known."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def parent_of(pid: int) -> int | None:
    """The parent of a process; None where it is not known."""
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def children_of(roots: Iterable[int]) -> set[int]:
    """Every process below `roots`, those themselves left out."""
    below: dict[int, list[int]] = defaultdict(list)
    for entry in _PROC.glob("[0-9]*"):
        fields = _stat(int(entry.name))
        if fields:
            below[int(fields[1])].append(int(entry.name))
    found: set[int] = set()
    left = list(roots)
    while left:
        fresh = set(below.get(left.pop(), [])) - found
        found |= fresh
        left += fresh
    return found


def out_of_memory_kills() -> int:
    """A count that rises when the kernel kills a process of this machine, or of our control groups, for want of memory."""
    counters = [_PROC / "vmstat"]
    for top, inside in _memory_groups():
        if top == _CGROUPS:
            counters.append(top / inside / "memory.events")
        else:
            counters += [top / inside / "memory.oom_control", top / "memory.oom_control"]
    return sum(_counter(path, "oom_kill") or 0 for path in counters)


def free_memory() -> int | None:
    """Bytes that this process could take before the kernel kills one for it, of this machine and of our control groups.

    What files left in memory counts as free. None where nothing is known.
    """
    available = _counter(_PROC / "meminfo", "MemAvailable:")
    found = [] if available is None else [available << 10]
    for top, inside in _memory_groups():
        above = (top / parent for parent in Path(inside).parents)
        found += [left for folder in (top / inside, *above) if (left := _left_of_group(folder)) is not None]
    return max(min(found), 0) if found else None


def adopt_orphans() -> None:
    """Have what our children leave behind become our own children, so that it can be found and ended."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have the kernel end this process when its parent is gone, even if it never returns to Python."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def limit_memory(more: int) -> None:
    """Have the kernel refuse this process more than `more` bytes beyond what it has by now."""
    sizes = _PROC / "self/statm"
    if sizes.exists():
        wanted = int(sizes.read_text().split()[0]) * resource.getpagesize() + more
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def end_children(spared: Iterable[int] = (), seconds: float = math.inf) -> set[int]:
    """Kill every process below this one, but for `spared` and what they started, until there is none. Those that are left
    after so many seconds wait inside the kernel, and end when that lets them.
    """
    kept, until = set(spared) | children_of(spared), time.monotonic() + seconds
    while left := {pid for pid in children_of([os.getpid()]) - kept if kernel_state(pid) not in ("Z", "X")}:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until:
            return left
    return set()


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty where the process is gone."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _memory_groups() -> Iterator[tuple[Path, str]]:
    """The trees of control groups that bound memory (version 2, then 1), and where in each this process is."""
    membership = _PROC / "self/cgroup"
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield _CGROUPS, path.lstrip("/")
        elif "memory" in controllers.split(","):
            yield _CGROUPS / "memory", path.lstrip("/")


def _left_of_group(folder: Path) -> int | None:
    """Bytes up to the limit of a control group of either version; None where it has none."""
    names = (("memory.max", "memory.current", ""), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"))
    for limit, used, prefix in names:
        with contextlib.suppress(OSError, ValueError):  # no such file; or "max"
            left = int((folder / limit).read_text()) - int((folder / used).read_text())
            files = (_counter(folder / "memory.stat", f"{prefix}{kind}_file") or 0 for kind in ("active", "inactive"))
            return left + sum(files)
    return None


def _counter(path: Path, name: str) -> int | None:
    """The value behind `name` in a file of lines `name value`, perhaps with a unit; None where there is none."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value.split()[0])
    return None


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)

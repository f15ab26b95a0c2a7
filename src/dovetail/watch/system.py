"""What the kernel knows of processes: their states, their children, and whether it killed any for want of memory.

Linux tells by /proc and prctl. Elsewhere each function gives the answer that costs least: nothing is known.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # prctl(2)


def kernel_state(pid: int) -> str:
    """The letter that ps shows: R, S, D (waits inside the kernel), T (stopped), t (traced), Z; "" where not known."""
    fields = _stat(pid)
    return fields[0] if fields else ""


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
    membership = _PROC / "self/cgroup"
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        inside = path.lstrip("/")
        if not controllers:
            counters.append(_CGROUPS / inside / "memory.events")
        elif "memory" in controllers.split(","):
            counters += [_CGROUPS / "memory" / inside / "memory.oom_control", _CGROUPS / "memory/memory.oom_control"]
    return sum(_counter(path, "oom_kill") for path in counters)


def adopt_orphans() -> None:
    """Have what our children leave behind become our own children, so that it can be found and ended."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have the kernel end this process when its parent is gone, even if it never returns to Python."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def end_children(spared: Iterable[int] = ()) -> None:
    """Kill every process below this one, but for `spared` and what they started, until there is none."""
    kept = set(spared) | children_of(spared)
    while left := {pid for pid in children_of([os.getpid()]) - kept if kernel_state(pid) not in ("Z", "X")}:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty where the process is gone."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _counter(path: Path, name: str) -> int:
    """The value behind `name` in a file of lines `name value`; 0 where there is none."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)

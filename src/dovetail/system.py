"""Processes and memory, by /proc and cgroups of Linux."""

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

OPEN_FILES = 1 << 16  # for process groups and checkpoint files
BFLOAT16_FEATURES = ("avx512_bf16", "amx_bf16", "bf16")  # of x86; of Arm
_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_SET_PARENT_DEATH_SIGNAL = 1
_SET_CHILD_SUBREAPER = 36  # prctl(2)


def kernel_state(pid: int) -> str:
    """State letter as in ps; "": unknown."""
    return next(iter(_stat(pid)), "")


def children_of(roots: Iterable[int]) -> set[int]:
    below: dict[int, list[int]] = defaultdict(list)
    for entry in _PROC.glob("[0-9]*"):
        if fields := _stat(int(entry.name)):
            below[int(fields[1])].append(int(entry.name))
    descendants: set[int] = set()
    stack = list(roots)
    while stack:
        fresh = set(below.get(stack.pop(), [])) - descendants
        descendants |= fresh
        stack += fresh
    return descendants


def out_of_memory_kills() -> int:
    counters = [_PROC / "vmstat"]
    for top, inside in _memory_groups():
        if top == _CGROUPS:
            counters.append(top / inside / "memory.events")
        else:
            counters += [top / inside / "memory.oom_control", top / "memory.oom_control"]
    return sum(_counter(path, "oom_kill") or 0 for path in counters)


def free_memory() -> int | None:
    """Bytes left for us, page cache included; None: unknown."""
    available = _counter(_PROC / "meminfo", "MemAvailable:")
    bounds = [] if available is None else [available << 10]
    for top, inside in _memory_groups():
        above = (top / parent for parent in Path(inside).parents)
        bounds += [
            left
            for folder in (top / inside, *above)
            if (left := _left_of_group(folder)) is not None
        ]
    return max(min(bounds), 0) if bounds else None


def resident_memory() -> int | None:
    sizes = _PROC / "self/statm"
    return int(sizes.read_text().split()[1]) * resource.getpagesize() if sizes.exists() else None


def gpu_memory() -> list[int]:
    """Bytes of each GPU by NVML."""
    sizes: list[int] = []
    with contextlib.suppress(OSError, AttributeError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        count = ctypes.c_uint()
        if nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0:
            for index in range(count.value):
                device = ctypes.c_void_p()
                memory = (ctypes.c_ulonglong * 3)()  # total, free, used
                nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
                if nvml.nvmlDeviceGetMemoryInfo(device, memory) == 0:
                    sizes.append(memory[0])
    return sizes


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_bfloat16_instructions() -> bool:
    """Whether the CPU multiplies bfloat16; True where the system does not say."""
    features = _PROC / "cpuinfo"
    if not features.is_file():
        return True
    words = set(features.read_text(encoding="utf-8").split())
    return not words.isdisjoint(BFLOAT16_FEATURES)


def adopt_orphans() -> None:
    _prctl(_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    _prctl(_SET_PARENT_DEATH_SIGNAL, number)


def raise_open_files_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if 0 <= soft < wanted:  # RLIM_INFINITY is -1
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def end_children(spared: Iterable[int] = (), seconds: float = math.inf) -> set[int]:
    """Kill all descendants except `spared` and theirs; returns those left after `seconds`."""
    kept = set(spared) | children_of(spared)
    until = time.monotonic() + seconds
    while left := {
        pid for pid in children_of([os.getpid()]) - kept if kernel_state(pid) not in ("Z", "X")
    }:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until:
            return left
    return set()


def killed_by(number: int, kills_before: int) -> str:
    """Returns `killed by SIGKILL` and, if known, that memory ran out since `kills_before`."""
    names = {int(each): each.name for each in signal.Signals}
    name = f"killed by {names.get(number, f'signal {number}')}"
    if number == signal.SIGKILL and out_of_memory_kills() > kills_before:
        return f"{name}: the kernel ended it because memory ran out"
    return name


def _stat(pid: int) -> list[str]:
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _memory_groups() -> Iterator[tuple[Path, str]]:
    membership = _PROC / "self/cgroup"
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield _CGROUPS, path.lstrip("/")
        elif "memory" in controllers.split(","):
            yield _CGROUPS / "memory", path.lstrip("/")


def _left_of_group(folder: Path) -> int | None:
    names = (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    )
    for limit, used, prefix in names:
        with contextlib.suppress(OSError, ValueError):  # no such file; or "max"
            left = int((folder / limit).read_text()) - int((folder / used).read_text())
            files = (
                _counter(folder / "memory.stat", f"{prefix}{kind}_file") or 0
                for kind in ("active", "inactive")
            )
            return left + sum(files)
    return None


def _counter(path: Path, name: str) -> int | None:
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value.split()[0])
    return None


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)

"""ProgramLimits of one process by the kernel, and of a program's processes together by a watcher."""

import os
import resource
from pathlib import Path
from typing import NamedTuple

from dovetail.system import children_of

MAX_PROCESSES = 64
MAX_OPEN_FILES = 64
BLOCK = 4096  # bytes
RESIDENT = ("RssAnon", "RssShmem")  # fields of /proc/PID/status, in KiB
MAX_OUTPUT = 1 << 20  # bytes of a file, and so of standard output


class ProgramLimits(NamedTuple):
    """Time and memory of one test."""

    seconds: float
    memory_mib: int


def limit_process(limits: ProgramLimits, own_user: bool) -> None:
    """own_user: nobody else's processes count among this user's."""
    bounds = [
        (resource.RLIMIT_CPU, int(limits.seconds) + 1),
        (resource.RLIMIT_AS, limits.memory_mib << 20),
        (resource.RLIMIT_FSIZE, MAX_OUTPUT),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
    ]
    if own_user:
        bounds.append((resource.RLIMIT_NPROC, MAX_PROCESSES))
    for kind, most in bounds:
        resource.setrlimit(kind, (most, most))


def beyond_limits(keeper: int, folder: Path, limits: ProgramLimits) -> bool:
    """Whether the processes below `keeper`, or the files of `folder`, are too many or too large.

    Memory that a process shares with the one that forked it counts for both.
    """
    processes = children_of([keeper])
    if len(processes) > MAX_PROCESSES:
        return True
    used = sum(_own_memory(process) for process in processes) + _size(folder)
    return used > limits.memory_mib << 20


def _own_memory(process: int) -> int:
    """Resident bytes, without those of files."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    except OSError:  # it has ended
        return 0
    fields = dict(line.split(":", 1) for line in lines)
    sizes = [fields[name].split()[0] for name in RESIDENT if name in fields]
    return sum(map(int, sizes)) << 10


def _size(folder: Path) -> int:
    """Bytes of all files; empty ones count as one block."""
    used = 0
    for path, folders, files in os.walk(folder):
        for name in (*folders, *files):
            used += BLOCK + _blocks(os.path.join(path, name))
    return used


def _blocks(path: str) -> int:
    try:
        return os.lstat(path).st_blocks * 512
    except OSError:  # it has gone
        return 0

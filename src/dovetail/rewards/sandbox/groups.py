"""A control group (version 2) for a program's processes, where this process may make one."""

import os
from contextlib import suppress
from pathlib import Path

from dovetail.rewards.sandbox.limits import MAX_PROCESSES, ProgramLimits

TOP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
NEEDED = frozenset({"memory", "pids"})


def make_group(
    name: str,
    limits: ProgramLimits,
    top: Path = TOP,
    membership: Path = MEMBERSHIP,
) -> Path | None:
    """A group beside this process's own, whose processes share `limits`; None: not allowed.

    In the group itself none could be made, as a group with processes may have no controllers.
    """
    own = _own_group(membership)
    if own is None:
        return None
    beside = top / own.lstrip("/")
    parent = beside if beside == top else beside.parent
    group = parent / name
    try:
        controllers = (parent / "cgroup.subtree_control").read_text(encoding="utf-8")
        if not set(controllers.split()) >= NEEDED:
            return None
        group.mkdir()
        _set(group / "memory.max", limits.memory_mib << 20)
        _set(group / "memory.oom.group", 1)  # all end together
        _set(group / "pids.max", MAX_PROCESSES + 1)  # and the keeper
    except OSError:
        remove_group(group)
        return None
    with suppress(OSError):  # a kernel without swap has no such file
        _set(group / "memory.swap.max", 0)
    return group


def join_group(group: Path) -> None:
    """Where that is forbidden, the watcher alone counts."""
    with suppress(OSError):
        _set(group / "cgroup.procs", os.getpid())


def remove_group(group: Path) -> None:
    """It has to be empty."""
    with suppress(OSError):
        group.rmdir()


def _own_group(membership: Path) -> str | None:
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line[3:] for line in lines if line.startswith("0::")), None)


def _set(file: Path, value: int) -> None:
    file.write_text(str(value), encoding="utf-8")

"""Namespaces of a program's own, and a root that holds only what it may read."""

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from dovetail.rewards.sandbox import kernel
from dovetail.rewards.sandbox.places import Place, links

ALL_OF_A_PROGRAM = kernel.NEW_MOUNTS | kernel.NEW_IPC | kernel.NEW_HOST_NAME
ALL_OF_A_PROGRAM |= kernel.NEW_PIDS | kernel.NEW_NET
WORK_FOLDER = "/tmp"
NEVER_SPECIAL = kernel.NO_SETUID | kernel.NO_DEVICES


def enter() -> None:
    """The next child is the first of its pid namespace: when it ends, all others end.

    With CAP_SYS_ADMIN directly, else inside a user namespace. There root would stay the owner
    of root's files, and another user could not enter root's home, where Python may be.
    """
    if kernel.may_administrate():
        kernel.leave_namespaces(ALL_OF_A_PROGRAM)
        return
    user = os.geteuid()
    if user == 0:
        raise PermissionError("root has no CAP_SYS_ADMIN")
    group = os.getegid()
    kernel.leave_namespaces(kernel.NEW_USER | ALL_OF_A_PROGRAM)
    Path("/proc/self/setgroups").write_text("deny", encoding="utf-8")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="utf-8")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="utf-8")


def build_root(folder: Path, places: Iterable[Place], memory_mib: int, user: int) -> None:
    """A read-only root in memory, made at `folder`, with an empty work folder of `memory_mib`.

    /proc shows the program's own namespace; where the container forbids that, it is empty.
    """
    root = str(folder)
    kernel.mount("none", "/", flags=kernel.RECURSIVE | kernel.PRIVATE)
    kernel.mount("tmpfs", root, "tmpfs", NEVER_SPECIAL, "size=1m,mode=755")
    for place in places:
        _bind(place, root)
    for path, target in links().items():
        os.symlink(target, root + path)
    os.symlink(WORK_FOLDER, f"{root}/dev/shm")
    for path in (WORK_FOLDER, "/proc"):
        os.mkdir(root + path)
    kernel.restrict_mounts(root, kernel.READ_ONLY | kernel.NO_SETUID)
    _mount_processes(f"{root}/proc")
    work = f"size={memory_mib}m,mode=700,uid={user},gid={user}"
    kernel.mount("tmpfs", root + WORK_FOLDER, "tmpfs", NEVER_SPECIAL, work)
    kernel.change_root(root)
    os.chdir(WORK_FOLDER)


def _bind(place: Place, root: str) -> None:
    target = Path(root + place.path)
    if os.path.isdir(place.opened):
        target.mkdir(parents=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    kernel.mount(place.opened, str(target), flags=kernel.BIND | kernel.RECURSIVE)


def _mount_processes(target: str) -> None:
    flags = NEVER_SPECIAL | kernel.NO_EXECUTION | kernel.READ_ONLY
    try:
        kernel.mount("proc", target, "proc", flags)
    except OSError as error:
        if error.errno != errno.EPERM:
            raise

"""What keeps a program from the rest of the machine: three kinds, and how a process gets them."""

import os
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, NoReturn

from dovetail.rewards.sandbox import kernel, landlock, namespaces, places, seccomp
from dovetail.rewards.sandbox.groups import join_group
from dovetail.rewards.sandbox.limits import ProgramLimits, limit_process
from dovetail.system import die_with_parent

FIRST_USER = 61184  # systemd's range for users of one service
USERS = 4336
FAILED = 1
READY = b"ready"


class Isolation(StrEnum):
    NAMESPACES = "namespaces"  # and of USER what the kernel has
    USER = "user"  # a user of its own, no capabilities, seccomp and landlock
    NONE = "none"  # limits only


class Confinement(NamedTuple):
    """How one process is kept. `folder` is empty. All files but `input`, `output` and `keep`
    are closed."""

    isolation: Isolation
    limits: ProgramLimits
    folder: Path
    keep: tuple[int, ...] = ()
    input: int = 0
    output: int = 1
    group: Path | None = None


def start(work: Callable[[], None], confinement: Confinement, report: int) -> int:
    """Runs `work` in a confined grandchild; returns the child, which ends with its status.

    The pipe `report` gets READY before the work begins, or what went wrong instead, and is
    closed when the child has ended.
    """
    keeper = os.fork()
    if keeper:
        return keeper
    try:
        _keep(work, confinement, report)
    except OSError as error:
        os.write(report, str(error).encode())
    finally:
        os._exit(FAILED)


def _keep(work: Callable[[], None], confinement: Confinement, report: int) -> None:
    die_with_parent()
    os.setsid()
    if confinement.group is not None:
        join_group(confinement.group)
    user = FIRST_USER + os.getpid() % USERS
    if confinement.isolation == Isolation.NAMESPACES:
        namespaces.enter()
    child = os.fork()
    if child:
        _exit_as(child)
    kept = _confine(confinement, user)
    die_with_parent()
    os.write(report, READY)
    os.dup2(confinement.input, 0)
    os.dup2(confinement.output, 1)
    _close_all_but({0, 1, 2, *confinement.keep, *kept})
    try:
        work()

    finally:
        os._exit(FAILED)


def _exit_as(child: int) -> NoReturn:
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(status if status >= 0 else 128 - status)


def _confine(confinement: Confinement, user: int) -> list[int]:
    """Returns open folders that the program needs."""
    isolation = confinement.isolation
    limits = confinement.limits
    is_root = os.geteuid() == 0
    if isolation == Isolation.NONE:
        os.chdir(confinement.folder)
        limit_process(limits, own_user=False)
        return []
    if isolation == Isolation.USER and not is_root:
        raise PermissionError("only root can give a program a user of its own")
    readable = places.readable_places()
    devices = places.devices()
    own = user if is_root else os.geteuid()
    if isolation == Isolation.NAMESPACES:
        shown = [*readable, *devices]
        namespaces.build_root(confinement.folder, shown, limits.memory_mib, own)
    else:
        os.chown(confinement.folder, own, own)
        os.chdir(confinement.folder)
    writable = [os.open(".", os.O_PATH), *(device.file for device in devices)]
    if is_root:
        _give_up_root(user)
    with suppress(PermissionError):  # without CAP_SETPCAP, which root may lack
        kernel.empty_bounding_set()
    kernel.drop_capabilities()
    kernel.forbid_new_privileges()
    limit_process(limits, own_user=True)
    if isolation == Isolation.USER:
        landlock.restrict_files([place.file for place in readable], writable)
        unreachable = places.import_from_opened(readable)
        seccomp.restrict_system_calls()
        return [place.file for place in unreachable]
    with suppress(OSError):  # the root holds nothing else anyway
        landlock.restrict_files([os.open("/", os.O_PATH)], writable)
    with suppress(OSError):
        seccomp.restrict_system_calls()
    return []


def _give_up_root(user: int) -> None:
    with suppress(PermissionError):
        kernel.empty_bounding_set()
    kernel.become_user(user)


def _close_all_but(kept: set[int]) -> None:
    for file in range(os.sysconf("SC_OPEN_MAX")):
        if file not in kept:
            with suppress(OSError):
                os.close(file)

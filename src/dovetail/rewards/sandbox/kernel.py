"""System calls of Linux that Python's module os lacks. All raise OSError."""

import ctypes
import os
from collections.abc import Mapping

NEW_MOUNTS = 0x00020000  # flags of unshare(2) and clone(2)
NEW_CGROUP = 0x02000000
NEW_HOST_NAME = 0x04000000
NEW_IPC = 0x08000000
NEW_USER = 0x10000000
NEW_PIDS = 0x20000000
NEW_NET = 0x40000000

READ_ONLY = 0x1  # flags of mount(2)
NO_SETUID = 0x2
NO_DEVICES = 0x4
NO_EXECUTION = 0x8
BIND = 0x1000
RECURSIVE = 0x4000
PRIVATE = 0x40000
DETACH = 0x2  # flag of umount2(2)

SET_DUMPABLE = 4  # options of prctl(2)
SET_SECCOMP = 22
READ_BOUNDING_SET = 23
DROP_FROM_BOUNDING_SET = 24
SET_NO_NEW_PRIVILEGES = 38
CHANGE_AMBIENT_SET = 47
CLEAR_AMBIENT_SET = 4
CAPABILITY_VERSION = 0x20080522
CAPABILITIES = 64
SYSTEM_ADMINISTRATION = 21  # CAP_SYS_ADMIN

PIVOT_ROOT: Mapping[str, int] = {"x86_64": 155, "aarch64": 41}  # numbers of system calls
MOUNT_SETATTR = 442
WORKING_DIRECTORY = -100
ATTRIBUTES_RECURSIVE = 0x8000


def system_call(number: int, *arguments: int | bytes | ctypes.Structure | None) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    passed = [_passed(argument) for argument in arguments]
    return _checked(libc.syscall(ctypes.c_long(number), *passed), f"system call {number}")


def _passed(argument: int | bytes | ctypes.Structure | None) -> object:
    if isinstance(argument, int):
        return ctypes.c_long(argument)
    if isinstance(argument, ctypes.Structure):
        return ctypes.byref(argument)
    return argument


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def control_process(option: int, *values: int) -> int:
    """prctl(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    passed = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    return _checked(libc.prctl(ctypes.c_int(option), *passed), f"prctl {option}")


def leave_namespaces(flags: int) -> None:
    """unshare(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    _checked(libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    texts = [text.encode() for text in (source, target, kind)]
    result = libc.mount(*texts, ctypes.c_ulong(flags), options.encode())
    _checked(result, f"mount {kind or source} on {target}")


def unmount(target: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    _checked(libc.umount2(target.encode(), DETACH), f"umount {target}")


class MountAttributes(ctypes.Structure):
    """struct mount_attr."""

    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("user_namespace", ctypes.c_uint64),
    )


def restrict_mounts(top: str, flags: int) -> None:
    """Sets flags on the mount `top` and all below it."""
    attributes = MountAttributes(set=flags)
    path = os.fsencode(top)
    size = ctypes.sizeof(attributes)
    system_call(MOUNT_SETATTR, WORKING_DIRECTORY, path, ATTRIBUTES_RECURSIVE, attributes, size)


def change_root(folder: str) -> None:
    """Makes the mount `folder` the root, and the old root unreachable."""
    os.chdir(folder)
    system_call(PIVOT_ROOT[os.uname().machine], b".", b".")
    unmount(".")
    os.chdir("/")


def may_administrate() -> bool:
    """Whether this process has CAP_SYS_ADMIN."""
    with open("/proc/self/status", encoding="utf-8") as status:
        fields = dict(line.split(":", 1) for line in status)
    return bool(int(fields["CapEff"], 16) >> SYSTEM_ADMINISTRATION & 1)


def empty_bounding_set() -> None:
    """Needs CAP_SETPCAP for each capability that is there."""
    for capability in range(CAPABILITIES):
        try:
            present = control_process(READ_BOUNDING_SET, capability)
        except OSError:  # the kernel knows no more capabilities
            return
        if present:
            control_process(DROP_FROM_BOUNDING_SET, capability)


class CapabilityHeader(ctypes.Structure):
    """struct __user_cap_header_struct."""

    _fields_ = (("version", ctypes.c_uint32), ("process", ctypes.c_int))


class CapabilitySets(ctypes.Structure):
    """Effective, permitted and inheritable capabilities: 32 low bits of each, then 32 high ones."""

    _fields_ = (("words", ctypes.c_uint32 * 6),)


def drop_capabilities() -> None:
    """Empties the ambient, effective, permitted and inheritable set."""
    control_process(CHANGE_AMBIENT_SET, CLEAR_AMBIENT_SET)
    header = CapabilityHeader(version=CAPABILITY_VERSION, process=0)
    libc = ctypes.CDLL(None, use_errno=True)
    _checked(libc.capset(ctypes.byref(header), ctypes.byref(CapabilitySets())), "capset")


def forbid_new_privileges() -> None:
    control_process(SET_NO_NEW_PRIVILEGES, 1)


def become_user(user: int) -> None:
    """Real, effective and saved user and group, without other groups."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    control_process(SET_DUMPABLE, 1)  # else /proc/self belongs to root

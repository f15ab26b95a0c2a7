"""Landlock: file access outside the given folders fails with EACCES, from Linux 5.13 on."""

import ctypes
import os
import stat
from collections.abc import Iterable

from dovetail.rewards.sandbox import kernel

CREATE_RULESET = 444  # numbers of system calls
ADD_RULE = 445
RESTRICT_SELF = 446
ASK_VERSION = 1  # flag of CREATE_RULESET
PATH_BENEATH = 1  # kind of rule

EXECUTE = 1 << 0
WRITE_FILE = 1 << 1
READ_FILE = 1 << 2
READ_FOLDER = 1 << 3
ALL_OF_VERSION_1 = (1 << 13) - 1  # removing and making too
MOVE_BETWEEN_FOLDERS = 1 << 13  # version 2
TRUNCATE = 1 << 14  # version 3
CONTROL_DEVICES = 1 << 15  # version 5
READING = EXECUTE | READ_FILE | READ_FOLDER
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | CONTROL_DEVICES
BIND_AND_CONNECT_TCP = 0b11  # version 4
ABSTRACT_SOCKETS_AND_SIGNALS = 0b11  # version 6


class Ruleset(ctypes.Structure):
    """struct landlock_ruleset_attr; kernels before version 6 know only its first fields."""

    _fields_ = (("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class PathRule(ctypes.Structure):
    """struct landlock_path_beneath_attr."""

    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("file", ctypes.c_int32))


def version() -> int:
    """Returns the version of the kernel's landlock. OSError where there is none."""
    return kernel.system_call(CREATE_RULESET, None, 0, ASK_VERSION)


def restrict_files(readable: Iterable[int], writable: Iterable[int]) -> None:
    """Holds for this process and its descendants, for ever; takes open files and folders."""
    known = version()
    files = _all_rights(known)
    net = BIND_AND_CONNECT_TCP if known >= 4 else 0
    scoped = ABSTRACT_SOCKETS_AND_SIGNALS if known >= 6 else 0
    rules = Ruleset(files=files, net=net, scoped=scoped)
    size = _known_fields(known) * ctypes.sizeof(ctypes.c_uint64)
    ruleset = kernel.system_call(CREATE_RULESET, rules, size, 0)
    for file in readable:
        _allow(ruleset, file, READING)
    for file in writable:
        _allow(ruleset, file, files)
    kernel.system_call(RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _known_fields(known: int) -> int:
    if known >= 6:
        return 3
    return 2 if known >= 4 else 1


def _all_rights(known: int) -> int:
    rights = ALL_OF_VERSION_1
    if known >= 2:
        rights |= MOVE_BETWEEN_FOLDERS
    if known >= 3:
        rights |= TRUNCATE
    if known >= 5:
        rights |= CONTROL_DEVICES
    return rights


def _allow(ruleset: int, file: int, rights: int) -> None:
    if not stat.S_ISDIR(os.fstat(file).st_mode):
        rights &= OF_FILES
    rule = PathRule(allowed=rights, file=file)
    kernel.system_call(ADD_RULE, ruleset, PATH_BENEATH, rule, 0)

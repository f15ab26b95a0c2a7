"""A seccomp filter: system calls that no program of a completion needs fail with EPERM.

The filter is a program for the kernel's BPF machine. Each instruction has a code, two relative
jumps (where a comparison holds, and where not) and a number. It reads `struct seccomp_data`:
the number of the call, the architecture, and six arguments of 64 bits.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Mapping
from typing import NamedTuple

from dovetail.rewards.sandbox import kernel

LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
JUMP_IF_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
JUMP_IF_GREATER = 0x25  # BPF_JMP | BPF_JGT | BPF_K
JUMP_IF_ANY_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
AND = 0x54  # BPF_ALU | BPF_AND | BPF_K
RETURN = 0x06  # BPF_RET | BPF_K

NUMBER = 0  # offsets in struct seccomp_data
ARCHITECTURE = 4
FIRST_ARGUMENT = 16
SECOND_ARGUMENT = 24

ALLOW = 0x7FFF0000  # results
KILL = 0x80000000
FAIL = 0x00050000  # with the errno in the low bits
MODE_FILTER = 2

AUDIT_ARCHITECTURE: Mapping[str, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
HIGHEST_NUMBER = 450  # newer calls do not exist for a program
CLONE: Mapping[str, int] = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435  # its flags lie in memory, which a filter cannot read; libc then uses clone
SOCKET_PAIR: Mapping[str, int] = {"x86_64": 53, "aarch64": 199}
SOCKET_KIND = 0xF  # of its second argument; the rest are flags
UNIX_DOMAIN = 1
STREAM = 1
NAMESPACE_FLAGS = (
    kernel.NEW_MOUNTS
    | kernel.NEW_CGROUP
    | kernel.NEW_HOST_NAME
    | kernel.NEW_IPC
    | kernel.NEW_USER
    | kernel.NEW_PIDS
    | kernel.NEW_NET
)

# memfd_create: memory that no process maps would not be counted
NAMES_AND_NUMBERS = """
socket 41 198
connect 42 203
bind 49 200
listen 50 201
accept 43 202
accept4 288 242
ptrace 101 117
process_vm_readv 310 270
process_vm_writev 311 271
kcmp 312 272
mount 165 40
umount2 166 39
pivot_root 155 41
chroot 161 51
setns 308 268
unshare 272 97
mknod 133 -
mknodat 259 33
name_to_handle_at 303 264
open_by_handle_at 304 265
sethostname 170 161
setdomainname 171 162
settimeofday 164 170
clock_settime 227 112
clock_adjtime 305 266
adjtimex 159 171
bpf 321 280
perf_event_open 298 241
userfaultfd 323 282
fanotify_init 300 262
keyctl 250 219
add_key 248 217
request_key 249 218
init_module 175 105
finit_module 313 273
delete_module 176 106
kexec_load 246 104
kexec_file_load 320 294
reboot 169 142
swapon 167 224
swapoff 168 225
acct 163 89
quotactl 179 60
syslog 103 116
vhangup 153 58
iopl 172 -
ioperm 173 -
move_pages 279 239
migrate_pages 256 238
memfd_create 319 279
shmget 29 194
shmat 30 196
semget 64 190
msgget 68 186
mq_open 240 180
pidfd_send_signal 424 424
io_uring_setup 425 425
io_uring_enter 426 426
io_uring_register 427 427
open_tree 428 428
move_mount 429 429
fsopen 430 430
fsconfig 431 431
fsmount 432 432
fspick 433 433
pidfd_getfd 438 438
process_madvise 440 440
mount_setattr 442 442
quotactl_fd 443 443
memfd_secret 447 447
process_mrelease 448 448
"""  # on x86_64 and on aarch64; -: not there


def _numbers(column: int) -> dict[str, int]:
    rows = [line.split() for line in NAMES_AND_NUMBERS.split("\n") if line]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


DENIED: Mapping[str, Mapping[str, int]] = {"x86_64": _numbers(1), "aarch64": _numbers(2)}


class Instruction(NamedTuple):
    """One instruction of the filter."""

    code: int
    number: int
    where_true: int = 0  # instructions to skip
    where_false: int = 0

    def packed(self) -> bytes:
        """struct sock_filter."""
        return struct.pack("=HBBI", self.code, self.where_true, self.where_false, self.number)


def filter_program(machine: str) -> list[Instruction]:
    """The filter of a machine, as `os.uname().machine` names it."""
    permission = Instruction(RETURN, FAIL | errno.EPERM)
    missing = Instruction(RETURN, FAIL | errno.ENOSYS)
    allowed = Instruction(RETURN, ALLOW)
    program = [
        Instruction(LOAD, ARCHITECTURE),
        Instruction(JUMP_IF_EQUAL, AUDIT_ARCHITECTURE[machine], where_true=1),
        Instruction(RETURN, KILL),  # 32-bit calls have other numbers
        Instruction(LOAD, NUMBER),
        Instruction(JUMP_IF_GREATER, HIGHEST_NUMBER, where_false=1),
        missing,
        Instruction(JUMP_IF_EQUAL, CLONE3, where_false=1),
        missing,
    ]
    for number in sorted(DENIED[machine].values()):
        program += [Instruction(JUMP_IF_EQUAL, number, where_false=1), permission]
    program += [
        Instruction(JUMP_IF_EQUAL, CLONE[machine], where_false=4),
        Instruction(LOAD, FIRST_ARGUMENT),
        Instruction(JUMP_IF_ANY_BIT, NAMESPACE_FLAGS, where_false=1),
        permission,
        allowed,
        Instruction(JUMP_IF_EQUAL, SOCKET_PAIR[machine], where_true=1),
        allowed,
        Instruction(LOAD, FIRST_ARGUMENT),
        Instruction(JUMP_IF_EQUAL, UNIX_DOMAIN, where_true=1),
        permission,
        Instruction(LOAD, SECOND_ARGUMENT),
        Instruction(AND, SOCKET_KIND),
        Instruction(JUMP_IF_EQUAL, STREAM, where_true=1),  # others have addresses
        permission,
        allowed,
    ]
    return program


class FilterProgram(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def restrict_system_calls() -> None:
    """Holds for this process and its descendants, for ever. OSError without seccomp."""
    machine = os.uname().machine
    if machine not in AUDIT_ARCHITECTURE:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}")
    program = filter_program(machine)
    instructions = b"".join(instruction.packed() for instruction in program)
    passed = FilterProgram(length=len(program), instructions=instructions)
    kernel.control_process(kernel.SET_SECCOMP, MODE_FILTER, ctypes.addressof(passed))

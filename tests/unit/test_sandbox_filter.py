"""The filter of system calls, run by a small machine for its instructions."""

import errno
import os
import re
from pathlib import Path

import pytest

from dovetail.rewards.sandbox import kernel, seccomp
from dovetail.rewards.sandbox.seccomp import Instruction, filter_program

MACHINES = tuple(seccomp.AUDIT_ARCHITECTURE)
EPERM = seccomp.FAIL | errno.EPERM
ENOSYS = seccomp.FAIL | errno.ENOSYS
HEADERS = {
    "x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h",
    "aarch64": "/usr/include/asm-generic/unistd.h",
}
WRITE = {"x86_64": 1, "aarch64": 64}
THREAD = 0x3D0F00  # what pthread_create asks clone for
STREAM = 1
DATAGRAM = 2
CLOSE_ON_EXEC = 0o2000000


def run(program: list[Instruction], fields: dict[int, int]) -> int:
    """The result for a call; fields: numbers by their offset."""
    value = 0
    at = 0
    while True:
        code, number, where_true, where_false = program[at]
        at += 1
        if code == seccomp.RETURN:
            return number
        if code == seccomp.LOAD:
            value = fields.get(number, 0)
        elif code == seccomp.AND:
            value &= number
        else:
            holds = {
                seccomp.JUMP_IF_EQUAL: value == number,
                seccomp.JUMP_IF_GREATER: value > number,
                seccomp.JUMP_IF_ANY_BIT: bool(value & number),
            }[code]
            at += where_true if holds else where_false


def result(machine: str, number: int, first: int = 0, second: int = 0) -> int:
    fields = {
        seccomp.NUMBER: number,
        seccomp.ARCHITECTURE: seccomp.AUDIT_ARCHITECTURE[machine],
        seccomp.FIRST_ARGUMENT: first,
        seccomp.SECOND_ARGUMENT: second,
    }
    return run(filter_program(machine), fields)


@pytest.mark.parametrize("machine", MACHINES)
def test_what_no_program_needs_fails(machine: str) -> None:
    numbers = sorted(seccomp.DENIED[machine].values())
    assert len(numbers) > 60
    assert {result(machine, number) for number in numbers} == {EPERM}
    assert result(machine, WRITE[machine]) == seccomp.ALLOW
    assert result(machine, seccomp.CLONE3) == ENOSYS
    assert result(machine, seccomp.HIGHEST_NUMBER + 1) == ENOSYS
    assert result(machine, 0x40000000 + WRITE[machine]) == ENOSYS, "the x32 table"


@pytest.mark.parametrize("machine", MACHINES)
def test_threads_and_pairs_of_streams_remain(machine: str) -> None:
    clone = seccomp.CLONE[machine]
    assert result(machine, clone, THREAD) == seccomp.ALLOW
    for flag in (kernel.NEW_USER, kernel.NEW_NET, kernel.NEW_PIDS):
        assert result(machine, clone, flag | 17) == EPERM
    pair = seccomp.SOCKET_PAIR[machine]
    assert result(machine, pair, seccomp.UNIX_DOMAIN, STREAM | CLOSE_ON_EXEC) == seccomp.ALLOW
    assert result(machine, pair, seccomp.UNIX_DOMAIN, DATAGRAM) == EPERM
    assert result(machine, pair, 2, STREAM) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_of_another_architecture_end_the_program(machine: str) -> None:
    fields = {seccomp.ARCHITECTURE: 0x40000003, seccomp.NUMBER: WRITE[machine]}
    assert run(filter_program(machine), fields) == seccomp.KILL


@pytest.mark.parametrize("machine", MACHINES)
def test_the_numbers_are_the_kernel_s(machine: str) -> None:
    header = Path(HEADERS[machine])
    if not header.exists():
        pytest.skip(f"no {header}")
    pattern = re.compile(r"#define __NR(?:3264)?_(\w+)\s+(\d+)$", re.MULTILINE)
    known = {name: int(number) for name, number in pattern.findall(header.read_text())}
    ours = {**seccomp.DENIED[machine]}
    ours |= {"clone": seccomp.CLONE[machine], "clone3": seccomp.CLONE3}
    ours |= {"socketpair": seccomp.SOCKET_PAIR[machine]}
    ours |= {"pivot_root": kernel.PIVOT_ROOT[machine], "mount_setattr": kernel.MOUNT_SETATTR}
    assert {name: known.get(name) for name in ours} == ours


def test_a_machine_without_a_table_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "", "", "", "riscv64")))
    with pytest.raises(OSError, match="no table of system calls for riscv64"):
        seccomp.restrict_system_calls()

"""Starts a command as another user, or as root in a container of Docker.

`python -m tests.helpers.sandbox_roles ROLE COMMAND...`; to be called as root.
"""

import ctypes
import errno
import os
import sys
from collections.abc import Mapping

from dovetail.rewards.sandbox import kernel, seccomp
from dovetail.rewards.sandbox.seccomp import Instruction

DOCKER_CAPABILITIES = (
    "chown,dac_override,fowner,fsetid,kill,setgid,setuid,setpcap,"
    "net_bind_service,net_raw,sys_chroot,mknod,audit_write,setfcap"
)
NOT_IN_DOCKER = ("unshare", "setns", "mount", "umount2", "pivot_root", "open_tree", "fsopen")
ADDED = ",".join(f"+{name}" for name in DOCKER_CAPABILITIES.split(","))
ORDINARY = ["--reuid=65534", "--regid=65534", "--clear-groups"]
ROLES: Mapping[str, list[str]] = {
    "root": [],
    "root without sys_admin": ["--bounding-set=-sys_admin", "--inh-caps=-sys_admin"],
    "root in Docker": [f"--bounding-set=-all,{ADDED}", f"--inh-caps=-all,{ADDED}"],
    "user": ORDINARY,
    "user in Docker": ORDINARY,
}


def docker_filter(machine: str) -> list[Instruction]:
    """The part of Docker's filter that forbids namespaces and mounts."""
    denied = Instruction(seccomp.RETURN, seccomp.FAIL | errno.EPERM)
    allowed = Instruction(seccomp.RETURN, seccomp.ALLOW)
    program = [Instruction(seccomp.LOAD, seccomp.NUMBER)]
    for name in NOT_IN_DOCKER:
        number = seccomp.DENIED[machine][name]
        program += [Instruction(seccomp.JUMP_IF_EQUAL, number, where_false=1), denied]
    return [
        *program,
        Instruction(seccomp.JUMP_IF_EQUAL, seccomp.CLONE[machine], where_true=1),
        allowed,
        Instruction(seccomp.LOAD, seccomp.FIRST_ARGUMENT),
        Instruction(seccomp.JUMP_IF_ANY_BIT, seccomp.NAMESPACE_FLAGS, where_false=1),
        denied,
        allowed,
    ]


def main(role: str, command: list[str]) -> None:
    if role.endswith("Docker"):
        program = docker_filter(os.uname().machine)
        instructions = b"".join(instruction.packed() for instruction in program)
        passed = seccomp.FilterProgram(length=len(program), instructions=instructions)
        address = ctypes.addressof(passed)
        kernel.control_process(kernel.SET_SECCOMP, seccomp.MODE_FILTER, address)
    os.execvp("setpriv", ["setpriv", *ROLES[role], *command])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

"""Runs a program with limits: `python sandbox.py SECONDS MEMORY_MIB OUTPUT_BYTES PROGRAM SECRET_FD RESULT_FD`.

Where the kernel allows it, in namespaces of its own: no network, no signals to others, a read-only file system and an empty
directory in memory. The secret of SECRET_FD goes to RESULT_FD if the program runs to its end.
"""

import ctypes
import os
import resource
import sys
from pathlib import Path

NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000  # unshare(2)
RECURSIVE_PRIVATE = 0x44000  # mount(2)
MOUNT_SETATTR, HERE, RECURSIVE, READ_ONLY = 442, -100, 0x8000, 1  # mount_setattr(2)
NO_NEW_PRIVILEGES = 38  # prctl(2)
MOST_PROCESSES = 64


def main(seconds: str, memory_mib: str, output_bytes: str, program: str, secret_fd: str, result_fd: str) -> None:
    source, folder = Path(program).read_text(), os.getcwd()
    secret = os.read(int(secret_fd), 1 << 10)
    os.close(int(secret_fd))
    if sys.platform == "linux":
        isolate(folder, int(memory_mib))
    for kind, most in (
        (resource.RLIMIT_CPU, int(float(seconds)) + 1),
        (resource.RLIMIT_AS, int(memory_mib) << 20),
        (resource.RLIMIT_FSIZE, int(output_bytes)),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(kind, (most, most))
    exec(compile(source, program, "exec"), {"__name__": "__main__", "__file__": program})
    sys.stdout.flush()
    os.write(int(result_fd), secret)


def isolate(folder: str, memory_mib: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    if libc.unshare((NEW_USER if user else 0) | NEW_MOUNTS | NEW_IPC | NEW_PIDS | NEW_NET):
        return
    if user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path(f"/proc/self/{name}").write_text(text)
    child = os.fork()
    if child:  # the first of its namespace: when it ends, the kernel kills the others
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    libc.prctl(1, 9)  # be killed with the parent
    libc.mount(None, b"/", None, RECURSIVE_PRIVATE, None)
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY, 0, 0, 0)
    libc.syscall(MOUNT_SETATTR, HERE, b"/", RECURSIVE, attributes, ctypes.sizeof(attributes))
    libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, f"size={memory_mib}m".encode())
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_NPROC, (MOST_PROCESSES, MOST_PROCESSES))
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])

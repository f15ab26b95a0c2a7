"""Many reads of a file in one call of the kernel: Linux's `io_submit`, which reads ordinary files at once, in order.

A loop of `os.preadv` over short stretches makes threads wait for the interpreter's lock after each; here they wait once in
hundreds of reads. Not every kernel has this, and some sandboxes forbid it; then there is no queue.
"""

import ctypes
import os
import platform
import sys
from collections.abc import Mapping
from errno import EINTR
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

READS = 256  # in one call; /proc/sys/fs/aio-max-nr bounds their sum over all queues of a machine, by default to 65536
REQUEST = np.dtype(
    [
        ("data", "<u8"),  # comes back with the result
        ("flags", "<u8"),
        ("command", "<u2"),  # 0: to read
        ("priority", "<i2"),
        ("file", "<u4"),
        ("address", "<u8"),
        ("bytes", "<u8"),
        ("offset", "<i8"),
        ("unused", "<u8", 2),
    ]
)  # the kernel's `iocb`
RESULT = np.dtype([("data", "<u8"), ("request", "<u8"), ("bytes", "<i8"), ("more", "<i8")])  # the kernel's `io_event`


class Calls(NamedTuple):
    """Numbers of system calls."""

    setup: int
    submit: int
    getevents: int


CALLS: Mapping[str, Calls] = MappingProxyType({"x86_64": Calls(206, 209, 208), "aarch64": Calls(0, 2, 4)})


class Queue:
    """Of one thread at a time. `context` is the kernel's."""

    def __init__(self, calls: Calls, context: int) -> None:
        self._calls, self._context = calls, context

    def read(self, fd: int, offsets: NDArray[np.int64], length: int, address: int) -> NDArray[np.int64]:
        """Read `length` bytes at each of `offsets` [n] of a file to `address` and behind, one after the other.

        The result [n] is how many bytes of each are there. Where they are fewer, an ordinary read tells why.
        """
        there, results, at = np.zeros(len(offsets), np.int64), np.empty(READS, RESULT), 0
        while at < len(offsets):
            numbers = np.arange(at, min(at + READS, len(offsets)))
            requests = np.zeros(len(numbers), REQUEST)
            requests["data"], requests["file"], requests["bytes"] = numbers, fd, length
            requests["offset"], requests["address"] = offsets[numbers], address + numbers * length
            pointers = requests.ctypes.data + np.arange(len(numbers)) * REQUEST.itemsize
            sent = _call(self._calls.submit, self._context, len(numbers), pointers.ctypes.data)
            if sent <= 0:
                break
            at, waiting = at + sent, sent
            while waiting:  # nothing may be under way when the caller's memory goes
                came = _call(self._calls.getevents, self._context, waiting, waiting, results.ctypes.data, 0)
                if came < 0 and ctypes.get_errno() != EINTR:
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
                waiting -= max(came, 0)
                found = results[: max(came, 0)]
                there[found["data"]] = np.maximum(found["bytes"], 0)
        return there


class Queues:
    """Those of this process, kept for its life: to end one takes the kernel as long as hundreds of reads."""

    def __init__(self) -> None:
        self._idle: list[Queue] = []
        self._more = sys.platform == "linux" and sys.byteorder == "little" and platform.machine() in CALLS
        os.register_at_fork(after_in_child=self._idle.clear)  # they are the parent's

    def take(self) -> Queue | None:
        """A queue that no thread uses, or None where the kernel gives none; `give_back` it."""
        try:
            return self._idle.pop()
        except IndexError:
            return self._made() if self._more else None

    def give_back(self, queue: Queue) -> None:
        self._idle.append(queue)

    def _made(self) -> Queue | None:
        calls, context = CALLS[platform.machine()], ctypes.c_ulong(0)
        self._more = _call(calls.setup, READS, ctypes.addressof(context)) == 0
        return Queue(calls, context.value) if self._more else None


def _call(number: int, *args: int) -> int:
    return int(_syscall(ctypes.c_long(number), *map(ctypes.c_long, args)))


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
QUEUES = Queues()

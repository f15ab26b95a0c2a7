"""Processes that die, or run out of disk, at one chosen change of the disk: every such change is counted in a child.

The wrappers live in the child alone. A child is forked from a process that has imported all and computed nothing, since
threads of a computation do not survive a fork.
"""

import builtins
import errno
import io
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

CHANGES = ("open", "fsync", "mkdir", "rename", "replace", "symlink", "unlink", "rmdir")
DIED = 9
WAIT = timedelta(seconds=60)


def _counting(original: Callable[..., Any], count: Callable[[], None]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        count()
        return original(*args, **kwargs)

    return counted


class _Raw(io.FileIO):
    """A file whose writes are counted; half of the one that dies reaches the disk."""

    def allowed(self, size: int) -> int | None:
        raise NotImplementedError

    def write(self, data: Any, /) -> int:
        allowed = self.allowed(memoryview(data).nbytes)
        if allowed is not None:
            super().write(memoryview(data).cast("B")[:allowed])
            os._exit(DIED)
        return super().write(data)


def _opened(raw: type[io.FileIO]) -> Callable[..., Any]:
    original = builtins.open

    def opened(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
        if "b" not in mode or not set(mode) & set("wxa"):
            return original(file, mode, buffering, *args, **kwargs)
        inner = raw(file, mode)
        return inner if buffering == 0 else io.BufferedWriter(inner)

    return opened


def die_at(index: int) -> None:
    """Have this process die just before its `index`-th change of the disk from now on, or in the middle of that write."""
    left = [index]

    def step() -> None:
        left[0] -= 1
        if left[0] < 0:
            os._exit(DIED)

    class Dying(_Raw):
        def allowed(self, size: int) -> int | None:
            left[0] -= 1
            return size // 2 if left[0] < 0 else None

    for name in CHANGES:
        setattr(os, name, _counting(vars(os)[name], step))
    builtins.open = _opened(Dying)


def fill_disk_after(room: int) -> Callable[[], None]:
    """Have this process's disk be full after `room` more bytes; what to call when there is space again."""
    left = [room]

    class Full(io.FileIO):
        def write(self, data: Any, /) -> int:
            size = memoryview(data).nbytes
            if size > left[0]:
                got = super().write(memoryview(data).cast("B")[: left[0]]) if left[0] else 0
                left[0] = 0
                if not got:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return got
            left[0] -= size
            return super().write(data)

    before = builtins.open
    builtins.open = _opened(Full)

    def restore() -> None:
        builtins.open = before

    return restore


def forked(action: Callable[[], object]) -> int:
    """The exit code of a child that did `action`: 0, DIED, 1 where it raised, or minus a signal."""
    child = start_fork(action)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def start_fork(action: Callable[[], object]) -> int:
    """The id of a child that does `action`."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        except BaseException as error:
            os.write(2, f"child: {error!r}\n".encode())
        finally:
            os._exit(code)
    return child


def join_group(store: Path, rank: int, world: int) -> None:
    """Meet the other children in a gloo group."""
    file = dist.FileStore(str(store), world)  # type: ignore[attr-defined]  # torch exports it without saying so
    dist.init_process_group("gloo", store=file, rank=rank, world_size=world, timeout=WAIT)


def leave_group(store: Path, rank: int, world: int) -> None:
    """Stay until all are done: who leaves first breaks the talk of the others."""
    store.with_suffix(f".{rank}").write_text("")
    while not all(store.with_suffix(f".{other}").exists() for other in range(world)):
        time.sleep(0.002)


def end_all(children: list[int]) -> None:
    """Kill the children that are left, and wait for all of them."""
    for child in children:
        os.kill(child, signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)

"""Processes that have imported all that most bodies need, and fork the harness's workers: imports are paid once, not per worker.

A template imports, and forks a worker whenever it is asked to. There are `TEMPLATES` of them, each with a hash seed of its
own, and neighboring ranks come from different ones: what follows the order of a set still differs between ranks. A process
of pytest-xdist forks the first one of itself before it collects, so that it imports for both; others are spawned. A template
has one thread, so that forking it is safe, and goes with its workers when the session's process goes.
"""

import gc
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch

from tests.conftest import AT_IMPORT, SELDOM

TEMPLATES = 2
IMPORTED = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "dovetail.cli.train",
    "dovetail.cli.score",
    "dovetail.cli.generate",
    "dovetail.cli.convert",
    "tests.helpers.layout_bodies",
    "tests.helpers.parity_bodies",
    "torch._dynamo",  # whatever has an optimizer or recomputes imports it sooner or later
)
Body = Callable[[Connection, str], None]
Orphan = tuple[Callable[..., NoReturn], tuple[Any, ...]]
STREAMS = 3


class Template:
    """The session's end of a template: starts workers, ends them, and knows their exit codes."""

    def __init__(self, body: Body, *, here: bool = False) -> None:
        """here: forked of this process, which imports."""
        context: Any = multiprocessing.get_context("fork" if here else "spawn")
        self.pipe, theirs = context.Pipe()
        # Some look at the accelerator on import, which no fork survives.
        ahead = () if torch.accelerator.is_available() else IMPORTED
        if here:
            _import(ahead)
        given = (theirs, body, ahead, self.pipe if here else None)
        self.process: BaseProcess = context.Process(
            target=_live, args=given, name="template", daemon=True
        )
        with mock.patch.dict(os.environ, AT_IMPORT):
            self.process.start()
        theirs.close()

    def fork(self, stacks: Path) -> Connection:
        """Fork a worker; its pipe, through which it tells its process id once it is there."""
        mine, theirs = multiprocessing.Pipe()
        self.pipe.send(str(stacks))
        assert self.process.pid is not None
        send_handle(self.pipe, theirs.fileno(), self.process.pid)
        theirs.close()
        return mine

    def end(self, pid: int) -> int:
        """Kill that worker if it runs; its exit code, negative for a signal."""
        self.pipe.send(pid)
        code: int = self.pipe.recv()
        return code

    def start(
        self, body: Callable[..., NoReturn], given: tuple[Any, ...], files: Sequence[int]
    ) -> int:
        """Fork a process that `body(files, *given)` never leaves, and make it an orphan; its pid."""
        self.pipe.send((body, given))
        assert self.process.pid is not None
        for file in files:
            send_handle(self.pipe, file, self.process.pid)
        pid: int = self.pipe.recv()
        return pid

    def close(self) -> None:
        """End the template. Its workers have ended before."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _import(names: tuple[str, ...]) -> None:
    for name in names:
        importlib.import_module(name)


def _live(pipe: Connection, body: Body, ahead: tuple[str, ...], parents: Connection | None) -> None:
    """A template's life: requests one after the other until the session's process goes."""
    if (
        torch.get_num_threads() != 1
    ):  # torch 2.11 makes a pool of threads here, which forks race to replace
        torch.set_num_threads(1)
    if parents is not None:
        parents.close()  # or nobody would see that it goes
    gc.set_threshold(*SELDOM)
    _import(ahead)
    assert threading.active_count() == 1 == len(os.listdir("/proc/self/task")), (
        "a fork would not have the others"
    )
    gc.collect()
    gc.freeze()  # no worker looks at it again
    workers: set[int] = set()
    with suppress(EOFError):
        while True:
            asked: str | int | Orphan = pipe.recv()
            if isinstance(asked, int):
                workers.discard(asked)
                pipe.send(_ended(asked))
                continue
            if isinstance(asked, tuple):
                pipe.send(_orphan(*asked, [recv_handle(pipe) for _ in range(STREAMS)]))
                continue
            handle = recv_handle(pipe)
            if pid := os.fork():
                os.close(handle)
                workers.add(pid)
            else:
                pipe.close()
                _work(body, Connection(handle), asked)
    for pid in workers:
        _ended(pid)
    os._exit(0)


def _orphan(body: Callable[..., NoReturn], given: tuple[Any, ...], files: Sequence[int]) -> int:
    """Fork a child that forks `body` and ends; the pid of the second one, who has the session's process for a parent then."""
    reader, writer = os.pipe()
    between = os.fork()
    if not between:
        between = os.getpid()
        if pid := os.fork():
            os.write(writer, str(pid).encode())
            os._exit(0)
        while os.getppid() == between:
            time.sleep(0.0005)
        body(files, *given)
    os.waitpid(between, 0)
    pid = int(os.read(reader, 32))
    for file in (reader, writer, *files):
        os.close(file)
    return pid


def _ended(pid: int) -> int:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _work(body: Body, pipe: Connection, stacks: str) -> NoReturn:
    """The life of a worker, which never returns into its template's. Gloo's threads may abort a process at a normal exit."""
    try:
        body(pipe, stacks)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)

"""Processes that have imported all that most bodies need, and fork the harness's workers: imports are paid once, not per worker.

A template is spawned, imports, and forks a worker whenever it is asked to. There are `TEMPLATES` of them, each with a hash
seed of its own, and neighboring ranks come from different ones: what follows the order of a set still differs between
ranks. A template has one thread, so that forking it is safe, and goes with its workers when the session's process goes.
"""

import gc
import importlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import NoReturn
from unittest import mock

import torch

TEMPLATES = 2
IMPORTED = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "dovetail.cli.train",
    "dovetail.cli.score",
    "dovetail.cli.generate",
    "dovetail.cli.convert",
    "tests.distributed.bodies",
    "tests.parity.bodies",
    "torch._dynamo",  # whatever has an optimizer or recomputes imports it sooner or later
)
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
Body = Callable[[Connection, str], None]


class Template:
    """The session's end of a template: starts workers, ends them, and knows their exit codes."""

    def __init__(self, body: Body) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        # Some look at the accelerator on import, which no fork survives.
        given = (theirs, body, () if torch.accelerator.is_available() else IMPORTED)
        self.process: BaseProcess = context.Process(target=_live, args=given, name="template", daemon=True)
        with mock.patch.dict(os.environ, ONE_THREAD):  # libraries of arithmetic start theirs on import
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

    def close(self) -> None:
        """End the template. Its workers have ended before."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _live(pipe: Connection, body: Body, ahead: tuple[str, ...]) -> None:
    """A template's life: requests one after the other until the session's process goes."""
    torch.set_num_threads(1)
    for name in ahead:
        importlib.import_module(name)
    assert threading.active_count() == 1 == len(os.listdir("/proc/self/task")), "a fork would not have the others"
    gc.collect()
    gc.freeze()  # no worker looks at it again
    workers: set[int] = set()
    with suppress(EOFError):
        while True:
            asked: str | int = pipe.recv()
            if isinstance(asked, int):
                workers.discard(asked)
                pipe.send(_ended(asked))
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

"""Programs that are forked from a process that has imported what they need, instead of executed: the start of one costs seconds.

`ForkedProgram` is a Popen whose child a template of the harness forks, and which becomes this process's own child; in it,
`_ForkedRank` stands in for the Popen by which the launcher starts ranks, and forks as well. Everything else is as in a
program that was executed: a process of its own, with its environment, directory, descriptors, signals and exit code. Where the
start itself is what is tested, programs are executed.
"""

import contextlib
import ctypes
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import torch

from tests.helpers.template import Template

SET_NAME, SET_CHILD_SUBREAPER = 15, 36  # prctl(2)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
INHERITED = {
    "PYTHONPATH",
    "TMPDIR",
    "TORCH_CPP_LOG_LEVEL",
    "TERM",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}
TORCHRUN = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"  # has a Popen of its own
CAN_FORK = (
    sys.platform == "linux" and not torch.accelerator.is_available()
)  # which no fork survives
Place = Callable[[], Template]


class Command(NamedTuple):
    """What a program runs, and where."""

    words: tuple[str, ...]  # after the interpreter: [-P] -m MODULE or SCRIPT, and its arguments
    env: dict[str, str]
    cwd: str
    new_session: bool

    @property
    def name(self) -> str:
        """What /proc calls it: forked processes have their template's command line."""
        return f"rank {self.env['RANK']}" if "RANK" in self.env else "dovetail"


def can_fork(
    command: Sequence[str], added: Mapping[str, str] | None, options: Mapping[str, Any]
) -> bool:
    """Whether a program may be forked: a module of ours or a script, and nothing that acts on the start of Python."""
    ours = command[1:3] == ["-m", "dovetail"] or command[1].endswith(".py")
    return (
        ours
        and {*(added or ())} <= INHERITED
        and {*options} <= {"cwd", "start_new_session", "stdout", "stderr"}
    )


def popen(template: Place, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """`python -m MODULE` or `python SCRIPT`, forked where a template can be; texts in pipes, unless `options` say otherwise."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return (
        ForkedProgram(template, command, **options)
        if CAN_FORK
        else subprocess.Popen(command, **options)
    )


def output_of(template: Place, module: str, *arguments: object, **env: str) -> str:
    """What `python -m module` prints, with more in its environment. It must end well."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    process = popen(template, command, stderr=None, env={**os.environ, **env})
    out, _ = process.communicate()
    assert process.returncode == 0, f"{module} ended with {process.returncode}"
    return out


class _Forked(subprocess.Popen[Any]):
    """A Popen whose child `spawn` makes. Arguments of `_execute_child` as in Python 3.11 to 3.14."""

    def spawn(self, command: Command, files: tuple[int, int, int], kept: Sequence[int]) -> int:
        raise NotImplementedError

    def _execute_child(self, *given: Any) -> None:
        args, pass_fds, cwd, env = (given[i] for i in (0, 4, 5, 6))
        stdin, stdin_writer, stdout_reader, stdout, stderr_reader, stderr = given[10:16]
        command = Command(
            tuple(map(str, args[1:])),
            dict(os.environ if env is None else env),
            str(cwd or os.getcwd()),
            bool(given[21]),
        )
        files = tuple(i if fd == -1 else fd for i, fd in enumerate((stdin, stdout, stderr)))
        self.pid = self.spawn(command, files, pass_fds)  # type: ignore[arg-type]  # three
        self._child_created = True
        self._close_pipe_fds(stdin, stdin_writer, stdout_reader, stdout, stderr_reader, stderr)  # type: ignore[attr-defined]


class ForkedProgram(_Forked):
    """One that a template forks. The template's child forks and ends; its orphan comes to us, who are the next reaper."""

    def __init__(self, template: Place, command: Sequence[str], **options: Any) -> None:
        self.template = template
        super().__init__(command, **options)

    def spawn(self, command: Command, files: tuple[int, int, int], kept: Sequence[int]) -> int:
        template = self.template()
        _prctl(SET_CHILD_SUBREAPER, 1)
        try:
            return template.start(become, (command, ()), files)
        finally:
            _prctl(SET_CHILD_SUBREAPER, 0)


class _ForkedRank(_Forked):
    """One that the launcher forks itself. It is executed where it is no rank: workers, which have a program of their own."""

    def _execute_child(self, *given: Any) -> None:
        rank = given[0][0] == sys.executable and "RANK" in (given[6] or ()) and "-c" not in given[0]
        (super() if rank else super(_Forked, self))._execute_child(*given)  # type: ignore[attr-defined]  # which types leave out

    def spawn(self, command: Command, files: tuple[int, int, int], kept: Sequence[int]) -> int:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        with warnings.catch_warnings(
            action="ignore", category=DeprecationWarning
        ):  # of threads, which the launcher has
            pid = os.fork()
        if not pid:
            become(files, command, kept)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid


def become(files: Sequence[int], command: Command, kept: Sequence[int]) -> NoReturn:
    """Turn this process, just forked, into that program; keeps the descriptors `kept`."""
    code = 1
    try:
        _take_place(files, command, kept)
        words = [word for word in command.words if word not in ("-P", "-u")]
        with contextlib.ExitStack() as patches:
            for module in (subprocess, sys.modules.get(TORCHRUN)):
                if module is not None:
                    patches.enter_context(mock.patch.object(module, "Popen", _ForkedRank))
            if words[0] == "-m":
                sys.argv = words[1:]
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = words
                runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _take_place(files: Sequence[int], command: Command, kept: Sequence[int]) -> None:
    """Descriptors, session, name, signals, directory, environment and streams as an executed program has them."""
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    high = [os.dup(fd) for fd in files]
    for i, fd in enumerate(high):
        os.dup2(fd, i)
    last = 2
    for fd in sorted(kept):
        os.closerange(last + 1, fd)
        os.set_inheritable(fd, True)
        last = fd
    os.closerange(last + 1, 4096)
    if command.new_session:
        os.setsid()
    _prctl(SET_NAME, command.name.encode())
    os.chdir(command.cwd)
    os.environ.clear()
    os.environ.update(command.env)
    tempfile.tempdir = None
    if "TRITON_INTERPRET" in command.env:  # what is imported would compile
        for name in [
            name
            for name in sys.modules
            if name.startswith("triton") and not name.startswith("triton._C")
        ]:
            del sys.modules[name]
    first = (
        []
        if "-P" in command.words
        else [command.cwd if command.words[0] == "-m" else os.path.dirname(command.words[0])]
    )
    wanted = [*first, *filter(None, command.env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:] = [*wanted, *(path for path in sys.path if path not in wanted)]
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(i, mode, closefd=False) for i, mode in enumerate("rww")
    )


def _prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)

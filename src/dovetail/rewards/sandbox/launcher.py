"""The process that starts programs and watches them. It holds no tests and no expected output,
as its memory is copied into each program.

Requests and answers are JSON lines on standard input and output.
"""

import importlib
import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dovetail.rewards.sandbox import program
from dovetail.rewards.sandbox.groups import make_group, remove_group
from dovetail.rewards.sandbox.isolation import READY, Confinement, Isolation, start
from dovetail.rewards.sandbox.limits import MAX_OUTPUT, ProgramLimits, beyond_limits
from dovetail.rewards.sandbox.peer import Channel
from dovetail.system import adopt_orphans, children_of

POLL_SECONDS = 0.1  # between two looks at a program's processes
START_SECONDS = 30.0
GRACE_SECONDS = 1.0  # of wall time
END_POLL_SECONDS = 0.001
SEARCH_SECONDS = 0.02  # until those that outlived their keeper are looked for
END_SECONDS = 5.0
MAX_REPORT = 1 << 12  # bytes
UNNAMED = "file"
KILLED = 137  # status of a program beyond its limits


Work = Callable[[], None]


class Started(NamedTuple):
    """A confined process: its parent, and the pipe that tells whether it started and ended."""

    keeper: int
    report: int
    folder: Path


class Launcher:
    """Runs the tests of one completion, one after the other.

    tests: an open file, which only processes of tests read.
    """

    def __init__(self, isolation: Isolation, limits: ProgramLimits, tests: int) -> None:
        self._isolation = isolation
        self._limits = limits
        self._tests = tests
        self._count = 0
        self._keepers: list[int] = []  # children that have not been waited for

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """{"status": of the process that decides, "output": text}; {"error": why not started}."""
        with ExitStack() as stack:
            self._keepers.clear()
            try:
                if "tests" in request:
                    return self._run_tests(stack, request["program"], request["tests"])
                return self._run_with_input(stack, request["program"], request["input"])
            finally:
                _end_all(self._keepers)

    def _run_with_input(self, stack: ExitStack, source: str, text: str) -> dict[str, Any]:
        given = _unnamed_file(stack)
        printed = _unnamed_file(stack)
        os.write(given, text.encode(errors="replace"))
        os.lseek(given, 0, os.SEEK_SET)
        streams = {"input": given, "output": printed}
        started = self._start(stack, partial(program.run_program, source), streams)
        answer = self._await([started])
        output = os.pread(printed, MAX_OUTPUT, 0)
        return {**answer, "output": output.decode(errors="replace")}

    def _run_tests(self, stack: ExitStack, source: str, place: Seq[int]) -> dict[str, Any]:
        from_program, to_tests = os.pipe()
        from_tests, to_program = os.pipe()
        of_program = Channel(from_tests, to_tests)
        of_tests = Channel(from_program, to_program)
        work = partial(program.serve_program, source, of_program)
        serving = self._start(stack, work, {"keep": of_program})
        _close(of_program)  # else the tests would not see that the program ends
        work = partial(_run_tests_at, self._tests, place, of_tests)
        testing = self._start(stack, work, {"keep": (*of_tests, self._tests)})
        _close(of_tests)
        return self._await([testing, serving])

    def _start(self, stack: ExitStack, work: Work, files: Mapping[str, Any]) -> Started:
        self._count += 1
        folder = Path(f"{os.getcwd()}/{self._count}")
        folder.mkdir()
        stack.callback(_remove, folder)
        group = make_group(f"dovetail-{os.getpid()}-{self._count}", self._limits)
        if group is not None:
            stack.callback(remove_group, group)
        confinement = Confinement(self._isolation, self._limits, folder, group=group, **files)
        report, end = os.pipe()
        stack.callback(os.close, report)
        keeper = start(work, confinement, end)
        self._keepers.append(keeper)
        os.close(end)
        return Started(keeper, report, folder)

    def _await(self, processes: Seq[Started]) -> dict[str, Any]:
        """Until the first of them ends, whose status is the answer."""
        for process in processes:
            error = _error_at_start(process)
            if error is not None:
                return {"error": error}
        deciding = processes[0]
        deadline = time.monotonic() + self._limits.seconds + GRACE_SECONDS
        while time.monotonic() < deadline:
            if _readable(deciding.report, POLL_SECONDS):  # its end has been closed
                self._keepers.remove(deciding.keeper)
                status = os.waitstatus_to_exitcode(os.waitpid(deciding.keeper, 0)[1])
                return {"status": status}
            if any(beyond_limits(each.keeper, each.folder, self._limits) for each in processes):
                break
        return {"status": KILLED}


def _error_at_start(process: Started) -> str | None:
    if not _readable(process.report, START_SECONDS):
        return f"no process within {START_SECONDS:g} s"
    text = os.read(process.report, MAX_REPORT)
    if text == READY:
        return None
    return text.decode(errors="replace") or "the process ended before it was ready"


def _readable(file: int, seconds: float) -> bool:
    return bool(select.select([file], [], [], seconds)[0])


def _unnamed_file(stack: ExitStack) -> int:
    """Opens a file without a name, for reading and writing."""
    file = os.open(UNNAMED, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.unlink(UNNAMED)
    stack.callback(os.close, file)
    return file


def _remove(folder: Path) -> None:
    """Removes a folder with what a program has left there."""
    try:
        folder.rmdir()
    except OSError:
        importlib.import_module("shutil").rmtree(folder, ignore_errors=True)


def _close(channel: Channel) -> None:
    os.close(channel.source)
    os.close(channel.target)


def _run_tests_at(file: int, place: Seq[int], channel: Channel) -> None:
    offset, size = place
    program.run_tests(os.pread(file, size, offset).decode(), channel)


def _end_all(keepers: Iterable[int]) -> None:
    """Ends every process below this one: orphans come here, as it adopts them."""
    _kill(keepers)
    began = time.monotonic()
    with suppress(ChildProcessError):  # there is none any more
        while time.monotonic() < began + END_SECONDS:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
            time.sleep(END_POLL_SECONDS)
            if time.monotonic() > began + SEARCH_SECONDS:
                _kill(children_of([os.getpid()]))


def _kill(processes: Iterable[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


def main() -> None:
    adopt_orphans()
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    with open(os.devnull, "r+b", buffering=0) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    setup = json.loads(requests.readline())
    limits = ProgramLimits(setup["seconds"], setup["memory_mib"])
    launcher = Launcher(Isolation(setup["isolation"]), limits, setup["tests"])
    for line in requests:
        answers.write(json.dumps(launcher.run(json.loads(line))) + "\n")

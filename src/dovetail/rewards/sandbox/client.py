"""Programs of completions, run by a launcher in a process of its own."""

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from dovetail.rewards.sandbox.isolation import Isolation
from dovetail.rewards.sandbox.launcher import END_SECONDS
from dovetail.rewards.sandbox.limits import ProgramLimits
from dovetail.system import children_of

SOURCES = str(Path(__file__).parents[3])
BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from dovetail.rewards.sandbox.launcher import main; del sys.path[0]; main()"
)
OTHERS_MAY_ENTER = 0o711
HERE = "."  # of a program: its work folder
ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/usr/bin:/bin",
    "HOME": HERE,
    "TMPDIR": HERE,
    "OMP_NUM_THREADS": "1",
}
TRIAL = ProgramLimits(seconds=5.0, memory_mib=256)


class IsolationError(RuntimeError):
    """Programs cannot be kept from this machine."""


@dataclass(frozen=True)
class ProgramResult:
    """How a test ended; `output`: what the program printed, where it got an input."""

    status: int
    output: str = ""


class Sandbox:
    """Runs one test after the other. Used by `with`, which ends all that it has started."""

    def __init__(self, isolation: Isolation, limits: ProgramLimits) -> None:
        self._limits = limits
        self._stack = ExitStack()
        files = self._stack.enter_context
        self._tests = files(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
        folder = files(tempfile.TemporaryDirectory())
        os.chmod(folder, OTHERS_MAY_ENTER)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", BOOT, SOURCES],
            cwd=folder,
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(self._tests.fileno(),),
        )
        self._send(
            {
                "isolation": isolation,
                "seconds": limits.seconds,
                "memory_mib": limits.memory_mib,
                "tests": self._tests.fileno(),
            }
        )

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """The launcher ends what it has started, and itself."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            for process in {*children_of([self._process.pid]), self._process.pid}:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()
        self._stack.close()

    def run_with_input(self, program: str, text: str) -> ProgramResult:
        return self._ask({"program": program, "input": text})

    def run_tests(self, program: str, tests: str) -> ProgramResult:
        """Status 0 if `tests`, Python that uses names of the program, runs to its end."""
        offset = self._tests.seek(0, os.SEEK_END)
        data = tests.encode(errors="replace")
        self._tests.write(data)
        self._tests.flush()
        return self._ask({"program": program, "tests": [offset, len(data)]})

    def _ask(self, request: dict[str, Any]) -> ProgramResult:
        self._send(request)
        answer = json.loads(self._answer())
        if "error" in answer:
            raise IsolationError(answer["error"])
        return ProgramResult(answer["status"], answer.get("output", ""))

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def _answer(self) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise IsolationError("the process that starts programs has ended")
        return line


@functools.cache
def strongest_isolation() -> Isolation:
    """What this machine has, by a trial. IsolationError where it has none."""
    causes = []
    for isolation in (Isolation.NAMESPACES, Isolation.USER):
        try:
            with Sandbox(isolation, TRIAL) as sandbox:
                sandbox.run_with_input("", "")
        except IsolationError as error:
            causes.append(f"{isolation}: {error}")
        else:
            return isolation
    raise IsolationError(
        f"programs of completions cannot be kept from this machine ({'; '.join(causes)}). "
        "Run as root, or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
        "user.max_user_namespaces above 0) and a kernel with seccomp and landlock; "
        "or set reward.options.isolation: none, and each program can read, change and send "
        "whatever this user can"
    )

"""A completion's program against the tests of its row, in a process with limits."""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence as Seq
from contextlib import suppress
from pathlib import Path
from typing import Any

from dovetail.system import adopt_orphans, children_of, end_children

_BLOCK = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_SANDBOX = str(Path(__file__).with_name("sandbox.py"))
MOST_OUTPUT = 1 << 20  # bytes of a test
END_SECONDS = 5.0


def code(
    completion: str, answer: Any, _finish: str, *, seconds: float = 5.0, memory_mib: int = 512, partial: bool = False
) -> float:
    """1 if the last ```python block of the completion passes all tests of the answer; partial: the share that it passes.

    The answer, or its JSON text: {"inputs": [...], "outputs": [...]} compares standard output by line (with "fn_name": what
    that function, or that method of a class Solution, returns); a string or list of assert statements;
    {"test": ..., "entry_point": ...} defines check(candidate).
    A test has `seconds` and `memory_mib`, no network where the kernel allows it, and an empty directory.
    """
    program = _BLOCK.findall(completion)[-1:] or [completion]
    adopt_orphans()
    passed, total = 0, 0
    for source, text, expected in tests(program[0], answer):
        ok = _passes(source, text, expected, seconds, memory_mib)
        if not (ok or partial):
            return 0.0
        passed, total = passed + ok, total + 1
    if not total:
        raise ValueError(f"the answer holds no tests: {answer!r:.200}")
    return passed / total


def tests(program: str, answer: Any) -> Iterable[tuple[str, str, str | None]]:
    """Source, standard input, and standard output (None: it only has to end well)."""
    match _decoded(answer):
        case {"inputs": [*inputs], "outputs": [*outputs], "fn_name": str() as name}:
            for given, expected in zip(inputs, outputs, strict=True):
                yield f"{program}\n\n{_CALL.format(name=name, given=_arguments(given), expected=expected)}", "", None
        case {"inputs": [*inputs], "outputs": [*outputs]}:
            for given, expected in zip(inputs, outputs, strict=True):
                yield program, _text(given), _text(expected)
        case {"test": str() as test, "entry_point": str() as name}:
            yield f"{program}\n\n{test}\n\ncheck({name})\n", "", None
        case str() as asserts:
            yield f"{program}\n\n{asserts}\n", "", None
        case [*asserts]:
            for line in asserts:
                yield f"{program}\n\n{line}\n", "", None


_CALL = """
_call = Solution().{name} if "Solution" in globals() else {name}
_value, _expected = _call(*{given!r}), {expected!r}
_value = list(_value) if isinstance(_value, tuple) else _value
assert _value == _expected or [_value] == _expected
"""


def _decoded(answer: Any) -> Any:
    if isinstance(answer, str) and answer.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(answer)
        except ValueError:
            return answer
    return answer


def _arguments(given: Any) -> list[Any]:
    """Text holds one JSON value a line."""
    return [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else list(given)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _passes(source: str, text: str, expected: str | None, seconds: float, memory_mib: int) -> bool:
    secret, others = secrets.token_bytes(16), children_of([os.getpid()])
    temporary = tempfile.TemporaryFile
    with tempfile.TemporaryDirectory() as folder, temporary() as given, temporary() as printed:
        Path(folder, "program.py").write_text(source, errors="replace")
        given.write(text.encode(errors="replace"))
        given.seek(0)
        secret_out, secret_in = os.pipe()
        result_out, result_in = os.pipe()
        os.write(secret_in, secret)
        limits = [str(seconds), str(memory_mib), str(MOST_OUTPUT), "program.py", str(secret_out), str(result_in)]
        process = subprocess.Popen(
            [sys.executable, "-I", _SANDBOX, *limits],
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "HOME": folder, "OMP_NUM_THREADS": "1"},
            stdin=given,
            stdout=printed,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(secret_out, result_in),
        )
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds + END_SECONDS / 5)
        _end_all(process, others)
        for fd in (secret_out, secret_in, result_in):
            os.close(fd)
        with open(result_out, "rb") as result:
            ran_all = secrets.compare_digest(result.read(len(secret)), secret)
        if expected is None:
            return ran_all
        printed.seek(0)
        output = printed.read(MOST_OUTPUT).decode(errors="replace")
        return (ran_all or process.returncode == 0) and _lines(output) == _lines(expected)


def _end_all(process: "subprocess.Popen[bytes]", others: set[int]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    end_children(others, END_SECONDS)
    for pid in children_of([os.getpid()]) - others:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _lines(text: str) -> Seq[str]:
    return [line.rstrip() for line in text.strip().splitlines()]

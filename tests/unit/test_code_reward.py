"""The reward `code`: what passes, and programs that try to do harm."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dovetail.rewards import sandbox
from dovetail.rewards.code import code
from dovetail.system import children_of

SUM = "a, b = map(int, input().split())\nprint(a + b)"
SUM_TESTS = {"inputs": ["1 2\n", "3 4"], "outputs": ["3\n", "7"]}
ONE = ["assert True"]


def block(program: str) -> str:
    return f"Let me think.\n```python\nwrong\n```\nBetter:\n```python\n{program}\n```\nDone."


@pytest.mark.parametrize(
    ("program", "answer", "expected"),
    [
        (SUM, SUM_TESTS, 1.0),
        (SUM + "\nraise SystemExit(0)", SUM_TESTS, 1.0),
        (SUM + "\nraise SystemExit(1)", SUM_TESTS, 0.0),
        ("print(3)", SUM_TESTS, 0.0),
        (SUM, '{"inputs": ["1 2"], "outputs": ["3"]}', 1.0),
        ("def f(x):\n    return 2 * x", ["assert f(2) == 4", "assert f(3) == 6"], 1.0),
        ("def f(x):\n    return x + 2", ["assert f(2) == 4", "assert f(3) == 6"], 0.0),
        ("def f(x):\n    return 2 * x", "assert f(2) == 4\nassert f(3) == 6", 1.0),
        ("class Solution:\n    def f(self, a):\n        return a + 1", {"fn_name": "f", "inputs": [[1]], "outputs": [2]}, 1.0),
        ("def f(a, b):\n    return a + b", {"fn_name": "f", "inputs": ["1\n2"], "outputs": [4]}, 0.0),
        ("def f(x):\n    return x", {"test": "def check(c):\n    assert c(1) == 1", "entry_point": "f"}, 1.0),
        ("def f(x):\n    return 0", {"test": "def check(c):\n    assert c(1) == 1", "entry_point": "f"}, 0.0),
        ("import math, collections, heapq\nprint(math.sqrt(4))", {"inputs": [""], "outputs": ["2.0"]}, 1.0),
        ("with open('f', 'w') as f:\n    f.write('x')\nassert open('f').read() == 'x'", ONE, 1.0),
    ],
)  # fmt: skip
def test_programs_are_worth_what_their_tests_say(program: str, answer: object, expected: float) -> None:
    assert code(block(program), answer, "stop") == expected


def test_a_part_of_the_tests_counts_only_where_asked() -> None:
    assert code("print(3)", SUM_TESTS, "stop", partial=True) == 0.5, "text without a block is the program"
    with pytest.raises(ValueError, match="the answer holds no tests"):
        code("print(3)", [], "stop")


HARM = {
    "endless loop": "while True: pass",
    "sleep": "import time; time.sleep(1000)",
    "one large allocation": "x = bytearray(2 << 30)",
    "many allocations": "x = []\nwhile True: x.append('a' * 10**6)",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(100,)).start()",
    "leaves before the tests": "import os; os._exit(0)",
    "exits before the tests": "import sys; sys.exit(0)",
    "exits by exception": "raise SystemExit",
    "kills itself": "import os, signal; os.kill(os.getpid(), signal.SIGTERM); os.abort()",
    "large file": "open('big', 'wb').write(b'x' * (1 << 30))",
    "recursion": "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "syntax": "def (:",
    "regular expression": "import re; re.match('(a+)+b', 'a' * 64)",
    "execs another program": "import os; os.execv('/bin/true', ['true'])",
    "closes every file": "import os\nfor i in range(64):\n    try: os.close(i)\n    except OSError: pass",
    "writes to files": "import os\nfor i in range(64):\n    try: os.write(i, bytes(9))\n    except OSError: pass\nos._exit(0)",
    "memory map": "import mmap; mmap.mmap(-1, 8 << 30)",
}
LIKE_OTHERS = (
    "sleep",
    "one large allocation",
    "threads",
    "exits before the tests",
    "regular expression",
    "writes to files",
)


@pytest.mark.skipif(sys.platform != "linux", reason="limits are Linux's")
@pytest.mark.parametrize(
    "harm", [pytest.param(name, marks=[pytest.mark.soak] * (name in LIKE_OTHERS)) for name in HARM]
)
def test_a_harmful_program_fails_alone(harm: str) -> None:
    before, started = children_of([os.getpid()]), time.monotonic()
    assert code(block(HARM[harm]), ONE, "stop", seconds=0.5, memory_mib=256) == 0.0
    assert time.monotonic() - started < 30.0
    assert children_of([os.getpid()]) <= before


def namespaces_allowed() -> bool:
    """Whether the kernel lets a program be kept from this machine's files and network."""
    flags = sandbox.NEW_MOUNTS | sandbox.NEW_IPC | sandbox.NEW_PIDS | sandbox.NEW_NET
    flags |= sandbox.NEW_USER if os.geteuid() else 0
    asked = f"import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare({flags}) != 0)"
    return subprocess.run([sys.executable, "-c", asked], check=False).returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="limits are Linux's")
def test_a_program_reaches_neither_the_network_nor_files_nor_processes(tmp_path: Path) -> None:
    if not namespaces_allowed():
        pytest.skip("the kernel allows no namespaces here")
    victim = tmp_path / "file"
    victim.write_text("mine")
    programs = [
        f"open({str(victim)!r}, 'w').write('theirs')",
        f"import os; os.unlink({str(victim)!r})",
        "import socket; socket.create_connection(('127.0.0.1', 22), 2)",
        "import socket; socket.getaddrinfo('example.org', 80)",
        f"import os; os.kill({os.getpid()}, 0)",
    ]
    assert [code(block(program), ONE, "stop") for program in programs] == [0.0] * len(programs)
    assert victim.read_text() == "mine"


@pytest.mark.skipif(sys.platform != "linux", reason="limits are Linux's")
def test_a_daemon_ends_with_its_program() -> None:
    program = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(1000)\n    os._exit(0)"
    )
    before = children_of([os.getpid()])
    assert code(block(program), ONE, "stop") == 1.0
    assert children_of([os.getpid()]) <= before

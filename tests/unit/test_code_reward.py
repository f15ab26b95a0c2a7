"""The reward `code`: what passes, and programs that try to do harm."""

import os
import sys
import time
from typing import Any

import pytest

from dovetail.rewards.code import code
from dovetail.rewards.sandbox.client import IsolationError
from dovetail.rewards.signatures import load
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
def test_programs_are_worth_what_their_tests_say(
    program: str, answer: object, expected: float
) -> None:
    assert code(block(program), answer, "stop") == expected


CONVERSATIONS = {
    "changes its argument": ("def f(a): a.sort()", "a = [3, 1]\nf(a)\nassert a == [1, 3]"),
    "changes within": ("def f(m): m[0][0] = 9", "m = [[1]]\nf(m)\nassert m == [[9]]"),
    "calls back": (
        "def f(g, xs): return [g(x) for x in xs]",
        "assert f(lambda x: 2 * x, [1, 2]) == [2, 4]",
    ),
    "object of a class": (
        "class Stack:\n"
        "    def __init__(self): self.items = []\n"
        "    def push(self, x): self.items.append(x)\n"
        "    def __len__(self): return len(self.items)\n"
        "    def __eq__(self, other): return self.items == other.items",
        "s = Stack()\ns.push(3)\nassert len(s) == 1 and s.items == [3] and isinstance(s, Stack)\n"
        "t = Stack()\nassert s != t\nt.push(3)\nassert s == t",
    ),
    "object of the tests": (
        "def f(n): return 0 if n is None else 1 + f(n.next)",
        "class Node:\n    def __init__(self, next): self.next = next\nassert f(Node(Node(None))) == 2",
    ),
    "exception of its own": (
        "class Bad(ValueError): pass\ndef f(x): raise Bad('no')",
        "try: f(1)\nexcept Bad as e: assert str(e) == 'no'\nelse: assert False\ntry: f(1)\nexcept ValueError: pass",
    ),
    "generator": ("def f(n): yield from range(n)", "assert list(f(3)) == [0, 1, 2]"),
    "coroutine": ("async def f(x): return x", "import asyncio\nassert asyncio.run(f(1)) == 1"),
    "module": ("import math\ndef f(x): return math.sqrt(x)", "assert math.isclose(f(2) ** 2, 2)"),
    "name of a built-in": ("def sum(a, b): return a + b", "assert sum(1, 2) == 3"),
    "plain data": (
        "from collections import Counter, namedtuple\nP = namedtuple('P', 'x y')\n"
        "def f(): return [{'a': (1, {2})}, P(1, 2), Counter('aab'), b'x', 1 + 2j, 2**9999, None]",
        "assert f() == [{'a': (1, {2})}, (1, 2), {'a': 2, 'b': 1}, b'x', 1 + 2j, 2**9999, None]",
    ),
    "dates and fractions": (
        "import datetime, decimal, fractions\n"
        "def f(): return [datetime.date(2020, 1, 2), decimal.Decimal('1.1'), fractions.Fraction(1, 3)]",
        "import datetime, decimal, fractions\n"
        "assert f() == [datetime.date(2020, 1, 2), decimal.Decimal('1.10'), fractions.Fraction(2, 6)]",
    ),
    "arrays": (
        "import numpy as np\ndef f(x): return np.array(x) * 2",
        "assert np.allclose(f([1, 2]), [2, 4]) and f([1, 2]).shape == (2,)",
    ),
    "unittest": (
        "def f(x): return x",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 1)\nunittest.main()",
    ),
}
COMMON = ("changes its argument", "object of a class", "exception of its own", "plain data")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.soak] * (name not in COMMON)) for name in CONVERSATIONS],
)
def test_tests_use_a_program_as_if_it_were_theirs(name: str) -> None:
    program, tests = CONVERSATIONS[name]
    assert code(block(program), tests, "stop") == 1.0


def test_a_program_does_not_decide_what_a_built_in_means() -> None:
    program = "def f(x): return 0\ndef all(x): return True\ndef isinstance(*x): return True"
    assert code(block(program), "assert all(f(x) == x for x in [1, 2])", "stop") == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        "42",
        "Paris",
        "x = 1",
        "the sum (1",
        42,
        None,
        [],
        [1, 2],
        {"a": 1},
        "def test(): assert f()",
    ],
)
def test_an_answer_without_tests_is_refused(answer: object) -> None:
    with pytest.raises(ValueError, match=r"the answer holds no tests: .*; expected .*inputs"):
        code(block("pass"), answer, "stop")


def test_as_many_outputs_as_inputs() -> None:
    with pytest.raises(ValueError, match="the answer has 2 inputs and 1 outputs"):
        code(block("pass"), {"inputs": ["1", "2"], "outputs": ["1"]}, "stop")


def test_isolation_is_required_or_none() -> None:
    assert code(block("f = 4"), "assert f == 4", "stop", isolation="none") == 1.0
    with pytest.raises(ValueError, match="isolation='docker' is not required or none"):
        code(block("f = 4"), "assert f == 4", "stop", isolation="docker")


def test_a_machine_that_cannot_isolate_is_refused_when_the_reward_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise IsolationError("no namespaces")

    monkeypatch.setattr("dovetail.rewards.code.strongest_isolation", refuse)
    setup: dict[str, Any] = {"name": "code", "function": None, "address": None, "options": {}}
    with pytest.raises(IsolationError):
        load(setup)
    load({**setup, "options": {"isolation": "none"}})


def test_a_part_of_the_tests_counts_only_where_asked() -> None:
    assert code("print(3)", SUM_TESTS, "stop", partial=True) == 0.5, (
        "text without a block is the program"
    )


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


@pytest.mark.skipif(sys.platform != "linux", reason="limits are Linux's")
def test_a_daemon_ends_with_its_program() -> None:
    program = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(1000)\n    os._exit(0)"
    before = children_of([os.getpid()])
    assert code(block(program), ONE, "stop") == 1.0
    assert children_of([os.getpid()]) <= before

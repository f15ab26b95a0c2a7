"""A completion's program against the tests of its row, in a sandbox."""

import ast
import json
import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from dovetail.rewards.sandbox.client import Sandbox, strongest_isolation
from dovetail.rewards.sandbox.isolation import Isolation
from dovetail.rewards.sandbox.limits import ProgramLimits
from dovetail.system import adopt_orphans

_BLOCK = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
REQUIRED = "required"
ISOLATIONS = (REQUIRED, Isolation.NONE)
FORMS = (
    'expected {"inputs": [...], "outputs": [...]}, assert statements as a text or list, '
    'or {"test": ..., "entry_point": ...}'
)


@dataclass(frozen=True)
class InputTest:
    """Passes if the program prints `expected` for `given`, by line."""

    given: str
    expected: str


@dataclass(frozen=True)
class SourceTest:
    """Passes if `source`, which uses what the program defines, runs to its end."""

    source: str


def code(
    completion: str,
    answer: Any,
    _finish: str,
    *,
    seconds: float = 5.0,
    memory_mib: int = 512,
    partial: bool = False,
    isolation: str = REQUIRED,
) -> float:
    """1 if the last ```python block of the completion passes all tests of the answer; partial:
    the share that it passes.

    The answer, or its JSON text: {"inputs": [...], "outputs": [...]} compares standard output by
    line (with "fn_name": what that function, or that method of a class Solution, returns); a
    string or list of assert statements; {"test": ..., "entry_point": ...} defines
    check(candidate). ValueError for another answer.
    A test has `seconds` and `memory_mib`, no network, and no files but Python's and its own;
    isolation="none": these limits alone, where a machine cannot isolate.
    """
    program = (_BLOCK.findall(completion)[-1:] or [completion])[0]
    wanted = tests(answer)
    adopt_orphans()
    passed = 0
    with Sandbox(find_isolation(isolation), ProgramLimits(seconds, memory_mib)) as sandbox:
        for test in wanted:
            if _passes(sandbox, program, test):
                passed += 1
            elif not partial:
                return 0.0
    return passed / len(wanted)


def find_isolation(wanted: str) -> Isolation:
    """The strongest of this machine, by a trial. IsolationError where there is none."""
    if wanted == Isolation.NONE:
        return Isolation.NONE
    if wanted != REQUIRED:
        known = " or ".join(ISOLATIONS)
        raise ValueError(f"reward.options.isolation={wanted!r} is not {known}")
    return strongest_isolation()


def tests(answer: Any) -> Seq[InputTest | SourceTest]:
    """The tests of a row's answer. ValueError if it holds none."""
    decoded = _decoded(answer)
    found: list[InputTest | SourceTest] = []
    match decoded:
        case {"inputs": [*inputs], "outputs": [*outputs], **others}:
            if len(inputs) != len(outputs):
                counts = f"{len(inputs)} inputs and {len(outputs)} outputs"
                raise ValueError(f"the answer has {counts}: {answer!r:.200}")
            name = others.get("fn_name")
            for given, expected in zip(inputs, outputs, strict=True):
                if name is None:
                    found.append(InputTest(_text(given), _text(expected)))
                else:
                    call = _CALL.format(name=name, given=_arguments(given), expected=expected)
                    found.append(SourceTest(call))
        case {"test": str() as test, "entry_point": str() as name}:
            found.append(SourceTest(f"{test}\n\ncheck({name})\n"))
        case str() as asserts:
            found += _asserting([asserts])
        case [*asserts]:
            found += _asserting([str(line) for line in asserts])
    if not found:
        raise ValueError(f"the answer holds no tests: {answer!r:.200}; {FORMS}")
    return found


_CALL = """
_call = Solution().{name} if "Solution" in globals() else {name}
_value, _expected = _call(*{given!r}), {expected!r}
_value = list(_value) if isinstance(_value, tuple) else _value
assert _value == _expected or [_value] == _expected
"""


def _asserting(sources: Seq[str]) -> Seq[SourceTest]:
    """None where no statement asserts or calls anything, as in an answer that is a number."""
    try:
        trees = [ast.parse(source) for source in sources]
    except (SyntaxError, ValueError):
        return []
    if not any(map(_checks, trees)):
        return []
    return [SourceTest(source) for source in sources]


def _checks(tree: ast.Module) -> bool:
    """Whether something is asserted or called when it runs, not only in functions."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Assert | ast.Raise | ast.Call):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            waiting += ast.iter_child_nodes(node)
    return False


def _decoded(answer: Any) -> Any:
    if isinstance(answer, str) and answer.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(answer)
        except ValueError:
            return answer
    return answer


def _arguments(given: Any) -> list[Any]:
    """Text holds one JSON value a line."""
    if isinstance(given, str):
        return [json.loads(line) for line in given.splitlines()]
    return list(given)


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _passes(sandbox: Sandbox, program: str, test: InputTest | SourceTest) -> bool:
    if isinstance(test, SourceTest):
        return sandbox.run_tests(program, test.source).status == 0
    outcome = sandbox.run_with_input(program, test.given)
    return outcome.status == 0 and _lines(outcome.output) == _lines(test.expected)


def _lines(text: str) -> Seq[str]:
    return [line.rstrip() for line in text.strip().splitlines()]

"""Small wrong changes of a Python source, found in its syntax tree: what `tests.mutants.sweep` draws from."""

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}
NAMES = {
    "any": "all",
    "all": "any",
    "min": "max",
    "max": "min",
    "amin": "amax",
    "amax": "amin",
    "minimum": "maximum",
    "maximum": "minimum",
}


@dataclass(frozen=True)
class Change:
    """Bytes `start` to `end` of a source become `new`. line: counted from 1."""

    operator: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def apply(self, source: str) -> str:
        data = source.encode()
        return (data[: self.start] + self.new.encode() + data[self.end :]).decode()


def changes(source: str) -> list[Change]:
    """Every change of every operator, in the order of the source; each leaves valid Python."""
    data = source.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in _changeable(ast.parse(source)):
        for operator, make in OPERATORS.items():
            for target, new in make(node):
                assert target.end_lineno is not None and target.end_col_offset is not None
                start = starts[target.lineno - 1] + target.col_offset
                end = starts[target.end_lineno - 1] + target.end_col_offset
                old = data[start:end].decode()
                text = f"({ast.unparse(new)})" if _binds_loosely(new) else ast.unparse(new)
                found.append(Change(operator, target.lineno, start, end, old, text))
    return sorted(found, key=lambda each: (each.start, each.end, each.operator, each.new))


def _binds_loosely(node: ast.expr) -> bool:
    return isinstance(node, ast.BoolOp | ast.BinOp | ast.Compare | ast.IfExp | ast.UnaryOp)


def _changeable(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run, without annotations and what only words a message."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params", "type_comment"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr | ast.Raise):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            yield from _changeable(child)


Made = Iterator[tuple[ast.expr, ast.expr]]  # a node of the source, and what takes its place


def _comparison(node: ast.AST) -> Made:
    if isinstance(node, ast.Compare):
        for number, operator in enumerate(node.ops):
            other = copy.deepcopy(node)
            other.ops[number] = COMPARED[type(operator)]()
            yield node, other


def _and_or(node: ast.AST) -> Made:
    if isinstance(node, ast.BoolOp):
        other = copy.deepcopy(node)
        other.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield node, other


def _name(node: ast.AST) -> Made:
    if isinstance(node, ast.Call):
        other = copy.deepcopy(node)
        if isinstance(other.func, ast.Name) and other.func.id in NAMES:
            other.func.id = NAMES[other.func.id]
            yield node, other
        elif isinstance(other.func, ast.Attribute) and other.func.attr in NAMES:
            other.func.attr = NAMES[other.func.attr]
            yield node, other


def _arithmetic(node: ast.AST) -> Made:
    if isinstance(node, ast.BinOp) and type(node.op) in COMPUTED:
        other = copy.deepcopy(node)
        other.op = COMPUTED[type(node.op)]()
        yield node, other


def _constant(node: ast.AST) -> Made:
    if not isinstance(node, ast.Constant):
        return
    if isinstance(node.value, bool):
        yield node, ast.Constant(not node.value)
    elif isinstance(node.value, int):
        yield node, ast.Constant(node.value + 1)
    elif isinstance(node.value, float):
        yield node, ast.Constant(2.0 * node.value + 0.1)


def _negation(node: ast.AST) -> Made:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node, node.operand


def _branch(node: ast.AST) -> Made:
    """A branch that is never taken."""
    if isinstance(node, ast.If):
        yield node.test, ast.Constant(False)
        if node.orelse:
            yield node.test, ast.Constant(True)
    elif isinstance(node, ast.IfExp):
        yield node, node.body
        yield node, node.orelse


def _argument(node: ast.AST) -> Made:
    if isinstance(node, ast.Call):
        for number, keyword in enumerate(node.keywords):
            if keyword.arg is not None:
                other = copy.deepcopy(node)
                del other.keywords[number]
                yield node, other


OPERATORS: dict[str, Callable[[ast.AST], Made]] = {
    "comparison": _comparison,
    "and/or": _and_or,
    "any/all, min/max": _name,
    "arithmetic": _arithmetic,
    "constant": _constant,
    "negation dropped": _negation,
    "branch dropped": _branch,
    "argument dropped": _argument,
}

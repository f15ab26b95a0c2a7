"""Finds assignments to what was imported: the public-seam rule (docs/design.md, principle 5; docs/adr/010).

Other people's modules and classes, and our own from elsewhere, are used as they are: no attribute of theirs is assigned,
deleted or filled in, by whatever spelling or local name. An instance that we made is ours.
"""

import ast
from collections.abc import Iterator
from itertools import chain

SETTERS = ("setattr", "delattr", "__setattr__", "__delattr__")
FILLERS = ("update", "setdefault", "pop", "popitem", "clear")  # of a module's or class's dictionary
REACHERS = (
    "getattr",
    "vars",
    "type",
    "import_module",
    "__import__",
)  # their result is their argument's, or a module
ENVIRONMENT = "os.environ"  # a rule of its own says who may
SETTINGS = (
    "torch.utils.deterministic.fill_uninitialized_memory",
)  # documented, and without a function that sets them

Found = Iterator[tuple[int, str]]
Scope = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def find_patches(tree: ast.Module) -> Found:
    """Line and message of every assignment, of any kind, to an attribute or an item of something imported."""
    yield from _scope(tree, frozenset())


def _scope(scope: Scope, outside: frozenset[str]) -> Found:
    """One function's, class's or module's own statements, then the scopes inside it, which see its imports."""
    nodes = list(_own(scope))
    foreign = _foreign(scope, nodes, outside)
    for node in nodes:
        for target in _targets(node):
            if isinstance(target, ast.Attribute | ast.Subscript) and _reaches(
                target.value, foreign
            ):
                if not ast.unparse(target).startswith((ENVIRONMENT, *SETTINGS)):
                    yield target.lineno, _message(target)
            if isinstance(target, ast.Attribute) and target.attr == "__class__":
                yield target.lineno, _message(target)
        if isinstance(node, ast.Call):
            yield from _call(node, foreign)
        if isinstance(node, Scope):
            inherited = outside if isinstance(scope, ast.ClassDef) else foreign
            yield from _scope(node, inherited)


def _message(target: ast.AST) -> str:
    return f"assigns to {ast.unparse(target)}, which is imported (monkey patch)"


def _call(node: ast.Call, foreign: frozenset[str]) -> Found:
    """setattr(module, ...), and the dictionary of a module or class filled by a method."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
    if name in SETTERS:
        objects = [
            *node.args[:1],
            *([node.func.value] if isinstance(node.func, ast.Attribute) else []),
        ]
        for reached in objects:
            if _reaches(reached, foreign):
                yield node.lineno, _message(node)
    if name in FILLERS and isinstance(node.func, ast.Attribute):
        filled = node.func.value
        dictionary = (
            isinstance(filled, ast.Attribute) and filled.attr in ("__dict__", "modules")
        ) or (isinstance(filled, ast.Call) and ast.unparse(filled.func) == "vars")
        if dictionary and _reaches(filled, foreign):
            yield node.lineno, _message(node)


def _own(scope: Scope) -> Iterator[ast.AST]:
    """The nodes of a scope, those of the scopes inside it left out but for themselves."""
    stack = list(ast.iter_child_nodes(scope))
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, Scope):
            stack += ast.iter_child_nodes(node)


def _foreign(scope: Scope, nodes: list[ast.AST], outside: frozenset[str]) -> frozenset[str]:
    """Names that stand for something imported: imports, and what is made equal to them or to a part of them."""
    bound: set[str] = set()
    if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        bound |= {node.arg for node in ast.walk(scope.args) if isinstance(node, ast.arg)}
    bound |= {t.id for node in nodes for t in _targets(node) if isinstance(t, ast.Name)}
    imports = (node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))
    names = {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}
    foreign = (outside - bound) | names
    pairs = list(chain.from_iterable(_aliases(node) for node in nodes))
    while new := {
        name for name, value in pairs if name not in foreign and _reaches(value, foreign)
    }:
        foreign |= new
    return frozenset(foreign)


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement or expression binds, fills in or deletes."""
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            found = list(targets)
        case (
            ast.AugAssign(target=target)
            | ast.AnnAssign(target=target)
            | ast.NamedExpr(target=target)
            | ast.For(target=target)
            | ast.AsyncFor(target=target)
            | ast.comprehension(target=target)
        ):
            found = [target]
        case ast.withitem(optional_vars=ast.expr() as target):
            found = [target]
        case _:
            found = []
    while found:
        match found.pop():
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                found += parts
            case ast.Starred(value=part):
                found.append(part)
            case target:
                yield target


def _aliases(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Names, each with a value that it may have."""
    match node:
        case (
            ast.Assign(value=value)
            | ast.AnnAssign(value=ast.expr() as value)
            | ast.NamedExpr(value=value)
        ):
            pass
        case ast.For(iter=value) | ast.AsyncFor(iter=value) | ast.comprehension(iter=value):
            pass
        case ast.withitem(context_expr=value):
            pass
        case _:
            return
    for target in _targets(node):
        if isinstance(target, ast.Name):
            yield target.id, value


def _reaches(value: ast.expr, foreign: frozenset[str]) -> bool:
    """Whether a value is something imported or a part of it, not what a call of it returns."""
    match value:
        case ast.Name(id=name):
            return name in foreign
        case ast.Attribute(attr="__class__"):
            return True  # a class, whoever's
        case ast.Attribute(value=inner) | ast.Subscript(value=inner) | ast.NamedExpr(value=inner):
            return _reaches(inner, foreign)
        case ast.Starred(value=inner):
            return _reaches(inner, foreign)
        case ast.IfExp(body=first, orelse=second):
            return _reaches(first, foreign) or _reaches(second, foreign)
        case ast.BoolOp(values=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts):
            return any(_reaches(part, foreign) for part in parts)
        case ast.Call(func=func, args=args):
            name = func.attr if isinstance(func, ast.Attribute) else ast.unparse(func)
            if name in ("import_module", "__import__") or (name == "type" and len(args) == 1):
                return True
            return name in REACHERS and bool(args) and _reaches(args[0], foreign)
    return False

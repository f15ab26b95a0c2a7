"""Which files of this repository depend on which, read from their source: imports, and names of modules and files in strings.

A string that is the name of a module (`-m tests.helpers.block_rows`, `importlib`) or ends in the name of another tracked
file counts as a use of it. `if TYPE_CHECKING` does not. A module under a package runs that package's `__init__`,
but not what its strings name: those of `dovetail` load on first use.
"""

import ast
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import PurePosixPath

ROOTS = ("src/", "")  # folders that module names start from
RUN = ":run"  # a node for a package's __init__ that is only executed
NO_STRINGS = (
    "tests/helpers/template.py",
    "tools/style_check.py",
)  # modules to import early, and rules by file name: no dependencies
Graph = Mapping[str, frozenset[str]]


def graph(sources: Mapping[str, str], others: Iterable[str] = ()) -> Graph:
    """path -> paths that it uses directly, of Python `sources` by path; `others` are files that strings may name."""
    modules = {_module(path): path for path in sources}
    names = {PurePosixPath(path).name: path for path in others}
    edges: dict[str, frozenset[str]] = {}
    for path, text in sources.items():
        tree = ast.parse(text)
        imported = frozenset(_resolved(_imports(tree), modules)) | frozenset(
            _conftests(path, sources)
        )
        strings = frozenset() if path in NO_STRINGS else frozenset(_named(tree, modules, names))
        edges[path] = (imported | strings) - {path}
        edges[path + RUN] = imported - {path}
    return edges


def dependents(edges: Graph, changed: Iterable[str]) -> dict[str, int]:
    """Every path that uses a changed one, with the number of steps to it; 0 for the changed ones."""
    users: dict[str, list[str]] = {}
    for user, used in edges.items():
        for path in used:
            users.setdefault(path, []).append(user)
    distance = dict.fromkeys(changed, 0)
    distance |= {path + RUN: 0 for path in distance if path + RUN in edges}
    queue = deque(distance)
    while queue:
        path = queue.popleft()
        for user in users.get(path, ()):
            if user not in distance:
                distance[user] = distance[path] + 1
                queue.append(user)
    return {path: steps for path, steps in distance.items() if not path.endswith(RUN)}


def _module(path: str) -> str:
    root = next(root for root in ROOTS if path.startswith(root))
    parts = PurePosixPath(path.removeprefix(root)).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.AST) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(module, names taken from it) of every import, those inside functions included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):  # has no statement
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, tuple(alias.name for alias in node.names)
        yield from _imports(node)


def _resolved(
    imports: Iterable[tuple[str, tuple[str, ...]]], modules: Mapping[str, str]
) -> Iterator[str]:
    for module, names in imports:
        submodules = [f"{module}.{name}" for name in names if f"{module}.{name}" in modules]
        if module in modules and (len(submodules) < len(names) or not names):
            yield modules[module]
        yield from (modules[name] for name in submodules)
        for name in (module, *submodules):
            yield from (modules[parent] + RUN for parent in _parents(name) if parent in modules)


def _parents(module: str) -> Iterator[str]:
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


def _named(tree: ast.AST, modules: Mapping[str, str], names: Mapping[str, str]) -> Iterator[str]:
    """Files that a string names: a module, all modules of a package (`"dovetail.cli."`, of an f-string), a command, a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple):
            words = [
                str(word.value) if isinstance(word, ast.Constant) else "" for word in node.elts
            ]
            mains = {f"{name}.__main__" for flag, name in pairwise(words) if flag == "-m"}
            yield from (modules[name] for name in mains if name in modules)
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        text = node.value
        if text in modules and "." in text:
            yield modules[text]
        elif text.endswith(".") and text[:-1] in modules:
            yield from (
                path for module, path in modules.items() if module.rpartition(".")[0] == text[:-1]
            )
        elif "import " in text and len(text) < 10_000:  # a program in a string
            try:
                yield from _resolved(_imports(ast.parse(text)), modules)
            except SyntaxError:
                continue
        if (last := text.rpartition("/")[2]) in names:
            yield names[last]


def _conftests(path: str, sources: Mapping[str, str]) -> Iterator[str]:
    if PurePosixPath(path).name.startswith("test_"):
        for folder in PurePosixPath(path).parents:
            if (found := str(folder / "conftest.py")) in sources:
                yield found

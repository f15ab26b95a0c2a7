"""Checks the style rules that the linters do not know (docs/design.md, sections 1, 2 and 5).

Run without arguments it reads every file that git tracks, or would track, and prints one line for each violation.
`check_source` is the whole checker as a pure function of a path and a text.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from tools import readability
from tools.monkey_patches import find_patches

PACKAGES = ("dovetail", "dovetail_tools")  # below src/
ENVIRONMENT = ("os.environ", "os.getenv", "os.putenv")
MAX_FILE = 500
MAX_FUNCTION = 100
MAX_PARAMETERS = 8
# Tokens a code line of packages that are above `readability.MAX_TOKENS_PER_LINE` still.
TOKENS_PER_LINE: Mapping[str, float] = {
    "kernels": 12.0,
    "nn": 10.2,
    "records": 9.9,
    "report": 10.7,
    "rl": 10.2,
    "sampler": 10.2,
}
PROCESS_GROUP_FILES = (
    "parallel/process_group.py",
    "parallel/axes.py",
    "parallel/mesh.py",
    "parallel/collectives.py",
    "parallel/private_group.py",
    "pipeline/executor.py",
)
SHARDING_MODULES = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)  # wrappers, not process groups
RANKLESS_FILES = ("nn/decoder.py", "nn/attention.py", "nn/mlp.py")
RANK_WORDS = ("dist", "group", "rank", "world")
DOWNCASTS = ("float", "double", "half", "bfloat16")
READ_ONLY = ("Mapping", "Sequence", "Iterable", "Callable", "ClassVar[Mapping", "Final[Mapping")
MUTABLE_CALLS = (
    "list",
    "dict",
    "set",
    "bytearray",
    "defaultdict",
    "OrderedDict",
    "deque",
    "Counter",
)
TOLERANCE_NAMES = ("rtol", "atol", "rel", "abs", "tol", "tolerance")
MARKER = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b(?!\(#\d+\))")
MACHINE_PATH = re.compile(r"(?<![\w.:/])/(?:work|home|root|Users|farm|opt)/\w")
VAGUE_NAME = re.compile(r"^_?(maybe|handle|process)_(?!group)")
TEXT_SUFFIXES = (".py", ".md", ".toml", ".yaml", ".yml", ".json", ".sh", "")


class Violation(NamedTuple):
    """One broken rule."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def check_source(path: str, text: str) -> list[Violation]:
    """Every violation in one Python file. `path` is relative to the repository and decides which rules apply."""
    tree = ast.parse(text)
    found = [*_sizes(tree, text), *_comments(text), *_names(path, tree)]
    if path.startswith("src/"):
        inside = "/".join(PurePosixPath(path).parts[2:])
        found += [
            *_state(tree),
            *_calls(tree),
            *_imports(inside, tree),
            *_autograd(tree),
            *_roles(inside, text, tree),
        ]
    if path.startswith("tests/") and path != "tests/helpers/tolerances.py":
        found += _tolerances(tree)
    return [Violation(path, line, message) for line, message in sorted(set(found))]


def check_text(path: str, text: str) -> list[Violation]:
    """What holds for any text file: no path of somebody's machine."""
    lines = enumerate(text.splitlines(), 1)
    return [
        Violation(path, n, "a path of one machine")
        for n, line in lines
        if MACHINE_PATH.search(line)
    ]


def check_density(folder: Path) -> list[Violation]:
    """What packages exceed of the limits of `tools.readability`."""
    found = []
    whole = readability.Measure()
    for name, measured in readability.packages(folder):
        path = f"{folder.as_posix()}/{name}"
        messages = readability.problems(name, measured, TOKENS_PER_LINE)
        found += [Violation(path, 0, message) for message in messages]
        whole = measured  # the last is all packages together
    if whole.tuple_assignments > readability.MAX_TUPLE_ASSIGNMENTS:
        message = f"{whole.tuple_assignments} tuples assigned to tuples of names"
        found.append(Violation(folder.as_posix(), 0, message))
    return found


Found = Iterator[tuple[int, str]]


@lru_cache(maxsize=1)  # every rule goes through them
def _nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


def _sizes(tree: ast.Module, text: str) -> Found:
    length = text.count("\n")
    if length > MAX_FILE:
        yield 1, f"file of {length} lines; at most {MAX_FILE}"
    for node in _nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION:
                yield node.lineno, f"{node.name} has {lines} lines; at most {MAX_FUNCTION}"
            a = node.args
            names = [
                arg.arg
                for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs)
                if arg.arg not in ("self", "cls", "ctx")
            ]
            if len(names) > MAX_PARAMETERS:
                yield (
                    node.lineno,
                    f"{node.name} has {len(names)} parameters; at most {MAX_PARAMETERS}",
                )


def _comments(text: str) -> Found:
    if text.isascii() and not MARKER.search(text):
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if not token.string.isascii():
            yield token.start[0], "a character outside ASCII"
        if token.type == tokenize.COMMENT and MARKER.search(token.string):
            yield token.start[0], "a marker without its issue: write it as TODO(#number): ..."


def _names(path: str, tree: ast.Module) -> Found:
    if PurePosixPath(path).stem in ("utils", "util", "helpers", "misc"):
        yield 1, "a file named after nothing: name it after its concept"
    for node in _nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and VAGUE_NAME.match(node.name):
            yield node.lineno, f"{node.name}: say what it does (no maybe_, handle_, process_)"
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            yield (
                node.lineno,
                "from __future__ import: pydantic reads annotations at run time, and not as text",
            )


def _state(tree: ast.Module) -> Found:
    """No globals: neither `global`, nor mutable values of modules and classes, nor attributes of what was imported."""
    for node in _nodes(tree):
        if isinstance(node, ast.Global):
            yield node.lineno, "global: pass the value"
        if isinstance(node, ast.Module | ast.ClassDef):
            yield from (found for statement in node.body for found in _mutable_value(statement))
    yield from find_patches(tree)


def _mutable_value(statement: ast.stmt) -> Found:
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
        return
    value = statement.value
    mutable = isinstance(
        value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    ) or (isinstance(value, ast.Call) and _dotted(value.func).split(".")[-1] in MUTABLE_CALLS)
    annotation = ast.unparse(statement.annotation) if isinstance(statement, ast.AnnAssign) else ""
    target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
    public_names = isinstance(target, ast.Name) and target.id == "__all__"
    if mutable and not annotation.startswith(READ_ONLY) and not public_names:
        yield (
            statement.lineno,
            "a mutable value of a module or class: annotate it as Mapping or Sequence, or use a tuple",
        )


def _calls(tree: ast.Module) -> Found:
    for node in _nodes(tree):
        if isinstance(node, ast.ExceptHandler) and _is_blind(node):
            yield node.lineno, "a blind except: name the exception"
        if not isinstance(node, ast.Call):
            continue
        name = _dotted(node.func)
        if name == "print":
            yield node.lineno, "print: use log"
        if name == "getattr" and len(node.args) == 3:
            yield node.lineno, "getattr with a default: model the absence"
        if isinstance(node.func, ast.Attribute) and node.func.attr in DOWNCASTS and not node.args:
            yield (
                node.lineno,
                f".{node.func.attr}(): use .to(torch.promote_types(x.dtype, torch.float32))",
            )


def _is_blind(handler: ast.ExceptHandler) -> bool:
    """Whether it swallows everything; one that ends in a bare `raise` tidies up, one in `raise ... from` explains."""
    last = handler.body[-1]
    everything = handler.type is None or _dotted(handler.type) in ("Exception", "BaseException")
    return everything and not (
        isinstance(last, ast.Raise) and (last.exc is None or last.cause is not None)
    )


def _imports(inside: str, tree: ast.Module) -> Found:
    functions = [
        node for node in _nodes(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    for node in (inner for function in functions for inner in ast.walk(function)):
        if isinstance(node, ast.Import | ast.ImportFrom) and any(
            m.split(".")[0] in PACKAGES for m in _modules(node)
        ):
            yield (
                node.lineno,
                "a first-party import inside a function: the packages are in the wrong order",
            )
    for node in _nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and inside not in PROCESS_GROUP_FILES:
            bad = [
                m
                for m in _modules(node)
                if m.startswith("torch.distributed") and not m.startswith(SHARDING_MODULES)
            ]
            if bad:
                yield node.lineno, f"{bad[0]} belongs to {', '.join(PROCESS_GROUP_FILES)}"
        allowed = inside.startswith(("cli/", "launch/")) or inside in (
            "parallel/process_group.py",
            "rewards/judge.py",
        )
        if isinstance(node, ast.Attribute) and _dotted(node) in ENVIRONMENT and not allowed:
            yield (
                node.lineno,
                "reads the environment outside cli/, launch/, parallel/process_group.py and rewards/judge.py: take an argument",
            )


def _modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names]


def _autograd(tree: ast.Module) -> Found:
    for node in _nodes(tree):
        if isinstance(node, ast.ClassDef) and any(
            _dotted(base).endswith("autograd.Function") for base in node.bases
        ):
            doc = ast.get_docstring(node) or ""
            if "forward" not in doc or "backward" not in doc:
                yield (
                    node.lineno,
                    f"{node.name}: its docstring states the algebra of forward and of backward",
                )


def _roles(inside: str, text: str, tree: ast.Module) -> Found:
    if inside in RANKLESS_FILES:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME and token.string in RANK_WORDS:
                yield token.start[0], f"{token.string}: model files name roles, not ranks"
    for node in _nodes(tree):
        if isinstance(node, ast.Compare):
            subject = _dotted(node.left).split(".")[-1]
            if subject in ("model_type", "family") and not inside.startswith("arch/"):
                yield node.lineno, f"a comparison with {subject}: a family is data"
            if subject == "size" and inside in RANKLESS_FILES:
                yield node.lineno, "a comparison with size: model files name roles, not ranks"
        if isinstance(node, ast.Attribute) and node.attr == "mean" and inside == "rl/losses.py":
            yield node.lineno, "mean: losses return sums and counts"


def _tolerances(tree: ast.Module) -> Found:
    for node in _nodes(tree):
        if (
            isinstance(node, ast.keyword)
            and node.arg in TOLERANCE_NAMES
            and _is_tolerance(node.value)
        ):
            yield node.value.lineno, f"{node.arg}=...: use a name of tests/helpers/tolerances.py"
        if isinstance(node, ast.Compare) and any(
            isinstance(op, ast.Lt | ast.LtE) for op in node.ops
        ):
            if any(_is_tolerance(c) for c in node.comparators):
                yield (
                    node.lineno,
                    "compares with a small number: use a name of tests/helpers/tolerances.py",
                )


def _is_tolerance(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Constant) and isinstance(node.value, float) and 0.0 < node.value < 0.01
    )


def _dotted(node: ast.AST) -> str:
    """`a.b.c` of a chain of attributes; the last part alone where it starts from something else."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def main() -> int:
    """Check every file of the repository; 1 if any rule is broken."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    paths = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()
    found: list[Violation] = []
    for path in (p for p in paths if Path(p).suffix in TEXT_SUFFIXES and Path(p).is_file()):
        text = Path(path).read_text(encoding="utf-8")
        found += check_text(path, text)
        if path.endswith(".py"):
            found += check_source(path, text)
    for package in PACKAGES:
        found += check_density(Path("src", package))
    for violation in found:
        print(violation)
    print(f"style: {len(found)} violations" if found else f"style: {len(paths)} files, all well")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

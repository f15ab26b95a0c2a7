"""Measures how much a reader meets in each line and statement of code, per package.

    python -m tools.readability [FOLDER ...]        default: src

Docstrings, comments and imports are left out. `style_check` holds the limits.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

WIDTH = 100  # columns
MAX_TOKENS_PER_LINE = 9.5
MAX_WIDE_SHARE = 0.02  # of code lines above WIDTH
MAX_MEDIAN = 9  # tokens of a statement, in all of src
MAX_95TH = 28
MAX_TUPLE_ASSIGNMENTS = 60  # in src: swaps

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Measure:
    """The counts of some files."""

    code_lines: int = 0
    wide_lines: int = 0
    statements: tuple[int, ...] = ()  # the tokens of each
    tuple_assignments: int = 0
    nested_conditionals: int = 0

    def __add__(self, other: "Measure") -> "Measure":
        return Measure(
            self.code_lines + other.code_lines,
            self.wide_lines + other.wide_lines,
            self.statements + other.statements,
            self.tuple_assignments + other.tuple_assignments,
            self.nested_conditionals + other.nested_conditionals,
        )

    @property
    def tokens(self) -> int:
        return sum(self.statements)

    @property
    def tokens_per_line(self) -> float:
        return self.tokens / max(1, self.code_lines)

    @property
    def wide_share(self) -> float:
        return self.wide_lines / max(1, self.code_lines)

    def quantile(self, share: float) -> int:
        """The tokens that this share of the statements do not exceed."""
        ordered = sorted(self.statements)
        return ordered[int(share * (len(ordered) - 1))] if ordered else 0


def measure(text: str) -> Measure:
    """The counts of one file's text."""
    tree = ast.parse(text)
    skipped = skipped_lines(tree)
    statements: list[int] = []
    lines: set[int] = set()
    current = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NEWLINE and current:
            statements.append(current)
            current = 0
        if token.type in LAYOUT or token.start[0] in skipped:
            continue
        current += 1
        lines.update(range(token.start[0], token.end[0] + 1))
    all_lines = text.splitlines()
    wide = [number for number in lines if len(all_lines[number - 1]) > WIDTH]
    nodes = list(ast.walk(tree))
    return Measure(
        len(lines),
        len(wide),
        tuple(statements),
        sum(is_tuple_assignment(node) for node in nodes),
        sum(is_nested_conditional(node) for node in nodes),
    )


def skipped_lines(tree: ast.Module) -> set[int]:
    """The lines of docstrings and imports."""
    found: set[int] = set()
    with_docstring = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        skipped: ast.stmt | None = None
        if isinstance(node, ast.Import | ast.ImportFrom):
            skipped = node
        elif isinstance(node, with_docstring) and ast.get_docstring(node) is not None:
            skipped = node.body[0]
        if skipped is not None:
            found.update(range(skipped.lineno, (skipped.end_lineno or skipped.lineno) + 1))
    return found


def is_tuple_assignment(node: ast.AST) -> bool:
    """Whether a display is assigned to several names at once, as in `a, b = c, d`."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple | ast.List):
        return False
    return any(isinstance(target, ast.Tuple | ast.List) for target in node.targets)


def is_nested_conditional(node: ast.AST) -> bool:
    """Whether a conditional expression holds another one."""
    if not isinstance(node, ast.IfExp):
        return False
    return any(isinstance(inner, ast.IfExp) for inner in ast.walk(node) if inner is not node)


def packages(folder: Path) -> Iterator[tuple[str, Measure]]:
    """Each package directly below a folder, its root files as "(root)", and then all together."""
    whole = Measure()
    parts: dict[str, Measure] = {}
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder)
        name = relative.parts[0] if len(relative.parts) > 1 else "(root)"
        found = measure(path.read_text(encoding="utf-8"))
        parts[name] = parts.get(name, Measure()) + found
        whole += found
    yield from parts.items()
    yield folder.name, whole


def problems(name: str, found: Measure, limits: Mapping[str, float]) -> Iterator[str]:
    """What a package's counts exceed. limits: tokens a line where they are not the usual."""
    most = limits.get(name, MAX_TOKENS_PER_LINE)
    if found.tokens_per_line > most:
        yield f"{found.tokens_per_line:.2f} tokens a code line; at most {most}"
    if found.wide_share > MAX_WIDE_SHARE:
        yield f"{found.wide_share:.1%} of the lines above {WIDTH} columns; at most {MAX_WIDE_SHARE:.0%}"
    if found.nested_conditionals:
        yield f"{found.nested_conditionals} conditional expressions within others"


def table(folders: Iterable[Path]) -> Iterator[str]:
    """One line a package."""
    for folder in folders:
        for name, found in packages(folder):
            yield (
                f"{name:16} lines {found.code_lines:6}  tokens {found.tokens:7}"
                f"  a line {found.tokens_per_line:5.2f}"
                f"  a statement {found.quantile(0.5):3} (95 %: {found.quantile(0.95):3})"
                f"  wide {found.wide_share:5.1%}  tuple = tuple {found.tuple_assignments:3}"
                f"  nested conditionals {found.nested_conditionals:2}"
            )


def main() -> None:
    folders = [Path(argument) for argument in sys.argv[1:]]
    for line in table(folders or sorted(Path("src").iterdir())):
        print(line)


if __name__ == "__main__":
    main()

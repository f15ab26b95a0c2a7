"""The measure of plain code counts what its rules name."""

from pathlib import Path

import pytest

from tools.readability import Measure, measure, packages, problems

TEXT = '''"""A module."""

import os


def area(width, height):
    """The product."""
    # a comment
    size = width * height
    return size
'''


def test_docstrings_imports_and_comments_are_left_out() -> None:
    found = measure(TEXT)
    assert found.code_lines == 3
    assert found.statements == (8, 5, 2)
    assert found.tokens_per_line == 5


@pytest.mark.parametrize(
    ("line", "tuples", "nested"),
    [
        ("a, b = c, d", 1, 0),
        ("(a, b) = [c, d]", 1, 0),
        ("a, b = f(c)", 0, 0),
        ("a = (c, d)", 0, 0),
        ("a = b if c else d", 0, 0),
        ("a = b if c else d if e else f", 0, 1),
        ("a = (b if c else d) if e else f", 0, 1),
    ],
)
def test_tuple_assignments_and_nested_conditionals_are_counted(
    line: str, tuples: int, nested: int
) -> None:
    found = measure(line + "\n")
    assert found.tuple_assignments == tuples
    assert found.nested_conditionals == nested


def test_wide_lines_are_counted() -> None:
    found = measure("a = 1\nb = '" + "x" * 100 + "'\n")
    assert found.wide_lines == 1
    assert found.wide_share == 1 / 2


def test_a_package_s_files_are_summed(tmp_path: Path) -> None:
    (tmp_path / "nn").mkdir()
    (tmp_path / "nn" / "a.py").write_text("a = 1\n")
    (tmp_path / "nn" / "b.py").write_text("b = f(2)\n")
    (tmp_path / "root.py").write_text("c = 3\n")
    found = dict(packages(tmp_path))
    assert found["nn"].statements == (3, 6)
    assert found["(root)"].statements == (3,)
    assert found[tmp_path.name].tokens == 12


def test_limits_name_what_is_exceeded() -> None:
    dense = Measure(code_lines=10, wide_lines=1, statements=(100,), nested_conditionals=2)
    assert list(problems("nn", dense, {})) == [
        "10.00 tokens a code line; at most 9.5",
        "10.0% of the lines above 100 columns; at most 2%",
        "2 conditional expressions within others",
    ]
    assert not list(problems("kernels", Measure(code_lines=10, statements=(110,)), {"kernels": 12}))

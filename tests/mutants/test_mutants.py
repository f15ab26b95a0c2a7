"""The planted bugs stay what they are meant to be: many, of many kinds, one statement each, and they still apply."""

import ast
import shutil
from collections import Counter
from difflib import SequenceMatcher
from pathlib import Path

import pytest

from tests.mutants.run import HERE, ROOT, Mutant, mutants, plant


def test_at_most_three_a_kind() -> None:
    kinds = Counter(mutant.kind for mutant in mutants())
    assert kinds.total() >= 76
    assert max(kinds.values()) <= 3


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.name)
def test_changes_one_statement_of_the_package_as_it_is(mutant: Mutant, tmp_path: Path) -> None:
    source = ROOT / mutant.file
    copy = tmp_path / mutant.file
    copy.parent.mkdir(parents=True)
    shutil.copyfile(source, copy)
    plant(mutant, tmp_path)
    before = statements(source)
    after = statements(copy)
    found = [
        change
        for change in SequenceMatcher(None, before, after).get_opcodes()
        if change[0] != "equal"
    ]
    assert len(found) == 1
    _, start, stop, new_start, new_stop = found[0]
    assert stop - start <= 1 and new_stop - new_start <= 1
    assert (ROOT / mutant.test.partition("::")[0]).is_file()


def statements(path: Path) -> list[str]:
    """A file's statements, one a line."""
    return ast.unparse(ast.parse(path.read_text())).splitlines()


def test_the_results_are_of_these() -> None:
    results = (HERE / "RESULTS.md").read_text()
    assert [mutant.name for mutant in mutants() if f"| {mutant.name} |" not in results] == []

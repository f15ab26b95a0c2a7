"""The planted bugs stay what they are meant to be: many, of many kinds, one line each, and they still apply."""

import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.run import HERE, ROOT, Mutant, mutants, plant


def test_at_most_three_a_kind() -> None:
    kinds = Counter(mutant.kind for mutant in mutants())
    assert kinds.total() >= 76
    assert max(kinds.values()) <= 3


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.name)
def test_changes_one_line_of_the_package_as_it_is(mutant: Mutant, tmp_path: Path) -> None:
    copy = tmp_path / "src/dovetail" / mutant.path
    copy.parent.mkdir(parents=True)
    shutil.copyfile(ROOT / "src/dovetail" / mutant.path, copy)
    plant(mutant, tmp_path)
    old, new = mutant.old.splitlines(), mutant.new.splitlines()
    assert len(old) == len(new) and sum(a != b for a, b in zip(old, new, strict=True)) == 1
    assert (ROOT / mutant.test.partition("::")[0]).is_file()


def test_the_results_are_of_these() -> None:
    results = (HERE / "RESULTS.md").read_text()
    assert [mutant.name for mutant in mutants() if f"| {mutant.name} |" not in results] == []

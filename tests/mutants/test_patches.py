"""The planted bugs stay what they are meant to be: seventy-six, of many kinds, one line each, and they still apply."""

import subprocess
from collections import Counter

import pytest

from tests.mutants.run import HERE, ROOT, Mutant, mutants


def test_seventy_six_of_at_most_three_a_kind() -> None:
    kinds = Counter(mutant.kind for mutant in mutants())
    assert kinds.total() == 76
    assert max(kinds.values()) <= 3


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.name)
def test_changes_one_line_of_the_package_as_it_is(mutant: Mutant) -> None:
    kind, before, after, *rest = mutant.patch.read_text().splitlines()
    assert kind.startswith("# kind: ")
    assert before.startswith("--- a/src/dovetail/") and before[6:] == after[6:]
    assert sorted(line[0] for line in rest if line[0] in "+-") == ["+", "-"]
    checked = subprocess.run(
        ["git", "apply", "--check", str(mutant.patch)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, f"{checked.stderr}\nthe line has changed: plant the same bug in the new one"


def test_the_results_are_of_these() -> None:
    told = (HERE / "RESULTS.md").read_text()
    assert [mutant.name for mutant in mutants() if f"| {mutant.name} |" not in told] == []

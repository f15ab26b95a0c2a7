"""Bugs drawn at random: each is a change of what runs, one draw is another's, and a sweep goes on where it ended."""

import ast
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.mutants import sweep
from tests.mutants.operators import changes
from tests.mutants.run import ROOT

SOURCE = '''
def f(x: int = 3, *, wide: bool = True) -> "list[int]":
    """Says 1 < 2."""
    if x < 3 and not wide:
        raise ValueError(f"{x + 1} is {1 + 1}")
    return [min(x, -1) + len("gr\u00f6\u00dfe") if any(wide) else sorted([x], reverse=True)]
'''
FOUND = {
    ("comparison", "x < 3", "(x <= 3)"),
    ("any/all, min/max", "min(x, -1)", "max(x, -1)"),
    ("any/all, min/max", "any(wide)", "all(wide)"),
    ("negation dropped", "not wide", "wide"),
    ("negation dropped", "-1", "1"),
    ("constant", "True", "False"),
    ("constant", "3", "4"),
    ("constant", "1", "2"),
    ("branch dropped", "x < 3 and not wide", "False"),
    ("argument dropped", "sorted([x], reverse=True)", "sorted([x])"),
}


def test_every_operator_changes_what_runs() -> None:
    """Not annotations, docstrings and messages."""
    found = changes(SOURCE)
    for change in found:
        changed = change.apply(SOURCE)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE))
        assert changed.encode()[change.start :].startswith(change.new.encode())
    told = {(change.operator, change.old, change.new) for change in found}
    assert told >= FOUND
    assert {old for operator, old, _ in told if operator == "and/or"} == {"x < 3 and not wide"}
    assert {old for operator, old, _ in told if operator == "arithmetic"} == {
        'min(x, -1) + len("gr\u00f6\u00dfe")'
    }
    assert not [change for change in found if "ValueError" in change.old or change.old[0] == '"']


def test_a_draw_is_of_its_seed() -> None:
    packages = ("optim",)
    first = sweep.drawn(ROOT, packages, 20, 1)
    assert first == sweep.drawn(ROOT, packages, 20, 1) != sweep.drawn(ROOT, packages, 20, 2)
    assert len({*first}) == 20 and {path.split("/")[2] for path, _ in first} == {"optim"}
    for path, change in first:
        source = (ROOT / path).read_text(encoding="utf-8")
        assert source.encode()[change.start : change.end].decode() == change.old
        ast.parse(change.apply(source))


def test_near_tests_come_first_within_the_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of those as near the short ones; test_mutants.py notices every change of its lines."""
    matrix, losses, weights, own = (
        f"tests/{name}.py"
        for name in (
            "distributed/test_matrix",
            "unit/test_losses",
            "distributed/test_weights",
            "mutants/test_mutants",
        )
    )
    seconds = {matrix: 20.0, losses: 2.0, weights: 15.0, own: 1.0}
    monkeypatch.setattr(sweep, "reached", lambda _: {weights: 2, matrix: 1, losses: 1, own: 1})
    (tmp_path / "durations.json").write_text(json.dumps(seconds))
    monkeypatch.setattr(sweep, "DURATIONS", tmp_path / "durations.json")
    assert sweep.tests_of("src/dovetail/rl/losses.py", 99.0) == ([losses, matrix, weights], 37.0)
    assert sweep.tests_of("src/dovetail/rl/losses.py", 18.0) == ([losses, weights], 17.0)


def test_a_sweep_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both tests and the soak tests of what these let pass."""
    asked: list[str] = []

    def examined(*given: Any) -> dict[str, Any]:
        marks = given[-1]
        asked.append(marks)
        if len(asked) == 2:
            return {"seconds": 1, "test": "tests/unit/test_x.py::test_y", "found": "1 != 2"}
        return {"seconds": 1}

    def copied(tree: Path) -> None:
        shutil.copytree(ROOT / "src/dovetail/optim", tree / "src/dovetail/optim")

    monkeypatch.setattr(sweep, "examined", examined)
    monkeypatch.setattr(sweep, "copied", copied)
    monkeypatch.setattr("os.nice", lambda _: None)
    monkeypatch.chdir(ROOT)
    file = tmp_path / "found.jsonl"

    def run(count: int, *options: str) -> None:
        given = ["sweep", str(file), "--packages", "optim", "--count", str(count), *options]
        monkeypatch.setattr("sys.argv", given)
        sweep.main()

    run(3)
    assert len(asked) == 3
    run(3)
    assert len(asked) == 3
    run(3, "--soak")
    assert asked[3:] == [sweep.SOAK] * 2
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert ["test" in record for record in records] == [False, True, False]
    records[0]["equivalent"] = "never reached"
    told = sweep.table(records)
    assert (
        "1 of 2 caught by `make test`, 1 with `make soak`; 1 of 3 drawn change no result." in told
    )
    assert told.count("**nobody**") == 1 and "unit/test_x.py::test_y" in told
    with pytest.raises(SystemExit):
        run(3, "--seed", "5")


def test_a_test_that_fails_without_the_bug_notices_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug is in the copy while its tests run, and not when they are asked again."""
    (tmp_path / "a.py").write_text("x = 1 < 2\n")
    change = changes("x = 1 < 2\n")[0]
    asked: list[tuple[bool, tuple[str, ...]]] = []
    broken = "tests/test_broken.py"

    def verdict(tree: Path, tests: Any, *_: Any) -> dict[str, Any]:
        planted = (tree / "a.py").read_text() != "x = 1 < 2\n"
        asked.append((planted, (*tests,)))
        if any(test.startswith(broken) for test in tests):
            return {"test": f"{broken}::test_a", "found": "always"}
        return {"test": "tests/test_good.py::test_b", "found": "1"} if planted else {}

    monkeypatch.setattr(sweep, "tests_of", lambda *_: ([broken, "tests/test_good.py"], 2.0))
    monkeypatch.setattr(sweep, "verdict", verdict)
    found = sweep.examined(tmp_path, "a.py", change, 9.0, "")
    assert [planted for planted, _ in asked] == [True, False, True, False]
    assert found["test"] == "tests/test_good.py::test_b" and found["broken"] == [
        f"{broken}::test_a"
    ]
    assert (tmp_path / "a.py").read_text() == "x = 1 < 2\n"

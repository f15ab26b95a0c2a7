"""`make check`: which files reach a change, which of their tests run, and in which order."""

import json
from pathlib import Path

import pytest

from tools.check import DURATIONS, NEAR, UNKNOWN, is_test, plan, reached
from tools.reach import dependents, graph

ROOT = Path(__file__).parents[2]
SOURCES = {
    "src/dovetail/__init__.py": "HOMES = {'Loss': 'dovetail.rl.losses'}",
    "src/dovetail/rl/__init__.py": "",
    "src/dovetail/rl/losses.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import dovetail.rl.trainer",
    "src/dovetail/rl/trainer.py": "from dovetail.rl import losses",
    "src/dovetail/cli/__init__.py": "",
    "src/dovetail/cli/train.py": "def run():\n    from dovetail.rl.trainer import train",
    "src/dovetail/cli/main.py": "import importlib\ndef run(name):\n    importlib.import_module(f'dovetail.cli.{name}')",
    "src/dovetail/__main__.py": "from dovetail.cli.main import main",
    "tests/conftest.py": "import tests.helper",
    "tests/helper.py": "",
    "tests/unit/test_losses.py": "from dovetail.rl.losses import Loss",
    "tests/unit/test_library.py": "import dovetail as dt",
    "tests/unit/test_other.py": "from dovetail.rl import losses_of_no_file",
    "tests/unit/test_log.py": "NAME = 'dovetail'",
    "tests/commands/test_train.py": "COMMAND = ['python', '-m', 'dovetail', 'train']",
    "tests/unit/test_rows.py": "subprocess.run(['python', '-c', 'import dovetail.rl.trainer'])",
    "tests/unit/test_page.py": "PAGE = ROOT / 'docs/recipe.md'",
}


def test_who_reaches_a_loss() -> None:
    steps = dependents(graph(SOURCES, ["docs/recipe.md"]), ["src/dovetail/rl/losses.py"])
    assert steps == {
        "src/dovetail/rl/losses.py": 0,
        "src/dovetail/__init__.py": 1,  # by a name that loads on first use
        "src/dovetail/rl/trainer.py": 1,
        "tests/unit/test_losses.py": 1,
        "tests/unit/test_library.py": 2,
        "tests/unit/test_rows.py": 2,
        "src/dovetail/cli/train.py": 2,
        "src/dovetail/cli/main.py": 3,
        "src/dovetail/__main__.py": 4,
        "tests/commands/test_train.py": 5,
    }


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("docs/recipe.md", {"tests/unit/test_page.py"}),
        (
            "src/dovetail/__init__.py",
            {
                path
                for path in SOURCES
                if is_test(path) and "log" not in path and "page" not in path
            },
        ),
        ("tests/helper.py", {path for path in SOURCES if is_test(path)}),
        ("docs/other.md", set()),
    ],
)
def test_what_else_is_a_dependency(changed: str, tests: set[str]) -> None:
    """A file that a string names, the packages above a module, and the conftest of a folder."""
    found = dependents(graph(SOURCES, ["docs/recipe.md"]), [changed])
    assert {path for path in found if is_test(path)} == tests


def test_near_tests_come_first_cheap_ones_before_long_ones_within_the_budget() -> None:
    steps = {
        "tests/unit/test_a.py": 1,
        "tests/fault/test_b.py": 0,
        "tests/unit/test_c.py": NEAR,
        "tests/unit/test_d.py": 9,
    }
    steps |= {"tests/hf/test_e.py": 1, "tests/hf/test_f.py": NEAR + 1, "tests/hf/test_new.py": 2}
    seconds = {
        "test_a": 30.0,
        "test_b": 20.0,
        "test_c": 9.0,
        "test_d": 1.0,
        "test_e": 100.0,
        "test_f": 8.0,
    }
    durations = {path: seconds[Path(path).stem] for path in steps if Path(path).stem in seconds}
    assert UNKNOWN < 9.0
    chosen = plan(steps, durations, budget=50.0 + UNKNOWN + 9.0 + 1.0)
    assert [Path(path).stem for path in chosen.run] == [
        "test_b",
        "test_a",
        "test_new",
        "test_c",
        "test_d",
    ]
    assert [Path(path).stem for path in chosen.near] == ["test_e"]
    assert [Path(path).stem for path in chosen.far] == ["test_f"]
    assert (
        len(plan(steps, durations, budget=0.0).run) == 2
    )  # what has changed, and the unit tests that import it


def test_a_loss_is_checked_by_its_own_tests_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    durations = json.loads(DURATIONS.read_text())
    steps = reached(["src/dovetail/rl/losses.py"])
    chosen = plan(steps, durations, 40.0)
    assert "tests/unit/test_losses.py" in chosen.run[:4], (
        "but for some that take less than a second"
    )
    assert "tests/unit/test_correction.py" in chosen.run
    assert sum(durations.get(path, UNKNOWN) for path in chosen.run) <= 45.0
    assert "tests/unit/test_rope.py" not in steps
    assert {*steps} == {*chosen.run, *chosen.near, *chosen.far}


def test_what_every_test_depends_on_reaches_every_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    tests = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    assert {*reached(["pyproject.toml"])} == {path for path in tests if is_test(path)}


def test_most_files_have_a_recorded_time() -> None:
    """Or the longest would not start first; `python -m pytest --record-durations` records those that it runs."""
    known = json.loads(DURATIONS.read_text())
    tests = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    unknown = [path for path in tests if is_test(path) and path not in known]
    assert len(unknown) <= len(tests) / 4, unknown

"""A process that dies while a run directory is put in order for a resumed run: the next start finds one past, and all of it."""

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from dovetail.checkpoint.retention import saved_steps
from dovetail.parallel.mesh import Mesh
from dovetail.recipe.algorithms import SFTSection
from dovetail.recipe.data import DataSection
from dovetail.recipe.schema import TrainerSection
from dovetail.run.directory import POLICY, Contents, RunDirectory
from dovetail.weights.safe_paths import LEFTOVERS
from tests.helpers.crashing import DIED, die_at, forked
from tests.helpers.harness import Apart
from tests.helpers.saves import Run

RECIPE = {"trainer": {"steps": 9}, "optim": {"schedule": "constant", "warmup_steps": 0}}
STEPS = 3
MANY = 400


def opened(path: Path, resume: str = "auto", index: int | None = None) -> RunDirectory:
    """Claim and open a run's directory, and perhaps die at a change of the disk."""
    recipe: Any = SimpleNamespace(
        run_dir=str(path), trainer=TrainerSection(steps=9, keep_last=9, async_save=False, prompts_per_step=1),
        data=DataSection(train="rows.jsonl"), algorithm=SFTSection(), model_dump=lambda **_: RECIPE,
        to_yaml=lambda: json.dumps(RECIPE),
    )  # fmt: skip
    run = RunDirectory(recipe, Mesh.solo(), resume)
    if index is not None:
        die_at(index)
    run.lock_and_find_resume()
    run.open(Contents(engines={POLICY: mock.Mock()}, auxiliary={}, model="m", data="d"))
    run.close()
    return run


def line(step: int) -> str:
    """A row of metrics."""
    return json.dumps({"step": step, "loss": 0.5, "tokens": 1, "step_seconds": 1.0}) + "\n"


def prepare(path: Path, damaged: bool) -> None:
    """A run of three steps with everything that it can leave; with `damaged`, its newest step is not whole."""
    (path / "rollouts").mkdir(parents=True)
    saves = Run(path / "checkpoints")
    for step in range(1, STEPS + 1):
        saves.save(step, step)
        (path / f"rollouts/step_{step:06}.jsonl").write_text(f"{step}\n")
        (path / f"profile/step-{step}").mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(map(line, range(1, STEPS + 1))) + line(4)[:9])
    (path / "config.yaml").write_text(json.dumps({**RECIPE, "trainer": {"steps": STEPS}}))
    (path / "hf").mkdir()
    (path / "hf/config.json").write_text("{}")
    (path / "checkpoints/.tmp-step_000004.x").mkdir()
    if damaged:
        piece = next(saved_steps(path / "checkpoints")[0][0].path.glob("pieces-*"))
        piece.write_bytes(piece.read_bytes()[:-1])


def check(path: Path, told: Path) -> None:
    """The next start works, and what it finds belongs together."""
    run = opened(path)
    assert run.resumed is not None
    step = run.resumed.state.step
    assert [
        json.loads(line)["step"] for line in (path / "metrics.jsonl").read_text().splitlines()
    ] == list(range(1, step + 1))
    assert [row["step"] for row in run.earlier()[1]] == list(range(1, step + 1))  # type: ignore[index]
    assert sorted(p.name for p in (path / "rollouts").iterdir()) == [
        f"step_{s:06}.jsonl" for s in range(1, step + 1)
    ]
    assert sorted(p.name for p in (path / "profile").iterdir()) == [
        f"step-{s}" for s in range(1, step + 1)
    ]
    assert [saved.step for saved in saved_steps(path / "checkpoints")[0]] == list(
        range(step, 0, -1)
    )
    assert {p.name for p in (path / "checkpoints").glob("step_??????")} == {
        f"step_{s:06}" for s in range(1, step + 1)
    }
    assert not [
        p
        for pattern in LEFTOVERS
        for folder in (path, path / "checkpoints")
        for p in folder.glob(pattern)
    ]
    aside = path / "superseded"
    kept = "".join(
        file.read_text() for file in (path / "metrics.jsonl", *aside.rglob("metrics.jsonl"))
    )
    assert all(line(s) in kept for s in range(1, STEPS + 1)), "no row is lost"
    samples = {
        p.name for folder in (path / "rollouts", aside) for p in folder.rglob("step_*.jsonl")
    }
    assert len(samples) == STEPS, "no sample is lost"
    steps = {
        p.name[:11]
        for folder in (path / "checkpoints", aside)
        for p in folder.rglob("step_??????.*")
    }
    assert {name for name in steps if not name.endswith("jsonl")} >= {
        f"step_{s:06}" for s in range(1, STEPS + 1)
    }
    assert len([*path.rglob("hf/config.json")]) == 1, "nor is a final model"
    told.write_text(str(step))


def deaths(base: Path, damaged: bool, resume: str, stride: int) -> list[int]:
    """Which step the start after each death, or every so manieth one, went on from."""
    assert forked(partial(prepare, base / "good", damaged)) == 0
    found = []
    for index in range(0, MANY, stride):
        path = base / "run"
        shutil.copytree(base / "good", path, symlinks=True)
        code = forked(partial(opened, path, resume, index))
        assert code in (0, DIED)
        assert forked(partial(check, path, base / "told")) == 0, index
        found.append(int((base / "told").read_text()))
        shutil.rmtree(path)
        if code == 0:
            return found
    raise AssertionError("it never lived")


@pytest.fixture(scope="module")
def apart() -> Iterator[Apart]:
    apart = Apart()
    yield apart
    apart.end()


@pytest.mark.parametrize(
    ("damaged", "resume", "stride"),
    [
        (True, "auto", 5),
        *(
            pytest.param(*each, 1, marks=pytest.mark.soak)
            for each in ((False, "step=1"), (True, "auto"))
        ),
    ],
)
def test_every_death_while_a_directory_is_put_in_order(
    damaged: bool, resume: str, stride: int, apart: Apart, tmp_path: Path
) -> None:
    found = apart(deaths, tmp_path, damaged, resume, stride)
    assert found == sorted(found, reverse=True), "it goes back, and never forth again"
    assert found[-1] == (2 if damaged else 1)
    assert len(found) > 15 // stride


def begin(path: Path, index: int) -> None:
    opened(path, index=index)


def first_deaths(base: Path, stride: int) -> int:
    """A run that dies while it begins can begin again."""
    for index in range(0, MANY, stride):
        path = base / f"run-{index}"
        code = forked(partial(begin, path, index))
        assert forked(partial(opened, path)) == 0, index
        assert (path / "config.yaml").is_file()
        if code == 0:
            return index
    raise AssertionError("it never lived")


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.soak)])
def test_every_death_of_a_run_that_begins(stride: int, apart: Apart, tmp_path: Path) -> None:
    assert apart(first_deaths, tmp_path, stride) > 5


def gone_back_twice(path: Path) -> None:
    """A run that went back before, of which somebody removed the first part to make room."""
    prepare(path, damaged=False)
    (path / "superseded/002/hf").mkdir(parents=True)
    (path / "superseded/002/hf/config.json").write_text("earlier")
    (path / "superseded/002/metrics.jsonl").write_text("earlier")
    opened(path, "step=1")


def test_what_was_set_aside_before_stays_where_an_older_part_was_removed(
    apart: Apart, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    assert apart(forked, partial(gone_back_twice, path)) == 0
    earlier, now = path / "superseded/002", path / "superseded/003"
    assert (
        (earlier / "metrics.jsonl").read_text()
        == (earlier / "hf/config.json").read_text()
        == "earlier"
    )
    assert (now / "metrics.jsonl").read_text().startswith(line(2) + line(3)) and (
        now / "hf/config.json"
    ).is_file()

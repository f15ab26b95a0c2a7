"""A run that was cut off and started again is the run that was never cut off: rows, samples, tensors, state, final model.

The run is done to its end once. A copy of its directory, cut back to what a kill after some step would have left (later
rows and samples are there, later checkpoints are not), goes on by the same call, and both are compared bit by bit.
"""

import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from dovetail.checkpoint.reader import ShardedReader
from dovetail.checkpoint.retention import SavedStep, saved_steps
from dovetail.data.rows import batch_rows
from tests.golden.job import RL_ROWS
from tests.helpers.checkpoints import assert_same_tensors, digests
from tests.helpers.program import read_rows, start
from tests.helpers.resumed_runs import ROWS, K, cut_back, done, inputs as inputs, numbers, recipe_of


def newest(run_dir: Path) -> SavedStep:
    steps, problems = saved_steps(run_dir / "checkpoints")
    assert not problems
    return steps[0]


def assert_same_run(resumed: Path, straight: Path) -> None:
    """Everything that two runs leave behind, but for clocks and the directory's own name."""
    assert numbers(resumed) == numbers(straight)
    first, second = newest(resumed), newest(straight)
    assert (first.step, first.order) == (second.step, second.order)
    one, other = ShardedReader(first.path), ShardedReader(second.path)
    one.verify()
    names = one.manifest.tensors
    assert_same_tensors(
        {n: one.read(n) for n in names}, {n: other.read(n) for n in other.manifest.tensors}
    )
    states = [{**(reader.manifest.state or {})} for reader in (one, other)]
    for state in states:
        del state["recipe"]["run_dir"]
        del state["run_id"]
    assert states[0] == states[1]
    assert digests(resumed / "hf") == digests(straight / "hf")
    assert digests(resumed / "rollouts") == digests(straight / "rollouts")


CASES = [
    ("sft", "", {}),
    ("grpo", "dp=2", {"trainer": {"async_save": False}}),
    pytest.param(("ppo", "tp=2", {}), marks=pytest.mark.soak),
    (
        "ppo",
        "tp=2",
        {"model": {"dtype": "bfloat16", "save_dtype": "bfloat16"}, "algorithm": {"epochs": 1}},
    ),
    pytest.param(
        ("ppo", "pp=2", {"model": {"dtype": "bfloat16", "save_dtype": "bfloat16"}}),
        marks=pytest.mark.soak,
    ),
]
LAYOUTS = ("", "dp=4", "tp=2,dp=2", "pp=2,dp=2", "cp=2,dp=2")
HALF = {"model": {"dtype": "bfloat16", "save_dtype": "bfloat16"}}
WIDE = [
    (name, layout, more)
    for name in ("sft", "grpo", "ppo")
    for layout in LAYOUTS
    for more in ({}, HALF)
]


def _called(case: tuple[str, str, dict[str, Any]]) -> str:
    return "-".join([case[0], case[1] or "alone", *("half" for _ in case[2].get("model", ()))][:3])


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.soak) for case in WIDE)],
    ids=lambda case: _called(case),
)
def test_stopped_and_resumed_is_straight_through(
    case: tuple[str, str, dict[str, Any]], inputs: Path, tmp_path: Path
) -> None:
    name, layout, more = case
    given = recipe_of(inputs, tmp_path / "straight", name, layout, **more)
    world = 1
    for degree in given["layout"].values():
        world *= degree
    straight = done(given, world)
    assert len({row["loss"] for row in numbers(straight)}) == 2 * K, (
        "a run that learns nothing shows nothing"
    )
    again = cut_back(straight, tmp_path / "again", K, given)
    resumed = done(again, world)
    assert_same_run(resumed, straight)
    (aside,) = (resumed / "superseded").iterdir()
    assert [row["step"] for row in read_rows(aside / "metrics.jsonl")] == list(
        range(K + 1, 2 * K + 1)
    )
    assert any("resumed" in event["kind"] for event in read_rows(resumed / "events.jsonl"))
    if name != "sft":
        taken = Counter(
            row["id"] for path in (resumed / "rollouts").iterdir() for row in read_rows(path)
        )
        stream = batch_rows(ROWS, 2 * K * 4, 0, 0)
        assert taken == Counter({f"row-{i}": 4 * count for i, count in Counter(stream).items()})


@pytest.mark.parametrize("cut", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_any_step_may_be_the_last_saved_one(cut: int, inputs: Path, tmp_path: Path) -> None:
    """With evaluations, and a run that was stopped twice."""
    more: dict[str, Any] = {
        "data": {"eval": str(inputs / RL_ROWS)},
        "trainer": {"save_every": 1, "eval_every": 2},
    }
    given = recipe_of(inputs, tmp_path / "straight", "grpo", "", **more)
    straight = done(given, 1)
    again = cut_back(straight, tmp_path / "again", cut, given)
    resumed = done(again, 1)
    assert_same_run(resumed, straight)
    twice = cut_back(resumed, tmp_path / "twice", cut + 1, given)
    assert_same_run(done(twice, 1), straight)


@pytest.mark.parametrize("counts", [pytest.param((4, 3), marks=pytest.mark.soak), (3, 5, 1)])
def test_rows_are_taken_once_when_a_step_takes_more_or_fewer_of_them(
    counts: tuple[int, ...], inputs: Path, tmp_path: Path
) -> None:
    taken: list[str] = []
    for before, count in enumerate(counts):
        given = recipe_of(
            inputs, tmp_path / "run", "grpo", "", algorithm={"num_mini_batches": 1, "kl_coef": 0.0}
        )
        given["trainer"] = {
            **given["trainer"],
            "steps": before + 1,
            "save_every": 1,
            "prompts_per_step": count,
        }
        rows = read_rows(done(given, 1) / "rollouts" / f"step_{before + 1:06}.jsonl")
        taken += [row["id"] for row in rows if row["sample"] == 0]
    assert taken == [f"row-{i}" for i in batch_rows(ROWS, sum(counts), 0, 0)]


def write_command(given: dict[str, Any], inputs: Path) -> Path:
    """The recipe as a file, beside the rewards that it names."""
    path = inputs / f"{Path(given['run_dir']).parent.name}-{Path(given['run_dir']).name}.yaml"
    path.write_text(yaml.safe_dump(given))
    return path


def killed(recipe: Path, run_dir: Path, draw: random.Random) -> bool:
    """Start the program, and kill it with all its ranks some time after one of its first steps; whether it was killed.

    The time is a share of what its last step took, so that a quick machine is caught as a slow one is.
    """
    process = start("train", recipe, "--device", "cpu", start_new_session=True)
    rows = run_dir / "metrics.jsonl"
    steps, moments = draw.randint(1, 2), [time.monotonic()]
    before = found = len(rows.read_bytes()) if rows.exists() else 0
    while process.poll() is None and len(moments) <= steps:
        time.sleep(0.002)
        if rows.exists() and (size := len(rows.read_bytes())) not in (before, found):
            found = size
            moments.append(time.monotonic())
    time.sleep(
        draw.random() * (moments[-1] - moments[-2] if steps > 1 and len(moments) > 2 else 0.02)
    )
    ended = process.poll()
    if ended is None:
        os.killpg(process.pid, signal.SIGKILL)
    _, err = process.communicate(timeout=300)
    assert ended in (None, 0), err
    return ended is None


CYCLES = [
    ("grpo", "", 1),
    *(pytest.param(n, "dp=2", 7, marks=pytest.mark.soak) for n in ("sft", "grpo", "ppo")),
]


@pytest.mark.parametrize(("name", "layout", "cycles"), CYCLES)
def test_a_killed_program_started_again_is_straight_through(
    name: str, layout: str, cycles: int, inputs: Path, tmp_path: Path
) -> None:
    """kill -9 of every process at random moments, in steps and in saves."""
    draw, trainer = (
        random.Random(f"{name}{layout}"),
        {"steps": 4 * cycles, "save_every": 1, "keep_last": 2},
    )
    given = recipe_of(inputs, tmp_path / "straight", name, layout, trainer=trainer)
    straight = done(given, 2 if layout else 1)
    given["run_dir"] = str(tmp_path / "killed")
    recipe = write_command(given, inputs)
    for _ in range(10):  # until it is caught alive
        if sum(killed(recipe, tmp_path / "killed", draw) for _ in range(cycles)):
            break
        shutil.rmtree(tmp_path / "killed")
    else:
        raise AssertionError("it was never caught alive")
    if not (tmp_path / "killed/hf").exists():
        process = start("train", recipe, "--device", "cpu")
        _, err = process.communicate(timeout=600)
        assert (process.returncode, err) == (0, "")
    assert numbers(tmp_path / "killed") == numbers(straight)
    assert digests(tmp_path / "killed/hf") == digests(straight / "hf")
    assert digests(tmp_path / "killed/rollouts") == digests(straight / "rollouts")
    left = {
        path.name
        for path in (tmp_path / "killed/checkpoints").iterdir()
        if not path.name.startswith("step_")
    }
    assert left == {"latest"}, "no debris"

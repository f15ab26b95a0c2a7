"""Runs that are cut back and go on."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.golden.job import RL_ROWS, SFT_ROWS, play, rl, sft, write_inputs
from tests.helpers.clocked import timeless
from tests.helpers.harness import run
from tests.helpers.program import read_rows

ROWS = 10  # of the data; 4 a step, so that epochs end inside of steps
K = 2


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_inputs(tmp_path_factory.mktemp("resume") / "inputs")
    for name in (RL_ROWS, SFT_ROWS):
        rows = [{**row, "id": f"row-{i}"} for i, row in enumerate(read_rows(folder / name)[:ROWS])]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def recipe_of(
    inputs: Path, run_dir: Path, name: str, layout: str, **sections: Any
) -> dict[str, Any]:
    """Every algorithm with as much state as it can have; all steps are kept."""
    trainer = {
        "steps": 2 * K,
        "save_every": K,
        "keep_last": 10,
        "prompts_per_step": 4,
        **sections.pop("trainer", {}),
    }
    optim = {"schedule": "cosine", "warmup_steps": 1, "weight_decay": 0.1, "lr": 3e-3}
    degrees = {
        key: int(value) for key, value in (part.split("=") for part in layout.split(",") if part)
    }
    common: dict[str, Any] = {"optim": optim, "layout": degrees, "trainer": trainer}
    algorithm = {"name": name, "num_mini_batches": 2, **sections.pop("algorithm", {})}
    if name == "sft":
        return sft(inputs, run_dir, **{**common, "algorithm": algorithm, **sections})
    options: dict[str, Any] = {"kl_coef": 0.05}
    if name == "ppo":
        options |= {"critic_warmup": 1, "epochs": 2}
    return rl(
        inputs, run_dir, name, **{**common, "algorithm": {**options, **algorithm}, **sections}
    )


def done(given: dict[str, Any], world: int) -> Path:
    run(world, play, given)
    return Path(given["run_dir"])


def cut_back(finished: Path, target: Path, step: int, given: dict[str, Any]) -> dict[str, Any]:
    """A copy of a finished run as a kill some time after `step` was saved would have left it, and its recipe."""
    shutil.copytree(finished, target, symlinks=True)
    shutil.rmtree(target / "hf")
    for path in sorted((target / "checkpoints").glob("step_*"), key=Path.is_symlink, reverse=True):
        if int(path.name[5:11]) > step:
            shutil.rmtree(path) if not path.is_symlink() else path.unlink()
    return {**given, "run_dir": str(target)}


def numbers(run_dir: Path) -> list[dict[str, Any]]:
    """What a run wrote into metrics.jsonl, without the clock's keys."""
    return timeless(read_rows(run_dir / "metrics.jsonl"))

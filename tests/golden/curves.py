"""The recipes of the golden curves, their committed figures, and how far a run is from them.

python -m tests.golden.curves writes curves.json anew: only after a change of the algorithm that is meant.
"""

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.golden.job import Played, play, rl, sft, write_inputs
from tests.helpers.harness import close_workers, run
from tests.helpers.tolerances import SMALL_SHARE

FILE = Path(__file__).with_name("curves.json")
KEYS = ("loss", "grad_norm", "reward_mean", "response_length_mean", "entropy_mean", "kl_mean", "clip_fraction",
        "ratio_deviation", "critic_loss", "critic_grad_norm", "lr")  # fmt: skip
EVERYTHING: Mapping[str, Any] = {
    "epochs": 2,
    "num_mini_batches": 2,
    "kl_coef": 0.3,
    "entropy_coef": 0.1,
}
INNER: Mapping[str, Any] = {"epochs": 2, "num_mini_batches": 2}
WARM_STEPS = 25  # of demonstrations, after which one sum in three is right
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "grpo": {
        "name": "grpo",
        "algorithm": EVERYTHING,
        "rollout": {"temperature": 0.8},
        "optim": {"lr": 2e-3, "warmup_steps": 1, "schedule": "cosine"},
        "trainer": {"steps": 4},
    },
    "ppo": {
        "name": "ppo",
        "algorithm": {**INNER, "kl_coef": 0.05, "gamma": 0.99, "lam": 0.95, "critic_warmup": 1},
    },
    "rloo": {
        "name": "rloo",
        "algorithm": {**INNER, "kl_coef": 0.05, "kl_in": "reward", "kl_estimator": "k1"},
    },
}

Curve = list[dict[str, float]]


def warm(inputs: Path, run_dir: Path) -> dict[str, Any]:
    """The supervised run that the others start from; its model is run_dir/hf."""
    return sft(inputs, run_dir, trainer={"steps": WARM_STEPS, "prompts_per_step": 32})


def recipe(name: str, inputs: Path, start: Path, run_dir: Path) -> dict[str, Any]:
    """One of `RECIPES` from the model at `start`."""
    return rl(inputs, run_dir, model={"path": str(start)}, **RECIPES[name])


def curve(played: Played) -> Curve:
    """What is compared of a run: its numbers; a step that updates no policy has some that are not."""
    return [
        {key: row[key] for key in KEYS if row.get(key) is not None and math.isfinite(row[key])}
        for row in played.rows
    ]


def distance(found: Curve, golden: Curve) -> tuple[float, str]:
    """The largest |a - b| / (|b| + 0.01) over steps and keys, and where; infinite where keys or steps are missing."""
    if len(found) != len(golden) or any(
        expected.keys() - row.keys() for row, expected in zip(found, golden, strict=True)
    ):
        return float("inf"), "steps or keys"
    errors = {
        f"{key} of step {step + 1}": abs(row[key] - expected[key])
        / (abs(expected[key]) + SMALL_SHARE)
        for step, (row, expected) in enumerate(zip(found, golden, strict=True))
        for key in expected
    }
    worst = max(errors, key=lambda where: errors[where])
    return errors[worst], worst


def golden() -> Mapping[str, Curve]:
    """The committed curves by recipe."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def play_all(folder: Path, names: Sequence[str] = tuple(RECIPES)) -> dict[str, Curve]:
    """Every curve, computed now."""
    inputs = write_inputs(folder / "inputs")
    found = {"sft": curve(run(1, play, warm(inputs, folder / "sft"))[0])}
    for name in names:
        found[name] = curve(
            run(1, play, recipe(name, inputs, folder / "sft" / "hf", folder / name))[0]
        )
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        FILE.write_text(json.dumps(play_all(Path(folder)), indent=1) + "\n", encoding="utf-8")
    close_workers()

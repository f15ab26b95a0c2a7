"""Runs of one recipe on several layouts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dovetail.parallel.layout import Layout
from tests.golden.job import Played, play, rl, write_inputs
from tests.helpers.clocked import timeless
from tests.helpers.harness import run
from tests.helpers.tolerances import CURVE_FP32, RL_LOSS_FP32

SFT_STEPS, RL_STEPS = 4, 2  # the second one samples from what the first has learned
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"kl_coef": 0.1, "epochs": 2, "num_mini_batches": 2},
    "ppo": {"kl_coef": 0.05, "lam": 0.95},
    "rloo": {"aggregation": "sequence", "ratio": "sequence"},
}
PATIENCE = 600.0  # seconds for one run on a busy machine


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("layouts") / "inputs")


@pytest.fixture(scope="module", params=RECIPES)
def alone(inputs: Path, request: pytest.FixtureRequest) -> tuple[str, Played]:
    """Each RL algorithm on one rank."""
    name: str = request.param
    return name, played_on("", rl_recipe(inputs, name, inputs.parent / name))


def rl_recipe(inputs: Path, name: str, run_dir: Path, **sections: Any) -> dict[str, Any]:
    reward = {"import": "digit_rewards:share_of_digits"}  # a random model gets some of it
    return rl(
        inputs,
        run_dir,
        name,
        algorithm=RECIPES[name],
        reward=reward,
        trainer={"steps": RL_STEPS},
        **sections,
    )


def played_on(
    layout: str, given: Mapping[str, Any], *, bug: str = "", agree: bool = True
) -> Played:
    """The run on as many ranks as its layout has; every rank sees the same rows, unless `agree` is False.

    What `given` says of its layout beside degrees stays.
    """
    cut = Layout.parse(layout) if layout else Layout()
    section = {
        **given.get("layout", {}),
        "tp": cut.tp,
        "pp": cut.pp,
        "cp": cut.cp,
        "dp": cut.dp or "auto",
    }
    each = run(cut.num_ranks, play, {**given, "layout": section}, timeout=PATIENCE, bug=bug)
    for other in each[1:]:
        assert not agree or timeless(other.rows) == timeless(each[0].rows)
    return each[0]


def assert_same_sft(played: Played, alone: Played) -> None:
    for row, expected in zip(played.rows, alone.rows, strict=True):
        for key in ("loss", "grad_norm"):
            error = abs(row[key] / expected[key] - 1)
            assert error <= CURVE_FP32, f"{key} of step {row['step']}: {error:.1e}"


def assert_same_rl(played: Played, alone: Played) -> None:
    """By the rule of the contract: the same ids, then losses and norms."""
    assert played.ids == alone.ids
    for row, expected in zip(played.rows, alone.rows, strict=True):
        for prefix in ("", "critic_") if "critic_loss" in expected else ("",):
            a, b = row[f"{prefix}loss"], expected[f"{prefix}loss"]
            assert abs(a - b) <= RL_LOSS_FP32 * (1 + abs(b)), (
                f"{prefix}loss of step {row['step']}: {a} and {b}"
            )
            a, b = row[f"{prefix}grad_norm"], expected[f"{prefix}grad_norm"]
            assert abs(a / b - 1) <= CURVE_FP32, (
                f"{prefix}grad_norm of step {row['step']}: {a} and {b}"
            )

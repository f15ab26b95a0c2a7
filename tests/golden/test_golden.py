"""The whole main job against committed curves: supervised steps, then RL; and every planted defect must show."""

from pathlib import Path

import pytest

from tests.golden.bugs import BUGS
from tests.golden.curves import RECIPES, curve, distance, golden, recipe, warm
from tests.golden.job import Played, play, rl, write_inputs
from tests.helpers.harness import run
from tests.helpers.tolerances import GOLDEN_BUG, GOLDEN_FP32

RL_STEPS, SHOWN = (
    50,
    10,
)  # steps of the learning test, and how many of them make its beginning and its end
LEAST_RISE = 0.15  # of the share of right sums


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("golden") / "inputs")


@pytest.fixture(scope="module")
def supervised(inputs: Path) -> Played:
    return run(1, play, warm(inputs, inputs.parent / "sft"))[0]


def test_the_supervised_curve(supervised: Played) -> None:
    error, where = distance(curve(supervised), golden()["sft"])
    assert error <= GOLDEN_FP32, f"{where}: {error:.1e}"


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.usefixtures("supervised")
def test_the_rl_curve(inputs: Path, name: str) -> None:
    played = run(1, play, recipe(name, inputs, inputs.parent / "sft" / "hf", inputs.parent / name))[
        0
    ]
    error, where = distance(curve(played), golden()[name])
    assert error <= GOLDEN_FP32, f"{where}: {error:.1e}"


@pytest.mark.parametrize(
    "bug", [pytest.param(bug, marks=[pytest.mark.soak] * (i % 3)) for i, bug in enumerate(BUGS)]
)
@pytest.mark.usefixtures("supervised")
def test_a_planted_bug_is_caught(inputs: Path, bug: str) -> None:
    start, out = inputs.parent / "sft" / "hf", inputs.parent / bug.replace(" ", "-")
    played = run(1, play, recipe("grpo", inputs, start, out), bug=bug)[0]
    error, _ = distance(curve(played), golden()["grpo"])
    assert error >= GOLDEN_BUG, f"{bug} moves the curve by {error:.1e} only"


@pytest.mark.usefixtures("supervised")
def test_the_reward_rises(inputs: Path) -> None:
    given = rl(
        inputs,
        inputs.parent / "learns",
        model={"path": str(inputs.parent / "sft" / "hf")},
        rollout={"samples_per_prompt": 8},
        reward={"import": None, "name": "exact_match"},
        optim={"lr": 1e-3},
        trainer={"steps": RL_STEPS, "prompts_per_step": 16},
    )
    rewards = [row["reward_mean"] for row in run(1, play, given)[0].rows]
    rise = (sum(rewards[-SHOWN:]) - sum(rewards[:SHOWN])) / SHOWN
    assert rise >= LEAST_RISE, rewards

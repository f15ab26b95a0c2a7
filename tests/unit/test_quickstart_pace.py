"""The quickstart fits its time budget on any machine, by what was measured before the run."""

import pytest
import yaml

from examples.quickstart import pace
from examples.quickstart.__main__ import RECIPES

RECIPE = yaml.safe_load((RECIPES / "quickstart_grpo.yaml").read_text())


def test_the_numbers_are_the_recipes() -> None:
    trainer = RECIPE["trainer"]
    found = (trainer["time_budget_seconds"], trainer["steps"], trainer["prompts_per_step"])
    assert (*found, RECIPE["rollout"]["samples_per_prompt"]) == (
        pace.BUDGET_SECONDS,
        pace.STEPS,
        pace.PROMPTS,
        pace.SAMPLES,
    )
    assert trainer["stop_at_reward"] == pace.TARGET


@pytest.mark.parametrize(
    ("sequence", "prompts", "steps"),
    [(0.001, 16, 40), (0.06, 16, 28), (0.1, 8, 33), (0.2, 4, 31), (0.5, 2, 22), (3.0, 2, 1)],
)
def test_what_fits(sequence: float, prompts: int, steps: int) -> None:
    """From seconds a sequence; 3 s was a machine whose two steps took 1,185 s."""
    found = pace.pace(sequence)
    assert (found.prompts, found.steps) == (prompts, steps)
    told = found.describe()
    assert f"{found.seconds:.2g} s for a step of {prompts} prompts" in told
    assert ("would take about" in told) == (steps < 40)
    assert ("more than the 330 s meant" in told) == (sequence == 3.0)
    assert ("not that it learns" in told) == (steps < 10)
    assert "at most" not in told


def test_what_a_run_shows() -> None:
    """Of few steps, and never of a budget that was passed."""
    slow = [{"step": 1, "step_seconds": 600.0, "reward_mean": 0.1}]
    told = pace.conclude(slow, 2)
    assert told.startswith(
        "1 of 40 steps were made, in 600 s, more than the 330 s meant. So few steps show that"
    )
    assert "All 40 steps of 16 prompts would take about 3200 minutes: " in told
    assert told.endswith("python -m examples.quickstart trainer.time_budget_seconds=null")
    assert "meant" not in pace.conclude([{**slow[0], "step_seconds": 60.0}] * 3, 2)
    assert pace.conclude([{**slow[0], "reward_mean": 0.95}], 2) == pace.conclude(slow * 10, 2) == ""

"""Notes on how a run learns: their exact text, with the key that changes it, and how often."""

import math
from typing import Any

import pytest

from dovetail.recipe.schema import make_recipe
from dovetail.run.learning import APART, LearningNotes

RECIPE = make_recipe({"model": {"path": "m"}, "data": {"train": "t"}, "run_dir": "r"})
START = [
    {
        "entropy_mean": 2.0,
        "kl_mean": 0.01,
        "mismatch_k3": 0.001,
        "clip_fraction": 0.0,
        "equal_groups": 0.5,
    }
] * 3
REMEDY = (
    "take prompts that the model solves sometimes (data.train), raise rollout.samples_per_prompt or rollout.temperature, "
    "or give rewards in between (reward)"
)


def told(rows: list[dict[str, Any]]) -> list[tuple[int, str]]:
    notes = LearningNotes(RECIPE)
    return [
        (step, text) for step, row in enumerate(rows, 1) for text in notes.of({"step": step, **row})
    ]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (
            {"entropy_mean": 0.3},
            "entropy fell from 2 to 0.3: raise algorithm.entropy_coef or algorithm.clip_high, or lower optim.lr",
        ),
        (
            {"truncated_fraction": 0.75},
            "75% of the completions were cut at rollout.max_new_tokens=64: raise it, or reward shorter ones",
        ),
        ({"kl_mean": 0.4}, "KL rose from 0.01 to 0.4: lower optim.lr, or raise algorithm.kl_coef"),
        (
            {"mismatch_k3": 0.02},
            "the sampler's log-probs moved away from the policy's, k3 from 0.001 to 0.02: set model.dtype=float32, or "
            "rollout.router_replay=rollout for experts",
        ),
        (
            {"mismatch_mean": 0.87},
            "sampler and policy differ by 0.87 nats a token (mean) with the same weights: look for a stale prefix cache, "
            "log-probs at another temperature, weights that did not arrive, or another model",
        ),
        (
            {"clip_fraction": 0.4},
            "40% of the tokens were clipped: lower optim.lr, algorithm.epochs or algorithm.num_mini_batches",
        ),
    ],
)
def test_a_note_names_the_key_and_comes_once_in_a_while(row: dict[str, Any], text: str) -> None:
    (first, second) = told([*START, *[row] * (APART + 1)])
    assert [first[0], second[0]] == [4, 4 + APART]
    assert first[1] == text


def test_equal_rewards_of_some_steps() -> None:
    equal = {"equal_groups": 1.0}
    assert told([equal, equal, {"equal_groups": 0.9}, equal, equal]) == []
    assert told([equal] * 3) == [
        (3, f"3 steps in a row had equal rewards in every group, and taught nothing: {REMEDY}")
    ]


def test_a_good_run_and_unknown_numbers_say_nothing() -> None:
    assert told([*START, *START, {}, {"entropy_mean": math.nan, "kl_mean": None}]) == []
    sft = LearningNotes(
        make_recipe({**RECIPE.model_dump(by_alias=True), "algorithm": {"name": "sft"}})
    )
    assert sft.of({"step": 1, "truncated_fraction": 1.0}) == []

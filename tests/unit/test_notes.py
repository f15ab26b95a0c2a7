"""What a run tells as it starts: each thing where it holds, nothing of a run that is as it should be."""

from pathlib import Path
from typing import Any

import pytest

from dovetail import system
from dovetail.factory.notes import cpu_notes, notes
from dovetail.recipe.schema import make_recipe

SMALLEST: dict[str, Any] = {
    "model": {"path": "M"},
    "data": {"train": "rows.jsonl"},
    "run_dir": "runs/x",
}


@pytest.mark.parametrize("name", ["sft", "grpo", "rloo", "ppo"])
def test_nothing_of_a_run_that_is_as_it_should_be(name: str) -> None:
    recipe = make_recipe({**SMALLEST, "algorithm": {"name": name}})
    assert notes(recipe, {"max_position_embeddings": 128}, [64] * 16) == []
    assert notes(make_recipe({**SMALLEST, "reward": {"import": "a:b"}}), {}, [999] * 16) == []
    given: dict[str, Any] = {
        "algorithm": {"name": "distillation", "lmbda": 0.5},
        "teacher": {"path": "T"},
    }
    given["data"] = {"train": "R", "max_length": 9}  # of given responses
    assert notes(make_recipe({**SMALLEST, **given}), {}, [9] * 16) == []


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"critic": {"lr": 1.0, "layout": {"tp": 2}}},
            "without effect, since algorithm.name is grpo: critic.layout, critic.lr",
        ),
        (
            {"algorithm": {"name": "sft"}, "reward": {"import": "a:b"}},
            "without effect, since algorithm.name is sft: reward.import",
        ),
        (
            {
                "algorithm": {"name": "sft"},
                "reference": {"path": "R"},
                "trainer": {"stop_at_reward": 0.0},
            },
            "without effect, since algorithm.name is sft: reference.path, trainer.stop_at_reward",
        ),
        (
            {"data": {"max_length": 32}},
            "without effect, since algorithm.name is grpo: data.max_length",
        ),
        (
            {
                "algorithm": {
                    "name": "rloo",
                    "kl_coef": 0.1,
                    "kl_in": "reward",
                    "kl_estimator": "k3",
                }
            },
            "algorithm.kl_estimator=k3 with kl_in=reward hardly pulls towards the reference; take k1 in the reward, k2 or k3 in "
            "the loss",
        ),
        (
            {"algorithm": {"name": "grpo", "kl_coef": 0.1, "kl_estimator": "k1"}},
            "algorithm.kl_estimator=k1 with kl_in=loss hardly pulls towards the reference; take k1 in the reward, k2 or k3 in "
            "the loss",
        ),
        (
            {"algorithm": {"name": "ppo", "critic_warmup": 3}, "trainer": {"steps": 3}},
            "the policy is never trained: algorithm.critic_warmup=3 steps train the critic alone, and trainer.steps is 3",
        ),
        (
            {"trainer": {"eval_every": 2}},
            "without effect, since there is no data.eval and no eval.sets: trainer.eval_every",
        ),
        (
            {"trainer": {"prompts_per_step": 17}},
            "trainer.prompts_per_step is 17, and data.train has 16 rows: a step takes some of them more than once",
        ),
        (
            {"algorithm": {"name": "sft"}},
            "the longest row of data.train has 129 tokens, but the model has 128 positions (max_position_embeddings): those "
            "beyond were never trained",
        ),
    ],
)
def test_each_thing_where_it_holds(given: dict[str, Any], told: str) -> None:
    lengths = [3] * 15 + [129 if "129" in told else 64]
    config = {"text_config": {"max_position_embeddings": 128}}
    given = {**SMALLEST, **given, "data": {**SMALLEST["data"], **given.get("data", {})}}
    assert notes(make_recipe(given), config, lengths) == [told]


@pytest.mark.parametrize(
    ("features", "dtype", "told"),
    [
        ("flags : fpu avx512f", "bfloat16", True),
        ("flags : fpu avx512f avx512_bf16", "bfloat16", False),
        ("Features : fp asimd bf16", "bfloat16", False),
        ("flags : fpu avx512f", "float32", False),
        (None, "bfloat16", False),
    ],
)
def test_bfloat16_on_a_cpu_without_its_instructions_gets_a_line(
    features: str | None, dtype: str, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "_PROC", tmp_path)
    if features is not None:
        (tmp_path / "cpuinfo").write_text(features)
    recipe = make_recipe({**SMALLEST, "model": {"path": "M", "dtype": dtype}})
    line = "this CPU has no instructions for bfloat16, and computes it slowly; "
    expected = [f"{line}model.dtype=float32 is faster here"] if told else []
    assert cpu_notes(recipe) == expected

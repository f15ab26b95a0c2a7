"""Recipes, samples and tasks of RL without a model."""

from collections.abc import Mapping, Sequence as Seq
from typing import Any
from unittest import mock

import torch

from dovetail.batch.loss import TokenStats
from dovetail.batch.packed import PackedBatch
from dovetail.data.examples import Prompt
from dovetail.engine.base import StepReport
from dovetail.recipe.schema import Recipe, make_recipe
from dovetail.rewards.samples import RecentFailures, RewardResult
from dovetail.rl.algorithms.policy_gradient import RLAlgorithm
from dovetail.rl.algorithms.table import make_algorithm
from dovetail.rl.collect import SampleCollector
from dovetail.rl.custom import Custom
from dovetail.rl.experience import pack_samples
from dovetail.rl.samples import Sample
from dovetail.rl.tasks import RLTask
from dovetail.sampler.base import SamplingParams
from dovetail.sampler.turn import Turn
from tests.helpers.drawn import DrawnSampler, turn_of


def recipe_of(name: str = "grpo", shuffle: bool = True, **algorithm: Any) -> Recipe:
    return make_recipe(
        {
            "model": {"path": "m"},
            "data": {"train": "rows.jsonl", "shuffle": shuffle},
            "algorithm": {"name": name, **algorithm},
            "trainer": {"prompts_per_step": 4},
            "run_dir": "run",
        }
    )


def algorithm_of(recipe: Recipe) -> RLAlgorithm:
    algorithm = make_algorithm(recipe, Custom())
    assert isinstance(algorithm, RLAlgorithm)
    return algorithm


def with_advantages(
    batch: PackedBatch, samples: Seq[Sample], name: str, **keys: Any
) -> PackedBatch:
    """The batch with the advantages of an algorithm."""
    return algorithm_of(recipe_of(name, **keys)).with_advantages(batch, samples)


def sample(group: int, index: int, prompt: Seq[int], response: Seq[int], reward: float) -> Sample:
    turn = turn_of(response, group, index)
    return Sample(Prompt(id=group, ids=tuple(prompt)), turn, "", reward)


SAMPLES = [
    sample(0, 0, [5, 6], [1, 2, 3], 1.0),
    sample(0, 1, [5, 6], [4], 0.0),  # an empty response: its EOS alone
    sample(1, 0, [7], [8, 9], 0.5),
    sample(1, 1, [7], [8, 8, 8, 8], 0.5),
    sample(2, 0, [1, 1, 1], [2, 4], 0.25),
]


def batch_of(samples: Seq[Sample] = SAMPLES, temperature: float = 1.0) -> PackedBatch:
    return pack_samples(samples, temperature)


def report(flops: float) -> StepReport:
    return StepReport(1.0, 1.0, 0.1, 5, flops, skipped=False, metrics={})


def judging(**keys: Any) -> mock.Mock:
    """A stand-in for a RewardManager."""
    return mock.Mock(failures=RecentFailures(), take_metrics=mock.Mock(return_value={}), **keys)


def pretended_ppo(policy: StepReport, critic: StepReport, **algorithm: Any) -> RLTask:
    """Whose engines do nothing but report so."""

    def engine(report: StepReport) -> mock.Mock:
        return mock.Mock(
            train_step=mock.Mock(return_value=report),
            values=lambda batch: torch.zeros(len(batch)),
            score=lambda batch: TokenStats(torch.zeros(len(batch)), torch.zeros(len(batch))),
        )

    prompts = [Prompt(id=i, ids=(5, 6)) for i in range(4)]
    recipe = recipe_of("ppo", epochs=2, num_mini_batches=2, **algorithm)
    trained = engine(policy)
    collector = SampleCollector(
        recipe=recipe,
        policy=trained,
        sampler=DrawnSampler(lambda *_: (1, 2)),
        sampling=SamplingParams(),
        prompts=prompts,
        held_out=[],
        rewards=judging(return_value=[RewardResult(1.0)] * 4),
        decode=lambda _: "",
    )
    return RLTask(
        recipe=recipe,
        policy=trained,
        critic=engine(critic),
        collector=collector,
        algorithm=algorithm_of(recipe),
    )


def dynamic(
    rewards: Mapping[int, Seq[float | None]], **algorithm: Any
) -> tuple[RLTask, list[list[int]]]:
    """GRPO on prompts with these rewards of their two samples, and the rows that were asked for."""
    prompts = [Prompt(id=i, ids=(5, 6)) for i in rewards]
    sampler = DrawnSampler(lambda _, sample: (1,) * (2, 9)[sample])

    def judge(prompts: Seq[Prompt], completions: Seq[Turn], _: Seq[str]) -> list[RewardResult]:
        return [
            RewardResult(rewards[p.id][c.sample]) for p, c in zip(prompts, completions, strict=True)
        ]

    recipe = recipe_of("grpo", shuffle=False, **{"drop_zero_std_groups": True, **algorithm})
    recipe = recipe.model_copy(
        update={"trainer": recipe.trainer.model_copy(update={"prompts_per_step": 2, "steps": 3})}
    )
    recipe = recipe.model_copy(
        update={"rollout": recipe.rollout.model_copy(update={"max_new_tokens": 10})}
    )
    policy = mock.Mock()
    collector = SampleCollector(
        recipe=recipe,
        policy=policy,
        sampler=sampler,
        sampling=SamplingParams(samples=2),
        prompts=prompts,
        held_out=[],
        rewards=judging(side_effect=judge),
        decode=lambda _: "",
    )
    task = RLTask(recipe=recipe, policy=policy, collector=collector, algorithm=algorithm_of(recipe))
    return task, sampler.asked

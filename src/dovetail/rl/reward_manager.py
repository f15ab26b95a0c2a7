"""Rewards of a step's samples."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from dovetail.batch.packed import PackedBatch
from dovetail.data.examples import Prompt
from dovetail.engine.native import Engine
from dovetail.parallel.consensus import agreed, of_first
from dovetail.parallel.mesh import Mesh
from dovetail.rewards.runner import RewardRunner
from dovetail.rewards.samples import (
    MAX_REWARD_ERRORS,
    RecentFailures,
    RewardInput,
    RewardResult,
    TrainingProgress,
)
from dovetail.rl.step_metrics import mean
from dovetail.sampler.turn import Turn

METRIC_PREFIX = "reward_metric/"  # of what functions log by `log_metric`


@dataclass(frozen=True)
class Scores:
    """Results of one reward, and (name, value) of each metric that it logged."""

    results: list[RewardResult]
    metrics: Seq[tuple[str, float]] = ()


def reward_input(prompt: Prompt, turn: Turn, text: str) -> RewardInput:
    assert turn.finish is not None
    return RewardInput(
        completion=text,
        completion_ids=turn.ids,
        answer=prompt.answer,
        finish=turn.finish,
        prompt=prompt.prompt,
        columns=prompt.columns,
    )


@dataclass(frozen=True)
class FunctionReward:
    """runner: of the first rank. Collective."""

    runner: RewardRunner | None
    mesh: Mesh

    def score(
        self,
        prompts: Seq[Prompt],
        turns: Seq[Turn],
        texts: Seq[str],
        progress: TrainingProgress,
    ) -> Scores:
        results = list[dict[str, Any]]()
        metrics = list[tuple[str, float]]()
        with agreed(self.mesh):
            if self.runner is not None:
                samples = zip(prompts, turns, texts, strict=True)
                inputs = [reward_input(*sample) for sample in samples]
                groups = [turn.id.row for turn in turns]
                scored = self.runner.score(inputs, MAX_REWARD_ERRORS, groups, progress)
                results = [asdict(each) for each in scored]
                metrics = self.runner.metrics
        results, metrics = of_first([results, metrics], self.mesh)
        return Scores([RewardResult(**each) for each in results], metrics)

    def close(self) -> None:
        if self.runner is not None:
            self.runner.close()


@dataclass(frozen=True)
class ModelReward:
    """A reward model's value at the last token. Collective."""

    engine: Engine
    encode: Callable[[Prompt, str], list[int]]

    def score(
        self,
        prompts: Seq[Prompt],
        turns: Seq[Turn],
        texts: Seq[str],
        _: TrainingProgress,
    ) -> Scores:
        if not texts:
            return Scores([])
        batch = PackedBatch.pack(
            [self.encode(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        )
        values = self.engine.values(batch)
        last = values[[end - 1 for end in accumulate(batch.lengths)]].tolist()
        results = []
        for value in last:
            error = None if math.isfinite(value) else f"the reward model gave {value}"
            results.append(RewardResult(value if error is None else None, error))
        return Scores(results)

    def close(self) -> None:
        """Nothing is open."""


Reward = FunctionReward | ModelReward


class RewardManager:
    """The weighted sum of `rewards`, by label. name: in messages. Collective."""

    def __init__(
        self, rewards: Mapping[str, Reward], weights: Seq[float] = (1.0,), name: str = ""
    ) -> None:
        self.rewards = rewards
        self.weights = weights
        self.name = name
        self.failures = RecentFailures()
        self.progress = TrainingProgress()  # as functions are told
        self._metrics: dict[str, list[float]] = defaultdict(list)

    def __call__(
        self, prompts: Seq[Prompt], turns: Seq[Turn], texts: Seq[str]
    ) -> list[RewardResult]:
        parts = []
        for reward in self.rewards.values():
            scores = reward.score(prompts, turns, texts, self.progress)
            parts.append(scores.results)
            for name, value in scores.metrics:
                self._metrics[name].append(value)
        return [self._sum(results) for results in zip(*parts, strict=True)]

    def take_metrics(self) -> dict[str, float]:
        """Returns the means of what functions have logged since the last call."""
        means = {f"{METRIC_PREFIX}{name}": mean(each) for name, each in self._metrics.items()}
        self._metrics.clear()
        return means

    def _sum(self, results: Seq[RewardResult]) -> RewardResult:
        """A value of None counts nothing; all of None, or any error, drop the sample."""
        named = dict(zip(self.rewards, results, strict=True))
        errors = [
            f"{label}: " * (len(named) > 1) + r.error
            for label, r in named.items()
            if r.error is not None
        ]
        values = [
            w * r.value for w, r in zip(self.weights, results, strict=True) if r.value is not None
        ]
        value = None if errors or not values else math.fsum(values)
        parts = {label: r.value for label, r in named.items()} if len(named) > 1 else {}
        error = errors[0] if errors else None
        scored = all(r.scored for r in results)
        failed = [r for r in results if r.error is not None]
        killed = bool(failed) and failed[0].killed
        extra = {column: each for r in results for column, each in r.extra.items()}
        return RewardResult(value, error, scored, parts, killed, extra)

    def close(self) -> None:
        for reward in self.rewards.values():
            reward.close()

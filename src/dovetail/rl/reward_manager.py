"""Rewards of a step's samples."""

import math
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

from dovetail.batch.packed import PackedBatch
from dovetail.data.examples import Prompt
from dovetail.engine.native import Engine
from dovetail.parallel.consensus import agreed, of_first
from dovetail.parallel.mesh import Mesh
from dovetail.rewards.runner import (
    MOST_REWARD_ERRORS,
    RecentFailures,
    RewardInput,
    RewardResult,
    RewardRunner,
)
from dovetail.sampler.base import Completion


def reward_input(p: Prompt, c: Completion, text: str) -> RewardInput:
    return RewardInput(
        completion=text, answer=p.answer, finish=c.finish, prompt=p.prompt, columns=p.columns
    )


@dataclass(frozen=True)
class FunctionReward:
    """runner: of the first rank. Collective."""

    runner: RewardRunner | None
    mesh: Mesh

    def score(
        self, prompts: Seq[Prompt], completions: Seq[Completion], texts: Seq[str]
    ) -> list[RewardResult]:
        results: list[tuple[float | None, str | None, bool, bool]] = []
        with agreed(self.mesh):
            if self.runner is not None:
                inputs = [
                    reward_input(*parts) for parts in zip(prompts, completions, texts, strict=True)
                ]
                scored = self.runner.score(inputs, MOST_REWARD_ERRORS, [c.row for c in completions])
                results = [(each.value, each.error, each.scored, each.killed) for each in scored]
        return [
            RewardResult(value, error, was_scored, killed=killed)
            for value, error, was_scored, killed in of_first(results, self.mesh)
        ]

    def close(self) -> None:
        if self.runner is not None:
            self.runner.close()


@dataclass(frozen=True)
class ModelReward:
    """A reward model's value at the last token. Collective."""

    engine: Engine
    encode: Callable[[Prompt, str], list[int]]
    end: Callable[..., None]

    def score(
        self, prompts: Seq[Prompt], completions: Seq[Completion], texts: Seq[str]
    ) -> list[RewardResult]:
        if not texts:
            return []
        batch = PackedBatch.pack(
            [self.encode(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        )
        values = self.engine.values(batch)
        last = values[[end - 1 for end in accumulate(batch.lengths)]].tolist()
        return [
            RewardResult(x)
            if math.isfinite(x)
            else RewardResult(None, f"the reward model gave {x}")
            for x in last
        ]

    def close(self) -> None:
        self.end()


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

    def __call__(
        self, prompts: Seq[Prompt], completions: Seq[Completion], texts: Seq[str]
    ) -> list[RewardResult]:
        parts = [reward.score(prompts, completions, texts) for reward in self.rewards.values()]
        return [self._sum(results) for results in zip(*parts, strict=True)]

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
        return RewardResult(value, error, scored, parts, killed)

    def close(self) -> None:
        for reward in self.rewards.values():
            reward.close()

"""Rewards of a step's samples: functions and judges on the first rank, reward models on all."""

import math
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from dovetail.batch.packed import PackedBatch
from dovetail.data.examples import Prompt
from dovetail.engine.base import Engine
from dovetail.parallel.consensus import agreed, of_first
from dovetail.parallel.mesh import Mesh
from dovetail.rewards.runner import MOST_REWARD_ERRORS, RewardInput, RewardResult, RewardRunner
from dovetail.rollout.base import Completion


def reward_input(p: Prompt, c: Completion, text: str) -> RewardInput:
    return RewardInput(completion=text, answer=p.answer, finish=c.finish, prompt=p.prompt, columns=p.columns)


class Reward(Protocol):
    """One reward of a sum. Collective."""

    def score(self, prompts: Seq[Prompt], completions: Seq[Completion], texts: Seq[str]) -> list[RewardResult]:
        """`prompts[i]` belongs to completion i."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class FunctionReward:
    """Scores on the first rank, which has the `runner`, for all."""

    runner: RewardRunner | None
    mesh: Mesh

    def score(self, prompts: Seq[Prompt], completions: Seq[Completion], texts: Seq[str]) -> list[RewardResult]:
        results: list[tuple[float | None, str | None, bool]] = []
        with agreed(self.mesh):
            if self.runner is not None:
                inputs = [reward_input(*parts) for parts in zip(prompts, completions, texts, strict=True)]
                scored = self.runner.score(inputs, MOST_REWARD_ERRORS, [c.row for c in completions])
                results = [(result.value, result.error, result.scored) for result in scored]
        return [RewardResult(*result) for result in of_first(results, self.mesh)]

    def close(self) -> None:
        if self.runner is not None:
            self.runner.close()


@dataclass(frozen=True)
class ModelReward:
    """The value of a reward model at the last token. encode: of a prompt and its completion, by the model's own tokenizer."""

    engine: Engine
    encode: Callable[[Prompt, str], list[int]]
    end: Callable[..., None]

    def score(self, prompts: Seq[Prompt], completions: Seq[Completion], texts: Seq[str]) -> list[RewardResult]:
        if not texts:
            return []
        batch = PackedBatch.pack([self.encode(prompt, text) for prompt, text in zip(prompts, texts, strict=True)])
        values = self.engine.values(batch)
        last = values[[end - 1 for end in accumulate(batch.lengths)]].tolist()
        return [
            RewardResult(value) if math.isfinite(value) else RewardResult(None, f"the reward model gave {value}")
            for value in last
        ]

    def close(self) -> None:
        self.end()


class RewardManager:
    """The weighted sum of `rewards`, by label. Collective."""

    def __init__(self, rewards: Mapping[str, Reward], weights: Seq[float] = (1.0,), name: str = "") -> None:
        """name: in messages."""
        self.rewards, self.weights, self.name = rewards, weights, name

    def __call__(self, prompts: Seq[Prompt], completions: Seq[Completion], texts: Seq[str]) -> list[RewardResult]:
        parts = [reward.score(prompts, completions, texts) for reward in self.rewards.values()]
        return [self._sum(results) for results in zip(*parts, strict=True)]

    def _sum(self, results: Seq[RewardResult]) -> RewardResult:
        """None counts nothing; dropped if all are None or any failed."""
        scored = all(result.scored for result in results)
        errors = [
            result.error if len(results) == 1 else f"{label}: {result.error}"
            for label, result in zip(self.rewards, results, strict=True)
            if result.error is not None
        ]
        values = [w * r.value for w, r in zip(self.weights, results, strict=True) if r.value is not None]
        parts = {label: result.value for label, result in zip(self.rewards, results, strict=True)}
        value = None if errors or not values else math.fsum(values)
        return RewardResult(value, errors[0] if errors else None, scored, parts if len(results) > 1 else {})

    def close(self) -> None:
        for reward in self.rewards.values():
            reward.close()

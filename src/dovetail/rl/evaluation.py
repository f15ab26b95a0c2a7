"""Metrics of sets of prompts from the rewards of their completions."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import NamedTuple

from dovetail.data.examples import Prompt
from dovetail.errors import ConfigError
from dovetail.parallel.consensus import agreed, of_first
from dovetail.parallel.mesh import Mesh
from dovetail.rewards.built_in import final_number
from dovetail.rewards.runner import RewardRunner
from dovetail.rl.reward_manager import RewardManager, reward_input
from dovetail.rl.samples import Sample
from dovetail.rl.step_metrics import Row, mean
from dovetail.sampler.turn import Turn

SOLVED_REWARD = 1.0


class Rewarded(NamedTuple):
    """Samples with a reward, and metrics. dropped: their reward was None; it is NaN here."""

    samples: list[Sample]
    dropped: list[Sample]
    metrics: Row


def with_rewards(
    asked: Seq[Prompt],
    turns: Seq[Turn],
    texts: Seq[str],
    rewards: RewardManager,
    where: str,
) -> Rewarded:
    """Scores turns. asked: the prompt of each. Collective.

    Samples whose reward failed are in neither list; `reward_errors` counts them.
    """
    results = rewards(asked, turns, texts)
    errors, cause = rewards.failures.count(results, [prompt.id for prompt in asked], where)
    samples = list[Sample]()
    dropped = list[Sample]()
    for prompt, turn, text, result in zip(asked, turns, texts, results, strict=True):
        if result.value is not None:
            samples.append(Sample(prompt, turn, text, result.value, result.parts, result.extra))
        elif result.error is None:
            dropped.append(Sample(prompt, turn, text, math.nan, result.parts, result.extra))
    metrics: Row = {"reward_errors": errors, "rewards_none": len(dropped)}
    if cause is not None:
        metrics["reward_error"] = cause
    return Rewarded(samples, dropped, metrics)


def average(group: Seq[Sample], k: int) -> float:
    return mean([sample.reward for sample in group[:k]])


def pass_at(group: Seq[Sample], k: int) -> float:
    """The unbiased estimate from all samples (Chen et al. 2021)."""
    unsolved = sum(sample.reward < SOLVED_REWARD for sample in group)
    return 1.0 - math.comb(unsolved, k) / math.comb(len(group), k)


def majority(group: Seq[Sample], k: int) -> float:
    """Whether the first of the most frequent answers is solved."""
    votes = [vote(sample.text) for sample in group[:k]]
    (winner, _), *_ = Counter(votes).most_common(1)
    return float(group[votes.index(winner)].reward >= SOLVED_REWARD)


def vote(text: str) -> Fraction | str:
    number = final_number(text)
    return text.strip() if number is None else number


BUILT_IN: Mapping[str, Callable[[Seq[Sample], int], float]] = {
    "avg": average,
    "pass": pass_at,
    "maj": majority,
}


@dataclass
class CustomMetric:
    """A user's function, in the first rank's worker process. Failures are reported and survived. Collective."""

    name: str
    runner: RewardRunner | None
    mesh: Mesh
    say: Callable[[str], None]
    broken: str | None = None  # why it cannot be started

    def __call__(self, samples: Seq[Sample]) -> float:
        value = None
        error = None
        with agreed(self.mesh):
            if self.runner is not None and samples:
                value, error = self._score(self.runner, samples)
        value, error = of_first([value, error], self.mesh)
        if error is not None:
            self.say(f"the metric {self.name} failed, the run goes on: {error}")
        return math.nan if value is None else value

    def _score(self, runner: RewardRunner, samples: Seq[Sample]) -> tuple[float | None, str | None]:
        inputs = []
        for s in samples:
            columns = {
                **s.prompt.columns,
                "id": s.prompt.id,
                "sample": s.completion.sample,
                "reward": s.reward,
            }
            inputs.append(reward_input(replace(s.prompt, columns=columns), s.completion, s.text))
        if self.broken is None:
            try:
                results = runner.score(inputs)
            except ConfigError as error:
                self.broken = str(error)
            else:
                values = [result.value for result in results if result.value is not None]
                return mean(values) if values else None, next(
                    filter(None, (r.error for r in results)), None
                )
        return None, self.broken

    def close(self) -> None:
        if self.runner is not None:
            self.runner.close()


@dataclass(frozen=True, kw_only=True)
class EvalSet:
    """metrics: avg@K, pass@K, maj@K, or a key of `custom`."""

    name: str
    prompts: Seq[Prompt]
    samples: int = 1
    temperature: float = 0.0
    metrics: Seq[str] = ()
    custom: Mapping[str, CustomMetric] = field(default_factory=dict)

    def measure(self, samples: Seq[Sample]) -> dict[str, float]:
        """Over prompts with K rewarded samples; NaN without any."""
        groups: dict[int, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.group, []).append(sample)
        row = {}
        for metric in self.metrics:
            kind, _, k = metric.partition("@")
            if metric in self.custom:
                row[self.custom[metric].name] = self.custom[metric](samples)
            else:
                row[metric] = mean(
                    [BUILT_IN[kind](g, int(k)) for g in groups.values() if len(g) >= int(k)]
                )
        return row

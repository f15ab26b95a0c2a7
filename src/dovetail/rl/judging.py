"""Completions -> rewards, the same on every rank: the first rank asks the reward processes and tells the others."""

from collections.abc import Sequence as Seq

from dovetail.data import Prompt
from dovetail.mesh import Mesh
from dovetail.rl.rewards import Judged, RewardResult, RewardRunner
from dovetail.rollout.base import Completion
from dovetail.weights.agree import agreed, of_first


class Judge:
    """`runner` is there on the first rank only. Collective."""

    def __init__(self, runner: RewardRunner | None, mesh: Mesh) -> None:
        self.runner, self.mesh = runner, mesh

    def __call__(self, prompts: Seq[Prompt], completions: Seq[Completion], texts: Seq[str]) -> list[RewardResult]:
        """One result a completion; `prompts[i]` is what completion i answers."""
        told: list[tuple[float | None, str | None]] = []
        with agreed(self.mesh):
            if self.runner is not None:
                judged = [
                    Judged(completion=text, answer=p.answer, finish=c.finish, prompt=p.prompt, columns=p.columns)
                    for p, c, text in zip(prompts, completions, texts, strict=True)
                ]
                told = [(result.value, result.error) for result in self.runner.score(judged)]
        return [RewardResult(value, error) for value, error in of_first(told, self.mesh)]

    def close(self) -> None:
        """End the reward processes."""
        if self.runner is not None:
            self.runner.close()

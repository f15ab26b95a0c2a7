"""Completions -> rewards, the same on every rank: the first rank asks the reward processes and tells the others."""

import json
from collections.abc import Sequence as Seq

from dovetail.comm import gather_text
from dovetail.data import Prompt
from dovetail.mesh import Mesh
from dovetail.rl.rewards import Judged, RewardResult, RewardRunner
from dovetail.rollout.base import Completion
from dovetail.weights.agree import agreed


class Judge:
    """`runner` is there on the first rank only. Collective."""

    def __init__(self, runner: RewardRunner | None, mesh: Mesh) -> None:
        self.runner, self.mesh = runner, mesh

    def __call__(self, prompts: Seq[Prompt], completions: Seq[Completion], texts: Seq[str]) -> list[RewardResult]:
        """One result a completion; `prompts[i]` is what completion i answers."""
        told = ""
        with agreed(self.mesh):
            if self.runner is not None:
                judged = [
                    Judged(completion=text, answer=p.answer, finish=c.finish, prompt=p.prompt, columns=p.columns)
                    for p, c, text in zip(prompts, completions, texts, strict=True)
                ]
                told = json.dumps([(result.value, result.error) for result in self.runner.score(judged)])
        first = gather_text(told, self.mesh["world"], self.mesh.device)[0]
        return [RewardResult(value, error) for value, error in json.loads(first)]

    def close(self) -> None:
        """End the reward processes."""
        if self.runner is not None:
            self.runner.close()

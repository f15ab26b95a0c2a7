"""Completions -> rewards, the same on every rank: the first rank asks the reward processes and tells the others."""

from collections.abc import Sequence as Seq
from typing import Any

from dovetail.data import Prompt
from dovetail.errors import DataError
from dovetail.mesh import Mesh
from dovetail.rl.rewards import Judged, RewardResult, RewardRunner
from dovetail.rollout.base import Completion
from dovetail.weights.agree import agreed, of_first

MOST_REWARD_ERRORS = 0.05  # of a step's samples; above it the reward itself is taken to be wrong


class Judge:
    """`runner` is there on the first rank only; `name` is the reward's, for messages. Collective."""

    def __init__(self, runner: RewardRunner | None, mesh: Mesh, name: str) -> None:
        self.runner, self.mesh, self.name = runner, mesh, name

    def __call__(self, prompts: Seq[Prompt], completions: Seq[Completion], texts: Seq[str]) -> list[RewardResult]:
        """One result a completion; `prompts[i]` is what completion i answers."""
        told: list[tuple[float | None, str | None, bool]] = []
        with agreed(self.mesh):
            if self.runner is not None:
                judged = [
                    Judged(completion=text, answer=p.answer, finish=c.finish, prompt=p.prompt, columns=p.columns)
                    for p, c, text in zip(prompts, completions, texts, strict=True)
                ]
                results = self.runner.score(judged, MOST_REWARD_ERRORS)
                told = [(result.value, result.error, result.judged) for result in results]
        return [RewardResult(*result) for result in of_first(told, self.mesh)]

    def close(self) -> None:
        """End the reward processes."""
        if self.runner is not None:
            self.runner.close()


def count_errors(results: Seq[RewardResult], ids: Seq[Any], where: str) -> tuple[int, str | None]:
    """How many samples an error dropped, and the first one's cause; DataError where they are too many. `ids`: of their rows."""
    failed = [(result.error, row) for result, row in zip(results, ids, strict=True) if result.error is not None]
    errors, total, judged = len(failed), len(results), sum(result.judged for result in results)
    if not failed:
        return 0, None
    cause, row = failed[0]
    if errors > MOST_REWARD_ERRORS * total:
        share = f"{errors} of {total} samples, more than {MOST_REWARD_ERRORS:.0%}"
    elif judged < total:
        share = f"all of the first {judged} of {total} samples"
    else:
        return errors, cause
    rest = "" if judged == total else " (the others were not judged)"
    raise DataError(
        f"{where}: the reward failed on {share}{rest}; first cause: {cause}, on row {row!r:.100}; fix the reward function, "
        "or the rows that it fails on"
    )

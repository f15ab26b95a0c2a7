"""The sampler of an asynchronous run: engines draw samples of later steps while the trainer trains."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

import torch
from torch import Tensor

from dovetail.errors import MachineError
from dovetail.parallel.consensus import of_first
from dovetail.parallel.mesh import Mesh
from dovetail.rollout.base import Completion, Prompt, Sampler, SamplingParams
from dovetail.rollout.feed import Feed


class StreamSampler:
    """Implements `Sampler`. The samples of a step come from the feed; any others from `sampler`, which the engines serve, too.

    The rows of a step do not depend on what runs when (rollout/pool.py), so the trainer asks as it asks any sampler.
    """

    def __init__(
        self, sampler: Sampler, feed: Feed | None, mesh: Mesh, params: SamplingParams, groups_per_step: int, step: int
    ) -> None:
        """feed: of the first rank, resumed. params: of training, but their step. step: the run's next."""
        self.sampler, self.feed, self.mesh, self.params = sampler, feed, mesh, params
        self.groups_per_step, self.step = groups_per_step, step
        self._held: int | None = None  # version of the engines' weights

    @property
    def dtype(self) -> torch.dtype | None:
        return self.sampler.dtype

    def refill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """A push, if a step was taken since the last one; then the feed begins what it may."""
        if self._held == self.step:
            return
        self.sampler.refill(weights)
        self._held = self.step
        if self.feed is not None:
            self.feed.pushed(self.step)

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """Waits for the samples of the next step, if asked for these. MachineError on every rank if engines fail."""
        of_step = replace(params, step=0) == replace(self.params, step=0) and params.step == self.step
        if not of_step or [prompt.row for prompt in prompts] != list(range(self.groups_per_step)):
            return self.sampler.sample(prompts, params)
        taken, problem = [], ""
        if self.feed is not None:
            try:
                taken = [[asdict(answer) for answer in group.answers] for group in self.feed.take()]
            except (MachineError, OSError) as error:
                problem = str(error)
        taken, problem = of_first([taken, problem], self.mesh)
        if problem:
            raise MachineError(problem)
        self.step += 1
        return [
            Completion(
                row,
                answer["sample"],
                tuple(answer["ids"]),
                tuple(answer["log_probs"]),
                answer["finish"],
                versions=tuple((version, start, end) for version, start, end in answer["versions"]),
            )
            for row, group in enumerate(taken)
            for answer in group
        ]

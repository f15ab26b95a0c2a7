"""The sampler of an asynchronous run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dovetail.errors import MachineError
from dovetail.inference_servers.remote_sampler import RemoteSampler
from dovetail.parallel.consensus import agreed, of_first
from dovetail.parallel.mesh import Mesh
from dovetail.rl.asynchronous.buffer import Feed
from dovetail.sampler.base import Completion, Prompt, SamplingParams


class StreamSampler:
    """Implements `Sampler`. Samples of a step come from the feed, others from `sampler`.

    make_feed: of the first rank. params: of training. step: the run's next.
    """

    def __init__(
        self,
        sampler: RemoteSampler,
        make_feed: Callable[[], Feed] | None,
        mesh: Mesh,
        params: SamplingParams,
        groups_per_step: int,
        step: int,
    ) -> None:
        self.sampler = sampler
        self.mesh = mesh
        self.params = params
        self.groups_per_step = groups_per_step
        self.step = step
        self.make_feed = make_feed
        self.feed: Feed | None = None
        self.counts: Mapping[str, int] = {}  # metrics of the last step
        self._held: int | None = None  # version of the engines' weights

    @property
    def dtype(self) -> torch.dtype:
        return self.sampler.dtype

    def resume(self, *, repeats: bool) -> list[str]:
        """As `Feed.resume`. Collective."""
        problems = list[str]()
        with agreed(self.mesh):
            if self.make_feed is not None:
                self.feed = self.make_feed()
                problems = self.feed.resume(self.step, repeats=repeats)
        return problems

    def refill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """A push, if a step was taken since the last one."""
        if self._held == self.step:
            return
        self.sampler.push(weights, self.step)
        self._held = self.step
        if self.feed is not None:
            self.feed.pushed(self.step)

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """MachineError on every rank if engines fail."""
        of_step = (
            replace(params, step=0) == replace(self.params, step=0) and params.step == self.step
        )
        if not of_step or [prompt.row for prompt in prompts] != list(range(self.groups_per_step)):
            return self.sampler.sample(prompts, params)
        answers = list[Completion]()
        counts = {}
        problem = None
        if self.feed is not None:
            try:
                answers = [answer for group in self.feed.take() for answer in group.answers]
                counts = self.feed.counts()
            except (MachineError, OSError) as error:
                problem = error
        completions = self.sampler.shared(prompts, params, answers, problem)
        self.counts = of_first(counts, self.mesh)
        self.step += 1
        return completions

    def saved(self, oldest: int) -> None:
        """oldest: step that the run may go back to."""
        if self.feed is not None:
            self.feed.forget(oldest)

    def close(self) -> None:
        if self.feed is not None:
            self.feed.close()

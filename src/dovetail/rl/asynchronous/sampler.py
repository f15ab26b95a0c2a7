"""The sampler of an asynchronous run."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from dovetail.errors import MachineError
from dovetail.inference_servers.remote_sampler import RemoteSampler
from dovetail.parallel.consensus import agreed, of_first
from dovetail.rl.asynchronous.buffer import RolloutBuffer
from dovetail.sampler.base import Sampler, SamplingParams, TokenPrompt
from dovetail.sampler.turn import GenerationRequest, Turn


class AsyncSampler(Sampler):
    """Takes the turns of training steps from a buffer that samples ahead, and samples all others.

    make_buffer: of the first rank; None on others. step: the run's next. counts: metrics of the
    last step.
    """

    def __init__(
        self, remote: RemoteSampler, make_buffer: Callable[[], RolloutBuffer] | None, step: int
    ) -> None:
        super().__init__()
        self.remote = remote
        self.dtype = remote.dtype
        self.make_buffer = make_buffer
        self.step = step
        self.buffer: RolloutBuffer | None = None
        self.counts: Mapping[str, int] = {}

    def resume(self, *, repeats: bool) -> list[str]:
        """Makes the buffer, and returns the problems of `RolloutBuffer.resume`. Collective."""
        problems = list[str]()
        with agreed(self.remote.mesh):
            if self.make_buffer is not None:
                self.buffer = self.make_buffer()
                problems = self.buffer.resume(self.step, repeats=repeats)
        return problems

    def refill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Pushes the weights, unless servers have those of this step, and begins new groups."""
        if self.remote.version == self.step:
            return
        self.remote.push(weights, self.step)
        if self.buffer is not None:
            self.buffer.pushed(self.step)

    def sample(self, prompts: Sequence[TokenPrompt], params: SamplingParams) -> list[Turn]:
        return self.remote.sample(prompts, params)

    def generate_step(self, requests: Sequence[GenerationRequest]) -> list[Turn]:
        """Returns the turns of the run's next step. MachineError on every rank if servers fail."""
        turns = list[Turn]()
        counts = {}
        problem = None
        if self.buffer is not None:
            try:
                turns = self.buffer.take()
                counts = self.buffer.counts()
            except (MachineError, OSError) as error:
                problem = error
        shared = self.remote.share(requests, turns, problem)
        self.counts = of_first(counts, self.remote.mesh)
        self.step += 1
        return shared

    def saved(self, oldest: int) -> None:
        """Forgets groups that trained before `oldest`, a step that the run may go back to."""
        if self.buffer is not None:
            self.buffer.forget(oldest)

    def close(self) -> None:
        if self.buffer is not None:
            self.buffer.close()

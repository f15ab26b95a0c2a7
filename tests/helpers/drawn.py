"""A sampler whose turns a function gives, in place of a model."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from dovetail.sampler.base import Sampler, SamplingParams, TokenPrompt
from dovetail.sampler.turn import RolloutId, Turn

Drawn = Callable[[TokenPrompt, int], Sequence[int]]  # ids by prompt and number of the sample


class DrawnSampler(Sampler):
    """asked: the rows of each call."""

    dtype = torch.float32

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.drawn = drawn
        self.asked: list[list[int]] = []

    def refill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        pass

    def sample(self, prompts: Sequence[TokenPrompt], params: SamplingParams) -> list[Turn]:
        self.asked.append([prompt.row for prompt in prompts])
        return [
            turn_of(self.drawn(prompt, sample), prompt.row, sample, params.step)
            for prompt in prompts
            for sample in range(params.samples)
        ]


def turn_of(ids: Sequence[int], row: int = 0, sample: int = 0, step: int = 0) -> Turn:
    """A turn with log-probs of -1."""
    return Turn(RolloutId(step, row, sample), tuple(ids), (-1.0,) * len(ids), "stop")

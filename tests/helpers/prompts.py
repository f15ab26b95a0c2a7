"""Prompts for samplers."""

import torch

from dovetail.sampler.base import TokenPrompt
from tests.helpers.parity_configs import VOCAB

LENGTHS = (9, 3, 17, 9, 1, 12)


def some_prompts(lengths=LENGTHS, seed: int = 3) -> list[TokenPrompt]:
    generator = torch.Generator().manual_seed(seed)
    return [
        TokenPrompt(10 + i, torch.randint(0, VOCAB, (n,), generator=generator).tolist())
        for i, n in enumerate(lengths)
    ]

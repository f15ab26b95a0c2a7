"""A sampler of a tiny model, and what it is asked for."""

from typing import Any

import torch

from dovetail.arch.registry import spec_from_config
from dovetail.kernels.registry import KernelSet
from dovetail.parallel.mesh import Mesh
from dovetail.sampler.base import SamplingParams
from dovetail.sampler.native import NativeSampler, SamplerOptions
from tests.helpers.parity_configs import VOCAB, moe_configs, tiny_configs, tiny_model

PARAMS = SamplingParams(
    samples=4, max_new_tokens=13, temperature=1.3, stop_ids=tuple(range(0, VOCAB, 9)), seed=2
)


def sampler_of(
    name: str, max_tokens: int | None = None, capture=None, **options: Any
) -> NativeSampler:
    config = (tiny_configs() | moe_configs())[name]
    spec, chosen = spec_from_config(config.to_dict()), SamplerOptions(**options)
    sampler = NativeSampler(
        spec,
        Mesh.solo(),
        KernelSet(),
        torch.float64,
        max_tokens=max_tokens,
        options=chosen,
        capture=capture,
    )
    sampler.refill(tiny_model(config).state_dict().items())
    return sampler

"""Whole models by the block's kernels against the reference, as a process: `python -m tests.helpers.block_models`.

Needs TRITON_INTERPRET=1. Writes family and recomputation -> the worst error of the loss and of any gradient, as one line of JSON.
"""

import json
import sys

import torch
from torch import Tensor
from triton.runtime import interpreter

from dovetail.arch.registry import spec_from_config
from dovetail.batch.loss import Loss
from dovetail.batch.micro import MicroBatch
from dovetail.kernels.registry import KernelSet, triton_kernels
from dovetail.nn.activation_checkpoint import Recompute
from dovetail.nn.decoder import Decoder
from dovetail.parallel.mesh import Mesh
from tests.helpers.decode_rows import whole_range
from tests.helpers.parity_configs import moe_configs, tiny_configs
from tests.helpers.parity_reference import make_batch, objective
from tests.helpers.tolerances import worst_error

CASES: tuple[tuple[str, Recompute], ...] = (
    ("qwen2", "none"),
    ("qwen3_window", "full"),
    ("qwen3_moe", "selective"),
    ("deepseek_v3", "none"),
)


def step(name: str, kernels: KernelSet, recompute: Recompute) -> dict[str, Tensor]:
    """The loss and every gradient, of weights that are drawn by name."""
    config = (tiny_configs() | moe_configs())[name].to_dict()
    model = Decoder(spec_from_config(config), Mesh.solo(), kernels, recompute=recompute)
    for i, (_, parameter) in enumerate(sorted(model.named_parameters())):
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(i))
    loss = model(MicroBatch.of(make_batch()), objective)
    assert isinstance(loss, Loss)
    loss.total.backward()
    return {
        "loss": loss.total.detach(),
        **{n: p.grad for n, p in model.named_parameters() if p.grad is not None},
    }


def measure() -> dict[str, float]:
    ours = KernelSet(**triton_kernels())
    return {
        f"{name}, {recompute}": worst_error(
            step(name, ours, recompute), step(name, KernelSet(), recompute)
        )[0]
        for name, recompute in CASES
    }


if __name__ == "__main__":
    vars(interpreter)["range"] = whole_range  # what it makes of `tl.range`
    sys.stdout.write(json.dumps(measure()) + "\n")

"""A tiled MLP and its tokens."""

import torch
from torch import Tensor, nn

from dovetail.arch.registry import spec_from_config
from dovetail.kernels.registry import KernelSet
from dovetail.nn.mlp import make_mlp
from dovetail.parallel.mesh import Mesh
from tests.helpers.parity_configs import tiny_configs


def make(family: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    mlp = make_mlp(spec_from_config(tiny_configs()[family].to_dict()), Mesh.solo(), KernelSet()).to(
        dtype
    )
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*mlp.parameters(), *mlp.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=draw, dtype=torch.float64) / 8)
    return mlp


def tokens(n: int, mlp: nn.Module) -> tuple[Tensor, Tensor]:
    like = next(mlp.parameters())
    x, up = torch.randn(
        2, n, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    ).to(like.dtype)
    return x.requires_grad_(), up

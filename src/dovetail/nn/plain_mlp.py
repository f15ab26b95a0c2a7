"""The plain feed-forward block: down(xielu(up(x)))."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.arch.spec import ArchSpec
from dovetail.kernels.registry import KernelSet
from dovetail.nn.layers import ColumnLinear, RowLinear
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.overlap import AsyncForward, run_sync, switch
from dovetail.parallel.placement import Placement


class XIELU(nn.Module):
    """arXiv 2411.13010:

        x > 0    a x^2 + b x                            a = softplus(alpha_p)
        x <= 0   c (e^min(x, eps) - 1 - x) + b x        c = b + softplus(alpha_n)

    Gradients are partial: ranks see their own features.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.empty(1))
        self.alpha_n = nn.Parameter(torch.empty(1))
        self.beta: Tensor
        self.eps: Tensor
        self.register_buffer("beta", torch.empty(()))
        self.register_buffer("eps", torch.empty(()))
        self.placements = dict.fromkeys(("alpha_p", "alpha_n"), Placement(partial_over=("tp",)))

    def forward(self, x: Tensor) -> Tensor:
        positive, negative = F.softplus(self.alpha_p), self.beta + F.softplus(self.alpha_n)
        below = (torch.expm1(torch.min(x, self.eps)) - x) * negative
        return torch.where(x > 0, positive * x * x, below) + self.beta * x


class PlainMLP(nn.Module):
    """[t, D] -> [t, D]."""

    def __init__(self, spec: ArchSpec, mesh: Mesh, kernels: KernelSet) -> None:
        super().__init__()
        self.up_proj = ColumnLinear(spec.width, {"up_proj": (spec.ffn_width, 1)}, mesh, kernels, bias=spec.mlp_bias)
        self.act_fn = XIELU()
        self.down_proj = RowLinear(spec.ffn_width, spec.width, mesh, kernels, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return run_sync(self.forward_async(x))

    def forward_async(self, x: Tensor) -> AsyncForward[Tensor]:
        y = yield from self.up_proj.forward_async(x)
        yield from switch(self.up_proj.axis)
        return (yield from self.down_proj.forward_async(self.act_fn(y)))

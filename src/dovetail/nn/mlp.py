"""The feed-forward blocks: gated, down(silu(gate(x)) * up(x)), or plain, down(xielu(up(x)))."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.arch.spec import ArchSpec
from dovetail.kernels.registry import KernelSet
from dovetail.mesh import Mesh
from dovetail.nn.linear import ColumnLinear, RowLinear
from dovetail.placement import Placement


class GatedMLP(nn.Module):
    """[t, D] -> [t, D]. Gate and up are one product."""

    def __init__(self, spec: ArchSpec, mesh: Mesh, kernels: KernelSet, width: int | None = None) -> None:
        """width: F; default: the family's."""
        super().__init__()
        self.kernels, width = kernels, width or spec.ffn_width
        parts = dict.fromkeys(("gate_proj", "up_proj"), (width, 1))
        self.gate_up_proj = ColumnLinear(spec.width, parts, mesh, bias=spec.mlp_bias)
        self.down_proj = RowLinear(width, spec.width, mesh, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.kernels.swiglu(self.gate_up_proj(x)))


class XIELU(nn.Module):
    """Huang et al. 2024, "Deriving activation functions using integration" (arXiv 2411.13010), with two learned scalars:

        x > 0    a x^2 + b x                            a = softplus(alpha_p)
        x <= 0   c (e^min(x, eps) - 1 - x) + b x        c = b + softplus(alpha_n)

    Each rank sees its own features, so the scalars' gradients are partial. b and eps come with the checkpoint.
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

    def __init__(self, spec: ArchSpec, mesh: Mesh) -> None:
        super().__init__()
        self.up_proj = ColumnLinear(spec.width, {"up_proj": (spec.ffn_width, 1)}, mesh, bias=spec.mlp_bias)
        self.act_fn = XIELU()
        self.down_proj = RowLinear(spec.ffn_width, spec.width, mesh, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)))


def make_mlp(spec: ArchSpec, mesh: Mesh, kernels: KernelSet) -> GatedMLP | PlainMLP:
    """The block that the spec asks for."""
    return GatedMLP(spec, mesh, kernels) if spec.activation == "swiglu" else PlainMLP(spec, mesh)

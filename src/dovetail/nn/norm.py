"""RMSNorm. Each rank of tp sees its own tokens or heads, so the gain's gradient is partial."""

import torch
from torch import Tensor, nn

from dovetail.kernels.registry import KernelSet
from dovetail.parallel.placement import Placement


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim."""

    def __init__(self, width: int, eps: float, kernels: KernelSet) -> None:
        super().__init__()
        self.eps, self.kernels = eps, kernels
        self.weight = nn.Parameter(torch.empty(width))
        self.placements = {"weight": Placement(partial_over=("tp",))}

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add_norm(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x + y, or x alone, and its norm."""
        return self.kernels.add_norm(x, y, self.weight, self.eps)

"""The gated feed-forward block: down(silu(gate(x)) * up(x))."""

from torch import Tensor, nn

from dovetail.arch.spec import ArchSpec
from dovetail.kernels.registry import KernelSet
from dovetail.mesh import Mesh
from dovetail.nn.linear import ColumnLinear, RowLinear


class MLP(nn.Module):
    """[t, D] -> [t, D]. Gate and up are one product."""

    def __init__(self, spec: ArchSpec, mesh: Mesh, kernels: KernelSet) -> None:
        super().__init__()
        self.kernels = kernels
        parts = dict.fromkeys(("gate_proj", "up_proj"), (spec.ffn_width, 1))
        self.gate_up_proj = ColumnLinear(spec.width, parts, mesh, bias=spec.mlp_bias)
        self.down_proj = RowLinear(spec.ffn_width, spec.width, mesh, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x)
        return self.down_proj(self.kernels.swiglu(gate, up))

"""Feed-forward blocks: down(silu(gate(x)) * up(x)), and the plain down(xielu(up(x)))."""

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.arch.spec import ArchSpec
from dovetail.kernels.registry import KernelSet
from dovetail.nn.activation_checkpoint import SavedTensor, save_for_backward_early
from dovetail.nn.layers import ColumnLinear, RowLinear
from dovetail.nn.products import GateUpGradients
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.overlap import (
    AsyncForward,
    finish,
    reduce_scatter_async,
    run_sync,
    start_all_gather,
    switch,
)
from dovetail.parallel.placement import Placement


class GatedMLP(nn.Module):
    """One product for gate and up, fused with the activation where the kernels can."""

    def __init__(
        self, spec: ArchSpec, mesh: Mesh, kernels: KernelSet, width: int | None = None
    ) -> None:
        super().__init__()
        self.kernels = kernels
        width = width or spec.ffn_width
        parts = dict.fromkeys(("gate_proj", "up_proj"), (width, 1))
        self.gate_up_proj = ColumnLinear(spec.width, parts, mesh, kernels, bias=spec.mlp_bias)
        self.down_proj = RowLinear(width, spec.width, mesh, kernels, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return run_sync(self.forward_async(x))

    def forward_async(self, x: Tensor) -> AsyncForward[Tensor]:
        up = self.gate_up_proj
        down = self.down_proj
        fused = self._fused_kernels(x)
        if fused is None:
            gate_up = yield from up.forward_async(x)
            yield from switch(up.axis)
            gated = self.kernels.swiglu(gate_up)
            return (yield from down.forward_async(gated))
        sent, gather = yield from start_all_gather(x.contiguous(), up.axis)
        if not torch.is_grad_enabled():
            gated = fused.gated(finish(sent, gather), up.weight)
            yield from switch(up.axis)
            return (yield from down.forward_async(gated))
        rows = len(x) * up.axis.size
        features = len(up.weight) // 2
        gated = x.new_empty(rows, features)

        def product_and_gate(x: Tensor, weight: Tensor, _bias: Tensor | None) -> Tensor:
            return fused.gated_product_into(x, weight, gated)

        gate_up = up.fused_product(sent, gather, product_and_gate, GateUpGradients(fused))
        gate_up, saved = save_for_backward_early(gate_up)
        yield from switch(up.axis)
        y = _FusedDown.apply(gate_up, gated, down.weight, saved, down, fused)
        return (yield from reduce_scatter_async(y, down.axis))

    def _fused_kernels(self, x: Tensor) -> ModuleType | None:
        """The kernels that gate within the products, where both layers and this pass allow it."""
        up = self.gate_up_proj
        down = self.down_proj
        fused = up.products.gated
        if fused is None or down.products.gated is None or up.bias is not None:
            return None
        if not fused.takes(x, up.weight, down.weight):
            return None
        if not torch.is_grad_enabled():
            return fused
        queued = up.wgrad_queue is not None and down.wgrad_queue is not None
        trains = x.requires_grad or up.weight.requires_grad
        return fused if queued and trains else None


class _FusedDown(torch.autograd.Function):
    """forward: z = silu(gate) up w.T. backward: d_gate_up in pairs, silu(gate) up again for dw. Saves nothing itself."""

    @staticmethod
    def forward(
        ctx: Any,
        _gate_up: Tensor,
        gated: Tensor,
        weight: Tensor,
        saved: SavedTensor,
        layer: RowLinear,
        ops: ModuleType,
    ) -> Tensor:
        ctx.saved = saved
        ctx.layer = layer
        ctx.ops = ops
        return layer.products.linear(gated, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        dz = grads[0].contiguous()
        layer = ctx.layer
        d_gate_up, gated, _ = ctx.ops.gated_gradient(dz, layer.weight, ctx.saved.get())
        if ctx.needs_input_grad[2]:
            layer.wgrad_queue.accumulate(layer.weight, dz, gated, ctx.ops.add_weight_grad_)
        return d_gate_up, None, None, None, None, None


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
        positive = F.softplus(self.alpha_p)
        negative = self.beta + F.softplus(self.alpha_n)
        power = torch.expm1(torch.min(x, self.eps))
        below = (power - x) * negative
        above = positive * x * x
        return torch.where(x > 0, above, below) + self.beta * x


class PlainMLP(nn.Module):
    def __init__(self, spec: ArchSpec, mesh: Mesh, kernels: KernelSet) -> None:
        super().__init__()
        parts = {"up_proj": (spec.ffn_width, 1)}
        self.up_proj = ColumnLinear(spec.width, parts, mesh, kernels, bias=spec.mlp_bias)
        self.act_fn = XIELU()
        self.down_proj = RowLinear(spec.ffn_width, spec.width, mesh, kernels, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return run_sync(self.forward_async(x))

    def forward_async(self, x: Tensor) -> AsyncForward[Tensor]:
        y = yield from self.up_proj.forward_async(x)
        yield from switch(self.up_proj.axis)
        return (yield from self.down_proj.forward_async(self.act_fn(y)))


def make_mlp(spec: ArchSpec, mesh: Mesh, kernels: KernelSet) -> GatedMLP | PlainMLP:
    if spec.activation == "swiglu":
        return GatedMLP(spec, mesh, kernels)
    return PlainMLP(spec, mesh, kernels)

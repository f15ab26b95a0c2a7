"""The gated feed-forward block: down(silu(gate(x)) * up(x))."""

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.arch.spec import ArchSpec
from dovetail.kernels.registry import KernelSet
from dovetail.nn.activation_checkpoint import SavedTensor, save_for_backward_early
from dovetail.nn.layers import ColumnLinear, LinearProducts, RowLinear
from dovetail.nn.plain_mlp import PlainMLP
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.overlap import AsyncForward, finish, reduce_scatter_async, run_sync, start_all_gather, switch


class GatedMLP(nn.Module):
    """One product for gate and up, fused with the activation where the kernels can."""

    def __init__(self, spec: ArchSpec, mesh: Mesh, kernels: KernelSet, width: int | None = None) -> None:
        super().__init__()
        self.kernels, width = kernels, width or spec.ffn_width
        parts = dict.fromkeys(("gate_proj", "up_proj"), (width, 1))
        self.gate_up_proj = ColumnLinear(spec.width, parts, mesh, kernels, bias=spec.mlp_bias)
        self.down_proj = RowLinear(width, spec.width, mesh, kernels, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return run_sync(self.forward_async(x))

    def forward_async(self, x: Tensor) -> AsyncForward[Tensor]:
        up, down, products = self.gate_up_proj, self.down_proj, self._fused_products(x)
        if products is None:
            gate_up = yield from up.forward_async(x)
            yield from switch(up.axis)
            return (yield from down.forward_async(self.kernels.swiglu(gate_up)))
        sent, gather = yield from start_all_gather(x.contiguous(), up.axis)
        if not torch.is_grad_enabled():
            gated = products.gated(finish(sent, gather), up.weight)
            yield from switch(up.axis)
            return (yield from down.forward_async(gated))
        gated = x.new_empty(len(x) * up.axis.size, len(up.weight) // 2)
        fused = LinearProducts(
            lambda x, weight, _: products.gated_product_into(x, weight, gated),
            products.input_gradient,
            products.add_joint_grad_,
        )
        gate_up, saved = save_for_backward_early(up.product(sent, None, gather, fused))
        yield from switch(up.axis)
        y = _FusedDown.apply(gate_up, gated, down.weight, saved, down, products)
        return (yield from reduce_scatter_async(y, down.axis))

    def _fused_products(self, x: Tensor) -> ModuleType | None:
        products, up, down = self.kernels.gated, self.gate_up_proj, self.down_proj
        if products is None or up.bias is not None or not products.takes(x, up.weight, down.weight):
            return None
        queued = up.wgrad_queue is not None and down.wgrad_queue is not None
        trains = queued and (x.requires_grad or up.weight.requires_grad)
        return products if trains or not torch.is_grad_enabled() else None


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
        products: ModuleType,
    ) -> Tensor:
        ctx.saved, ctx.layer, ctx.products = saved, layer, products
        return F.linear(gated, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        dz, layer = grads[0].contiguous(), ctx.layer
        d_gate_up, gated, _ = ctx.products.gated_gradient(dz, layer.weight, ctx.saved.get())
        if ctx.needs_input_grad[2]:
            layer.wgrad_queue.accumulate(layer.weight, dz, gated, ctx.products.add_weight_grad_)
        return d_gate_up, None, None, None, None, None


def make_mlp(spec: ArchSpec, mesh: Mesh, kernels: KernelSet) -> GatedMLP | PlainMLP:
    return (GatedMLP if spec.activation == "swiglu" else PlainMLP)(spec, mesh, kernels)

"""The feed-forward blocks: gated, down(silu(gate(x)) * up(x)), or plain, down(xielu(up(x)))."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.arch.spec import ArchSpec
from dovetail.kernels.registry import GatedProducts, KernelSet
from dovetail.nn.beside import DelayedWgrad
from dovetail.nn.linear import ColumnLinear, RowLinear, sent_back
from dovetail.nn.saved_tensor import SavedTensor, keep
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.overlap import (
    AsyncCollective,
    AsyncForward,
    async_all_gather,
    finish,
    reduce_scatter_async,
    run_sync,
    start,
    switch,
)
from dovetail.parallel.placement import Placement


class GatedMLP(nn.Module):
    """[t, D] -> [t, D]. Gate and up are one product, which gates its result itself where the kernels have one that does.

    forward all_gather, reduce_scatter; backward the same.
    """

    def __init__(self, spec: ArchSpec, mesh: Mesh, kernels: KernelSet, width: int | None = None) -> None:
        """width: F; default: the family's."""
        super().__init__()
        self.kernels, width = kernels, width or spec.ffn_width
        parts = dict.fromkeys(("gate_proj", "up_proj"), (width, 1))
        self.gate_up_proj = ColumnLinear(spec.width, parts, mesh, bias=spec.mlp_bias)
        self.down_proj = RowLinear(width, spec.width, mesh, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return run_sync(self.turns(x))

    def turns(self, x: Tensor, beside: DelayedWgrad | None = None) -> AsyncForward[Tensor]:
        """The same, as a generator; down's weight gradient may be computed beside something else."""
        up, down, products = self.gate_up_proj, self.down_proj, self._gating(x)
        if products is None:
            both = yield from up.turns(x)
            yield from switch(up.axis)
            return (yield from down.turns(self.kernels.swiglu(both), beside))
        left = start(x, crossing := async_all_gather(up.axis))
        yield from switch(up.axis)
        if not torch.is_grad_enabled():
            gated = products.gated(finish(left, crossing), up.weight)
            yield from switch(up.axis)
            return (yield from down.turns(gated))
        both, gated = _GateUp.apply(left, up.weight, up, products, crossing)
        both, kept = keep(both)
        yield from switch(up.axis)
        return (
            yield from reduce_scatter_async(
                _Down.apply(both, gated, down.weight, kept, down, products, beside), down.axis
            )
        )

    def _gating(self, x: Tensor) -> GatedProducts | None:
        """The products that gate inside, where they do what this call asks for."""
        found, up, down = self.kernels.gated, self.gate_up_proj, self.down_proj
        if found is None or up.bias is not None or not found.takes(x, up.weight, down.weight):
            return None
        learns = up.adds is not None and down.adds is not None and (x.requires_grad or up.weight.requires_grad)
        return found if learns or not torch.is_grad_enabled() else None


class _GateUp(torch.autograd.Function):
    """forward: gates and ups in pairs, of the x that arrives, and beside them silu(gate) up, for `_Down` alone.
    backward: dx, which begins its way back; dw is added by the layer, now or later. As `linear._Product`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        layer: ColumnLinear,
        products: GatedProducts,
        crossing: AsyncCollective | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.layer, ctx.products, ctx.crossing, ctx.shape = layer, products, crossing, x.shape
        x = (x if crossing is None else crossing.take()).contiguous()
        gated = x.new_empty(len(x), len(weight) // 2)
        both = products.gated_product_into(x, weight, gated)
        ctx.save_for_backward(x if weight.requires_grad else None)
        ctx.mark_non_differentiable(gated)
        ctx.set_materialize_grads(False)
        return both, gated

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (d_both, _), (x,), layer, products = grads, ctx.saved_tensors, ctx.layer, ctx.products
        for_x, for_weight, *_ = ctx.needs_input_grad
        dx = sent_back(products.input_gradient(d_both, layer.weight), ctx.crossing, ctx.shape) if for_x else None
        if for_weight:
            layer.add_or_wait(d_both, x, products.add_joint_grad_)
        return dx, None, None, None, None


class _Down(torch.autograd.Function):
    """forward: z = silu(gate) up w.T. backward: the gradient of gates and ups in pairs; silu(gate) up once more, by the same
    product; and with it dw, added by the layer, now or later.

    Gates and ups were kept ahead of it, and it saves nothing: where a block is repeated, this product is not.
    """

    @staticmethod
    def forward(
        ctx: Any,
        _both: Tensor,
        gated: Tensor,
        weight: Tensor,
        kept: SavedTensor,
        layer: RowLinear,
        products: GatedProducts,
        beside: DelayedWgrad | None,
    ) -> Tensor:
        ctx.kept, ctx.layer, ctx.products, ctx.beside = kept, layer, products, beside
        return F.linear(gated, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        dz, layer = grads[0].contiguous(), ctx.layer
        d_both, gated, _ = ctx.products.gated_gradient(dz, layer.weight, ctx.kept.take())
        if ctx.needs_input_grad[2]:
            layer.add_or_wait(dz, gated, ctx.products.add_weight_grad_, ctx.beside)
        return d_both, None, None, None, None, None, None


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
        return run_sync(self.turns(x))

    def turns(self, x: Tensor, beside: DelayedWgrad | None = None) -> AsyncForward[Tensor]:
        """As `GatedMLP.turns`."""
        y = yield from self.up_proj.turns(x)
        yield from switch(self.up_proj.axis)
        return (yield from self.down_proj.turns(self.act_fn(y), beside))


def make_mlp(spec: ArchSpec, mesh: Mesh, kernels: KernelSet) -> GatedMLP | PlainMLP:
    """The block that the spec asks for."""
    return GatedMLP(spec, mesh, kernels) if spec.activation == "swiglu" else PlainMLP(spec, mesh)

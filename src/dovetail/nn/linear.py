"""Tensor-parallel linear layers. Between blocks tokens are sharded, inside them features.

ColumnLinear      forward  y = all_gather(x) w.T       [t, D] -> [T, out / tp]
                  backward dx = reduce_scatter(dy w)
RowLinear         forward  y = reduce_scatter(x w.T)   [T, in / tp] -> [t, D]
                  backward dx = all_gather(dy) w
ReplicatedLinear  forward  y = x w.T                   [t, in] -> [t, out], of this rank's tokens
                  backward dx = dy w

dw = dy.T x may be deferred: see `WgradQueue`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dovetail.kernels.reference import wide
from dovetail.kernels.registry import KernelSet
from dovetail.nn.grad_accumulation import AddWeightGrad, GradAccumulator
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.overlap import AsyncCollective, AsyncForward, reduce_scatter_async, run_sync, start_all_gather
from dovetail.parallel.placement import Part, Placement, Split


class LinearProducts(NamedTuple):
    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # x, weight, bias -> y
    input_grad: Callable[[Tensor, Tensor], Tensor]  # dy, weight -> dx
    add_weight_grad_: AddWeightGrad


class Linear(GradAccumulator):
    """Computes by `KernelSet.linear` and its gradients."""

    weight: nn.Parameter

    def __init__(self, kernels: KernelSet) -> None:
        super().__init__()
        self.kernels = kernels

    def product(
        self,
        x: Tensor,
        bias: Tensor | None,
        collective: AsyncCollective | None = None,
        products: LinearProducts | None = None,
    ) -> Tensor:
        """x w.T + bias; with a collective, of its result, given what `start` returned as x."""
        if products is None:
            kernels = self.kernels
            products = LinearProducts(kernels.linear, kernels.linear_input_grad, kernels.add_weight_grad_)
        y: Tensor = _Linear.apply(x, self.weight, bias, self, collective, products)
        return y


class _Linear(torch.autograd.Function):
    """forward: y = x w.T + b. backward: dx = dy w, which starts the inverse collective; db = sum(dy); dw = dy.T x.

    Only x is saved: the weight is the layer's, gathered again by FSDP2.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: Linear,
        collective: AsyncCollective | None,
        products: LinearProducts,
    ) -> Tensor:
        ctx.layer, ctx.collective, ctx.shape = layer, collective, x.shape
        ctx.input_grad, ctx.add_weight_grad_ = (
            products.input_grad,
            products.add_weight_grad_,
        )  # not forward: it holds memory
        x = x if collective is None else collective.wait()
        ctx.save_for_backward(x if weight.requires_grad else None)
        return products.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        dy, (x,), layer = grads[0], ctx.saved_tensors, ctx.layer
        for_x, for_weight, for_bias, *_ = ctx.needs_input_grad
        dx = dw = None
        if for_x:
            dx = ctx.input_grad(dy, layer.weight)
            dx = dx if ctx.collective is None else ctx.collective.start_backward(dx, ctx.shape)
        if for_weight and layer.wgrad_queue is not None:
            layer.wgrad_queue.accumulate(layer.weight, dy, x, ctx.add_weight_grad_)
        elif for_weight:
            ctx.add_weight_grad_(dw := torch.empty_like(layer.weight), dy, x, first=True)
        return dx, dw, dy.sum(0, dtype=wide(dy.dtype)) if for_bias else None, None, None, None


class ColumnLinear(Linear):
    """[t, D] -> [T, sum of out_i / tp]. forward all_gather, backward reduce_scatter.

    parts: checkpoint name -> (units, unit length). Fewer heads than ranks are copied; features (length 1) padded with zeros.
    """

    def __init__(
        self, width: int, parts: dict[str, tuple[int, int]], mesh: Mesh, kernels: KernelSet, *, bias: bool = False
    ) -> None:
        super().__init__(kernels)
        self.axis = mesh["tp"]
        tp = self.axis.size
        sharded = []
        for name, (units, length) in parts.items():
            if length == 1:
                sharded.append(Part.padded(name, units, tp))
                continue
            assert units % tp == 0 or tp % units == 0, f"{name}: {units} units over tp={tp}; arch refuses this"
            sharded.append(Part(name, units * length, copies=max(1, tp // units)))
        self.lengths = [part.local_length(tp) for part in sharded]
        self.weight = nn.Parameter(torch.empty(sum(self.lengths), width))
        self.bias = nn.Parameter(torch.empty(sum(self.lengths))) if bias else None
        self.placements = dict.fromkeys(("weight", "bias"), Placement((Split(0, "tp", tuple(sharded)),)))

    def forward(self, x: Tensor) -> Tensor:
        return run_sync(self.forward_async(x))

    def forward_async(self, x: Tensor) -> AsyncForward[Tensor]:
        x, gather = yield from start_all_gather(x, self.axis)
        return self.product(x, self.bias, gather)


class RowLinear(Linear):
    """[T, in / tp] -> [t, D], input features padded with zeros. forward reduce_scatter, backward all_gather.

    The bias is added to this rank's tokens, so its gradient is partial.
    """

    def __init__(self, in_features: int, width: int, mesh: Mesh, kernels: KernelSet, *, bias: bool = False) -> None:
        super().__init__(kernels)
        self.axis = mesh["tp"]
        part = Part.padded("", in_features, self.axis.size)
        self.weight = nn.Parameter(torch.empty(width, part.local_length(self.axis.size)))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None
        self.placements = {
            "weight": Placement((Split(1, "tp", (part,)),)),
            "bias": Placement(partial_over=("tp",)),
        }

    def forward(self, x: Tensor) -> Tensor:
        return run_sync(self.forward_async(x))

    def forward_async(self, x: Tensor) -> AsyncForward[Tensor]:
        y = yield from reduce_scatter_async(self.product(x, None), self.axis)
        return y if self.bias is None else y + self.bias


class ReplicatedLinear(Linear):
    """[t, in] -> [t, out], of this rank's tokens: gradients are partial. No collectives."""

    def __init__(self, in_features: int, out_features: int, kernels: KernelSet, *, bias: bool = False) -> None:
        super().__init__(kernels)
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.placements = dict.fromkeys(("weight", "bias"), Placement(partial_over=("tp",)))

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)

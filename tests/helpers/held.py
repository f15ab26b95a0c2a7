"""Weights of experts, whose gradients their module adds where they lie; and a mixture that hands them over to be added."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.kernels import reference
from dovetail.nn.layers import GradAccumulator, WgradQueue


class Held(GradAccumulator):
    """gate_up [E, 2F, D] and down [E, D, F]; sums in the wide dtype."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = (
            nn.Parameter(x.detach().clone()) for x in (gate_up, down)
        )
        self.gate_up_proj.grad_dtype = self.down_proj.grad_dtype = reference.wide(down.dtype)
        self.wgrad_queue = WgradQueue()

    def both(self) -> tuple[Tensor, Tensor]:
        """As a mixture takes them."""
        return self.accumulated("gate_up_proj"), self.accumulated("down_proj")

    def sums(self) -> dict[str, Tensor]:
        """The gradients, by name."""
        return {name: p.grad for name, p in self.named_parameters() if p.grad is not None}


class HandingOver(torch.autograd.Function):
    """Any mixture of (x, weights, gate_up, down), which keeps what `quack_moe` keeps and hands over what it does.

    handed: `GradAccumulator.defer_wgrad`, and what it is to add with, of the gradient twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        compute: Callable[..., Tensor],
        handed: Any,
    ) -> Tensor:
        ctx.save_for_backward(x, weights, gate_up, down)
        ctx.compute, ctx.handed = compute, handed
        return compute(x, weights, gate_up, down)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        leaves = [one.detach().requires_grad_() for one in ctx.saved_tensors]
        with torch.enable_grad():
            y = ctx.compute(*leaves)
        dx, d_weights, *both = torch.autograd.grad(y, leaves, grads[0])
        add, add_ = ctx.handed
        for name, dw, wanted in zip(
            ("gate_up_proj", "down_proj"), both, ctx.needs_input_grad[2:4], strict=True
        ):
            if wanted:
                add(name, dw, dw, add_)
        return dx, d_weights, None, None, None, None

"""Saves a tensor for the backward pass ahead of what is computed from it.

A checkpoint that repeats a block stops once it has all that was saved, and a function of autograd saves after it has run.
What follows `keep` and saves nothing itself is therefore not computed again.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


class SavedTensor:
    """What was saved, for the backward pass of one function that comes after; to be taken once."""

    node: FunctionCtx

    def take(self) -> Tensor:
        (x,) = self.node.saved_tensors  # type: ignore[attr-defined]  # torch's stubs do not know it
        return x


def keep(x: Tensor) -> tuple[Tensor, SavedTensor]:
    """x, whose gradient passes as it is, and where to find it again. It has to require a gradient, or nothing is saved."""
    kept = SavedTensor()
    return _Keep.apply(x, kept), kept


class _Keep(torch.autograd.Function):
    """forward: x, which it saves. backward: the gradient as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: SavedTensor) -> Tensor:
        ctx.save_for_backward(x)
        kept.node = ctx
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None

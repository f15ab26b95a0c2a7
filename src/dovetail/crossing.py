"""Collectives between two points of a forward pass, with other work beside them, there and back.

A tensor leaves at one point and arrives at another, gathered, summed and cut, or exchanged. In a backward pass the inverse
collective begins where it arrived, and is waited for where it left.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dovetail.comm import Pending, begin_gather, begin_scatter
from dovetail.mesh import Axis


class Crossing:
    """A collective between two points of a forward pass, `leave` and `arrive`, and its inverse between the same two points of
    the backward pass, where it begins at the second and is waited for at the first. What lies between them goes on beside it.

    there, back: what begins either; there may be set after `leave`, when it is known what goes where.
    """

    def __init__(self, there: Callable[[Tensor], Pending] | None, back: Callable[[Tensor], Pending] | None) -> None:
        self.there, self.back = there, back
        self._there: Pending | None = None
        self._back: Pending | None = None

    def begin(self, x: Tensor) -> None:
        """There, with what leaves."""
        assert self.there is not None
        self._there = self.there(x.detach())

    def take(self) -> Tensor:
        """What came, once."""
        assert self._there is not None
        came, self._there = self._there.take(), None
        return came

    def begin_back(self, grad: Tensor, shape: torch.Size) -> Tensor:
        """The gradient of what came begins its way back. What this returns stands in for it, for autograd, until `leave`."""
        assert self.back is not None
        self._back = self.back(grad)
        return grad.new_empty(()).expand(shape)

    def take_back(self) -> Tensor:
        """The gradient of what left."""
        assert self._back is not None
        grad, self._back = self._back.take(), None
        return grad


class _Leave(torch.autograd.Function):
    """forward: x, which leaves by a crossing. backward: what came back, whatever autograd hands over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, crossing: Crossing) -> Tensor:
        ctx.crossing = crossing
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.crossing.take_back(), None


class _Arrive(torch.autograd.Function):
    """forward: what came. backward: the way back begins."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, crossing: Crossing) -> Tensor:
        ctx.crossing, ctx.shape = crossing, left.shape
        return crossing.take()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.crossing.begin_back(grads[0], ctx.shape), None


def leave(x: Tensor, crossing: Crossing | None) -> Tensor:
    """x as it leaves by a crossing, for `arrive`; and begins it, where it is known already where to. None: x stays here."""
    if crossing is None:
        return x
    if crossing.there is not None:
        crossing.begin(x)
    return _Leave.apply(x, crossing)


def arrive(left: Tensor, crossing: Crossing | None) -> Tensor:
    """What came, for the tensor that `leave` returned."""
    return left if crossing is None else _Arrive.apply(left, crossing)


def gathering(axis: Axis) -> Crossing | None:
    """`all_gather` as a crossing."""
    return None if axis.size == 1 else Crossing(partial(begin_gather, axis=axis), partial(begin_scatter, axis=axis))


def scattering(axis: Axis) -> Crossing | None:
    """`reduce_scatter` as a crossing."""
    return None if axis.size == 1 else Crossing(partial(begin_scatter, axis=axis), partial(begin_gather, axis=axis))

"""Collectives between two points of a forward pass, with other work beside them, there and back.

A tensor leaves at one point and arrives at another, gathered, summed and cut, or exchanged. In a backward pass the inverse
collective begins where it arrived, and is waited for where it left.
"""

from collections.abc import Callable, Generator, Sequence
from functools import partial
from itertools import chain, cycle
from typing import Any, TypeVar

import torch
from torch import Tensor

from dovetail.parallel.collectives import Handle, begin_gather, begin_scatter
from dovetail.parallel.mesh import Axis


class AsyncCollective:
    """A collective between two points of a forward pass, `start` and `finish`, and its inverse between the same two points of
    the backward pass, where it begins at the second and is waited for at the first. What lies between them goes on beside it.

    there, back: what begins either; there may be set after `start`, when it is known what goes where.
    """

    def __init__(self, there: Callable[[Tensor], Handle] | None, back: Callable[[Tensor], Handle] | None) -> None:
        self.there, self.back = there, back
        self._there: Handle | None = None
        self._back: Handle | None = None

    def begin(self, x: Tensor) -> None:
        """There, with what leaves."""
        assert self.there is not None
        self._there = self.there(x.detach())

    def take(self) -> Tensor:
        """What came, once."""
        assert self._there is not None
        came, self._there = self._there.wait(), None
        return came

    def begin_back(self, grad: Tensor, shape: torch.Size) -> Tensor:
        """The gradient of what came begins its way back. What this returns stands in for it, for autograd, until `start`."""
        assert self.back is not None
        self._back = self.back(grad)
        return grad.new_empty(()).expand(shape)

    def take_back(self) -> Tensor:
        """The gradient of what left."""
        assert self._back is not None
        grad, self._back = self._back.wait(), None
        return grad


class _Leave(torch.autograd.Function):
    """forward: x, which leaves by a crossing. backward: what came back, whatever autograd hands over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, crossing: AsyncCollective) -> Tensor:
        ctx.crossing = crossing
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.crossing.take_back(), None


class _Arrive(torch.autograd.Function):
    """forward: what came. backward: the way back begins."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, crossing: AsyncCollective) -> Tensor:
        ctx.crossing, ctx.shape = crossing, left.shape
        return crossing.take()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.crossing.begin_back(grads[0], ctx.shape), None


def start(x: Tensor, crossing: AsyncCollective | None) -> Tensor:
    """x as it leaves by a crossing, for `finish`; and begins it, where it is known already where to. None: x stays here."""
    if crossing is None:
        return x
    if crossing.there is not None:
        crossing.begin(x)
    return _Leave.apply(x, crossing)


def finish(left: Tensor, crossing: AsyncCollective | None) -> Tensor:
    """What came, for the tensor that `start` returned."""
    return left if crossing is None else _Arrive.apply(left, crossing)


def async_all_gather(axis: Axis) -> AsyncCollective | None:
    """`all_gather` as a crossing."""
    return (
        None if axis.size == 1 else AsyncCollective(partial(begin_gather, axis=axis), partial(begin_scatter, axis=axis))
    )


def async_reduce_scatter(axis: Axis) -> AsyncCollective | None:
    """`reduce_scatter` as a crossing."""
    return (
        None if axis.size == 1 else AsyncCollective(partial(begin_scatter, axis=axis), partial(begin_gather, axis=axis))
    )


T = TypeVar("T")


AsyncForward = Generator[None, None, T]


def run_sync(turns: AsyncForward[T]) -> T:
    """From beginning to end."""
    while True:
        try:
            next(turns)
        except StopIteration as end:
            return end.value


def interleave(both: Sequence[AsyncForward[T]], ahead: int = 0) -> tuple[T, ...]:
    """All to their ends, in turns; the first one is so many turns ahead: see `lead_of_first_half`."""
    ends: dict[int, T] = {}
    order = chain([0] * ahead, cycle(range(len(both))))
    while len(ends) < len(both):
        i = next(order)
        if i not in ends:
            try:
                next(both[i])
            except StopIteration as end:
                ends[i] = end.value
    return tuple(ends[i] for i in range(len(both)))


def lead_of_first_half(tp: Axis) -> int:
    """By how many the first half of a block is best ahead of the second.

    Between two collectives of tensor-parallel layers lie two turns with products in them and one with hardly more than a norm:
    one turn ahead, each half has products under the other's collectives, but for the first and the last of a block.
    """
    return 1 if tp.size > 1 else 0


def switch(axis: Axis) -> AsyncForward[None]:
    """A turn of the other half, where the axis has collectives for it to cover."""
    if axis.size > 1:
        yield


def reduce_scatter_async(x: Tensor, axis: Axis) -> AsyncForward[Tensor]:
    """`comm.reduce_scatter`: [n, ...] -> [n / size, ...]."""
    left = start(x, crossing := async_reduce_scatter(axis))
    yield from switch(axis)
    return finish(left, crossing)

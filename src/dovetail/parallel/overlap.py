"""Asynchronous collectives of a forward pass, and dual-batch overlap."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle
from typing import Any, TypeVar

import torch
from torch import Tensor

from dovetail.parallel.axes import Axis
from dovetail.parallel.collectives import Handle, begin_gather, begin_scatter

Collective = Callable[[Tensor], Handle]
T = TypeVar("T")
AsyncForward = Generator[None, None, T]  # yields while its collectives run


@dataclass(eq=False)
class AsyncCollective:
    """A collective between `start` and `finish` of a forward pass, and its inverse in backward.

    Both may be set after `start`.
    """

    collective: Collective | None
    inverse: Collective | None
    _forward: Handle | None = None
    _backward: Handle | None = None

    def start(self, x: Tensor) -> None:
        assert self.collective is not None
        self._forward = self.collective(x.detach())

    def wait(self) -> Tensor:
        """Return the result. Call it once: autograd keeps this object alive."""
        assert self._forward is not None
        out = self._forward.wait()
        self._forward = None
        return out

    def start_backward(self, grad: Tensor, shape: torch.Size) -> Tensor:
        """Starts the inverse, and returns a placeholder of the gradient's shape.

        Autograd wants a gradient of `_Finish` at once, but the collective has just begun. What
        lies between is the view that `_Start` returned, so nobody reads the placeholder, one
        number expanded: `_Start.backward` waits and returns the real gradient in its place.
        """
        assert self.inverse is not None
        self._backward = self.inverse(grad)
        return grad.new_empty(()).expand(shape)

    def wait_backward(self) -> Tensor:
        assert self._backward is not None
        grad = self._backward.wait()
        self._backward = None
        return grad


class _Start(torch.autograd.Function):
    """The start of a collective. forward: x. backward: the result of the inverse collective."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collective: AsyncCollective) -> Tensor:
        ctx.collective = collective
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.collective.wait_backward(), None


class _Finish(torch.autograd.Function):
    """The end of a collective. forward: its result. backward: starts the inverse."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, collective: AsyncCollective) -> Tensor:
        ctx.collective = collective
        ctx.shape = sent.shape
        return collective.wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.collective.start_backward(grads[0], ctx.shape), None


def start(x: Tensor, collective: AsyncCollective) -> Tensor:
    if collective.collective is not None:
        collective.start(x)
    return _Start.apply(x, collective)


def finish(sent: Tensor, collective: AsyncCollective | None) -> Tensor:
    if collective is None:
        return sent
    return _Finish.apply(sent, collective)


def start_all_gather(x: Tensor, axis: Axis) -> AsyncForward[tuple[Tensor, AsyncCollective | None]]:
    """Start `collectives.all_gather`, and return the arguments of `finish`."""
    if axis.size == 1:
        return x, None
    scatter = partial(begin_scatter, axis=axis)
    gather = AsyncCollective(partial(begin_gather, axis=axis), scatter)
    x = start(x, gather)
    yield
    return x, gather


def reduce_scatter_async(x: Tensor, axis: Axis) -> AsyncForward[Tensor]:
    if axis.size == 1:
        return x
    gather = partial(begin_gather, axis=axis)
    scatter = AsyncCollective(partial(begin_scatter, axis=axis), gather)
    x = start(x, scatter)
    yield
    return finish(x, scatter)


def run_sync(forward: AsyncForward[T]) -> T:
    return interleave([forward])[0]


def interleave(forwards: Sequence[AsyncForward[T]], lead: int = 0) -> tuple[T, ...]:
    """Run passes in turns, from yield to yield. The first makes `lead` steps before the others."""
    results: dict[int, T] = {}
    order = chain([0] * lead, cycle(range(len(forwards))))
    while len(results) < len(forwards):
        i = next(order)
        if i in results:
            continue
        try:
            next(forwards[i])
        except StopIteration as end:
            results[i] = end.value
    return tuple(results[i] for i in range(len(forwards)))


def lead_of_first_half(tp: Axis) -> int:
    """Return the lead of the first half: with 1, one half computes while the other communicates."""
    return int(tp.size > 1)


def switch(axis: Axis) -> AsyncForward[None]:
    if axis.size > 1:
        yield

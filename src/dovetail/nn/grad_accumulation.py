"""Fused gradient accumulation (as Megatron's): products add to `weight.grad` in its `grad_dtype`, without rounding before."""

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

AddWeightGrad = Callable[..., None]  # `kernels.reference.add_weight_grad_`


class WgradQueue:
    """Deferred weight gradients, by key. bucket: the key under which `accumulate` defers; None: it computes at once."""

    def __init__(self) -> None:
        self.bucket: Hashable = None
        self.deferred: dict[Hashable, deque[Callable[[], None]]] = {}

    def accumulate(self, weight: Tensor, dy: Tensor, x: Tensor, add: AddWeightGrad) -> None:
        """weight.grad += dy.T @ x, now or when the bucket is flushed; until then FSDP2 must not reshard the weight."""
        if self.bucket is None:
            accumulate_product(weight, dy, x, add)
        else:
            self.defer(self.bucket, partial(accumulate_product, weight, dy, x, add))

    def defer(self, key: Hashable, work: Callable[[], None]) -> None:
        self.deferred.setdefault(key, deque()).append(work)

    @torch.no_grad()
    def flush(self, key: Hashable) -> None:
        works = self.deferred.pop(key, deque())
        while works:
            works.popleft()()

    def clear(self) -> None:
        self.bucket = None
        self.deferred.clear()

    @contextmanager
    def immediate(self) -> Iterator[None]:
        """Do not defer within."""
        bucket, self.bucket = self.bucket, None
        try:
            yield
        finally:
            self.bucket = bucket


class GradAccumulator(nn.Module):
    """A module that accumulates its weights' gradients itself once it has a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.wgrad_queue: WgradQueue | None = None

    def accumulated(self, name: str) -> Tensor:
        """A parameter whose gradient comes from autograd or `defer_wgrad`."""
        weight = self.get_parameter(name)
        if self.wgrad_queue is None or not (weight.requires_grad and torch.is_grad_enabled()):
            return weight
        out: Tensor = _AccumulateGrad.apply(weight, self, name)
        return out

    def defer_wgrad(self, name: str, dz: Tensor, x: Tensor, add: AddWeightGrad) -> None:
        """The gradient dz.T @ x of an `accumulated` parameter, computed when the backward pass reaches that call."""
        assert self.wgrad_queue is not None
        self.wgrad_queue.defer(self, partial(accumulate_product, self.get_parameter(name), dz, x, add))


class _AccumulateGrad(torch.autograd.Function):
    """forward: the weight. backward: accumulates its gradient, and what the module deferred."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, owner: GradAccumulator, name: str) -> Tensor:
        ctx.owner, ctx.name = owner, name
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        ctx.owner.wgrad_queue.flush(ctx.owner)
        if grads[0] is not None:
            total, first = grad_buffer(ctx.owner.get_parameter(ctx.name))
            total.copy_(grads[0]) if first else total.add_(grads[0])
        return None, None, None


def accumulate_product(weight: Tensor, dy: Tensor, x: Tensor, add: AddWeightGrad) -> None:
    total, first = grad_buffer(weight)
    add(total, dy, x, first=first)


def accumulate_rows(weight: Tensor, rows: Tensor, index: Tensor) -> None:
    """weight.grad[index] += rows, deterministically."""
    total, first = grad_buffer(weight)
    if first:
        total.zero_()
    rows = rows.to(total.dtype)
    if total.device.type == "cpu":
        total.index_add_(0, index, rows)  # in order; on a GPU in any order
    else:
        total.index_put_((index,), rows, accumulate=True)  # sorts first


def grad_buffer(weight: Tensor) -> tuple[Tensor, bool]:
    """`weight.grad`, and whether it is new, uninitialized memory."""
    if weight.grad is not None:
        return weight.grad, False
    weight.grad = torch.empty_like(weight, dtype=weight.grad_dtype or weight.dtype, requires_grad=False)
    return weight.grad, True

"""Weight gradients accumulated into `weight.grad`, in its `grad_dtype`, by the product that computes them.

As Megatron's gradient accumulation fusion: no extra pass, and no rounding to the weight's dtype before the sum.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

AddWeightGrad = Callable[..., None]  # `kernels.reference.add_weight_grad_`


class WgradQueue:
    """Weight gradients that are computed later than the backward pass reaches them, by key.

    bucket: the key under which `accumulate` defers; None: it computes at once.
    """

    def __init__(self) -> None:
        self.bucket: Hashable = None
        self.deferred: dict[Hashable, deque[Callable[[], None]]] = {}

    def accumulate(self, weight: Tensor, dy: Tensor, x: Tensor, add: AddWeightGrad) -> None:
        """weight.grad += dy.T @ x, at once or when the bucket is flushed; `weight` must stay that tensor (FSDP2: gathered)."""
        if self.bucket is None:
            accumulate_product(weight, dy, x, add)
        else:
            self.defer(self.bucket, partial(accumulate_product, weight, dy, x, add))

    def defer(self, key: Hashable, work: Callable[[], None]) -> None:
        """Have `flush(key)` call `work`."""
        self.deferred.setdefault(key, deque()).append(work)

    @torch.no_grad()
    def flush(self, key: Hashable) -> None:
        """Compute what was deferred under `key`, in that order."""
        works = self.deferred.pop(key, deque())
        while works:
            works.popleft()()

    def clear(self) -> None:
        self.bucket = None
        self.deferred.clear()

    @contextmanager
    def immediate(self) -> Iterator[None]:
        """Compute at once within."""
        bucket, self.bucket = self.bucket, None
        try:
            yield
        finally:
            self.bucket = bucket


class GradAccumulator(nn.Module):
    """A module that accumulates its weights' gradients itself; as long as it has no queue, autograd does.

    In a backward pass its parameters must be those of the forward pass (FSDP2: gathered again).
    """

    def __init__(self) -> None:
        super().__init__()
        self.wgrad_queue: WgradQueue | None = None

    def accumulated(self, name: str) -> Tensor:
        """A parameter whose gradient autograd or `defer_wgrad` provides, and this module accumulates."""
        weight = self.get_parameter(name)
        if self.wgrad_queue is None or not (weight.requires_grad and torch.is_grad_enabled()):
            return weight
        out: Tensor = _AccumulateGrad.apply(weight, self, name)
        return out

    def defer_wgrad(self, name: str, dz: Tensor, x: Tensor, add: AddWeightGrad) -> None:
        """The gradient dz.T @ x of an `accumulated` parameter, computed when the backward pass comes to where that was
        called: after the collectives that it starts before.
        """
        assert self.wgrad_queue is not None
        self.wgrad_queue.defer(self, partial(accumulate_product, self.get_parameter(name), dz, x, add))


class _AccumulateGrad(torch.autograd.Function):
    """forward: the weight. backward: its gradient and what the module deferred are accumulated; autograd gets none."""

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
    """weight.grad += dy.T @ x."""
    total, first = grad_buffer(weight)
    add(total, dy, x, first=first)


def accumulate_rows(weight: Tensor, rows: Tensor, index: Tensor) -> None:
    """weight.grad[index] += rows, deterministic."""
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

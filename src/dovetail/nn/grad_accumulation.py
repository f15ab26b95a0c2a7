"""Weight gradients summed where they lie: into `weight.grad`, in its `grad_dtype`, without a pass of their own.

Autograd hands a gradient over in the weight's dtype, and whoever sums several of them reads and writes them once more.
Added here, nothing is rounded to the weight's dtype before the sum, and a product adds while it computes.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class AddProduct(Protocol):
    """`kernels.reference.add_weight_grad_`: total += dz.T @ x, where the first one finds nothing in total."""

    def __call__(self, total: Tensor, dz: Tensor, x: Tensor, *, first: bool = False) -> None: ...


class Adder(nn.Module):
    """A module that adds its weights' gradients itself once `adds` is there, and leaves them to autograd before.

    In a backward pass its parameters are the tensors that its forward pass saw (FSDP2: gathered again).
    """

    def __init__(self) -> None:
        super().__init__()
        self.adds: AddProduct | None = None
        self.put_off: deque[Callable[[], None]] = deque()  # gradients that a backward pass adds in a moment

    def summed(self, name: str) -> Tensor:
        """The parameter of that name, whose gradient autograd computes and this module adds."""
        weight = self.get_parameter(name)
        if self.adds is None or not (weight.requires_grad and torch.is_grad_enabled()):
            return weight
        found: Tensor = _Summed.apply(weight, self, name)
        return found

    def add(self, name: str, dz: Tensor, x: Tensor, add: AddProduct) -> None:
        """The gradient of a parameter that was `summed`, dz.T @ x, from whoever hands none to autograd. It is added when the
        backward pass comes to where that was: whatever it began in between, such as a collective, goes on beside the product.
        """
        self.put_off.append(partial(add_product, self.get_parameter(name), dz, x, add))


class _Summed(torch.autograd.Function):
    """forward: the weight. backward: its gradient is added, and what was put off; autograd gets none."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, owner: Adder, name: str) -> Tensor:
        ctx.owner, ctx.name = owner, name
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        owner = ctx.owner
        while owner.put_off:
            owner.put_off.popleft()()
        if grads[0] is not None:
            add_to(owner.get_parameter(ctx.name), grads[0])
        return None, None, None


def add_product(weight: Tensor, dy: Tensor, x: Tensor, add: AddProduct) -> None:
    """weight.grad += dy.T @ x."""
    total, first = sum_of(weight)
    add(total, dy, x, first=first)


def add_to(weight: Tensor, dw: Tensor) -> None:
    """weight.grad += dw."""
    total, first = sum_of(weight)
    total.copy_(dw) if first else total.add_(dw)


def add_rows(weight: Tensor, rows: Tensor, at: Tensor) -> None:
    """weight.grad[at] += rows: those that are not named are not touched. Equal inputs give equal bits."""
    total, first = sum_of(weight)
    if first:
        total.zero_()
    rows = rows.to(total.dtype)
    if total.device.type == "cpu":
        total.index_add_(0, at, rows)  # one after the other; on a GPU in any order
    else:
        total.index_put_((at,), rows, accumulate=True)  # sorted first


def sum_of(weight: Tensor) -> tuple[Tensor, bool]:
    """`weight.grad`, and whether it is new memory that nobody wrote."""
    if weight.grad is not None:
        return weight.grad, False
    weight.grad = torch.empty_like(weight, dtype=weight.grad_dtype or weight.dtype, requires_grad=False)
    return weight.grad, True

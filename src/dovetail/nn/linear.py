"""Linear layers cut over the tensor-parallel axis. Between blocks tokens are cut, inside them features are.

ColumnLinear   forward  y = all_gather(x) w.T       [t, D] -> [T, out / tp]
               backward dx = reduce_scatter(dy w)
RowLinear      forward  y = reduce_scatter(x w.T)   [T, in / tp] -> [t, D]
               backward dx = all_gather(dy) w

TokenLinear    forward  y = x w.T                   [t, in] -> [t, out], of this rank's tokens alone
               backward dx = dy w

All backwards also give dw = dy.T x, at once or, where a pipeline schedule wants it, later: see `Linear`.
"""

from collections import deque
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.kernels.reference import wide
from dovetail.nn.beside import DelayedWgrad
from dovetail.nn.grad_accumulation import Adder, AddProduct, add_product
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
from dovetail.parallel.placement import Part, Placement, Split


class Linear(Adder):
    """A product whose weight gradient is added where it lies, at once or later: what all these layers are.

    With `adds`, a backward pass adds the weight's gradient to `weight.grad`; while the layer `waits` it leaves it out, and
    `add_weight_gradient` adds that of the micro-batch that has waited longest. `weight` must be the same tensor until
    then (FSDP2: gathered).
    """

    weight: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.waits = False
        self.waiting: deque[tuple[Tensor, Tensor, AddProduct]] = deque()  # dy [T, out], x [T, in], and what adds

    def product(
        self,
        x: Tensor,
        bias: Tensor | None,
        crossing: AsyncCollective | None = None,
        beside: DelayedWgrad | None = None,
    ) -> Tensor:
        """x w.T + bias, where x is what arrives by the crossing. dw may be computed beside something else."""
        if self.adds is None or not torch.is_grad_enabled():
            return F.linear(finish(x, crossing), self.weight, bias)
        y: Tensor = _Product.apply(x, self.weight, bias, self, crossing, beside)
        return y

    def add_weight_gradient(self) -> None:
        """The gradient that has waited longest, summed into `weight.grad`."""
        if self.weight.requires_grad:
            with torch.no_grad():
                add_product(self.weight, *self.waiting.popleft())

    def add_or_wait(
        self, dy: Tensor, x: Tensor, adds: AddProduct | None = None, beside: DelayedWgrad | None = None
    ) -> None:
        """dy.T x, summed into `weight.grad` by `adds`, default: the layer's; while the layer waits, later; otherwise beside
        a collective that is awaited, if there is one.
        """
        adds = adds or self.adds
        assert adds is not None
        if self.waits:
            self.waiting.append((dy, x, adds))
        elif beside is not None and beside.awaited:
            beside.put_off(partial(add_product, self.weight, dy, x, adds))
        else:
            add_product(self.weight, dy, x, adds)


class _Product(torch.autograd.Function):
    """forward: y = x w.T + b of what arrives. backward: dx = dy w, which begins its way back; db; dw is added by the layer,
    now or later. A collective goes on beside dw's product.

    Only x is saved: the layer has the weight, and the one whose gradient counts, whoever recomputed or stored what is
    saved.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: Linear,
        crossing: AsyncCollective | None,
        beside: DelayedWgrad | None,
    ) -> Tensor:
        ctx.layer, ctx.crossing, ctx.beside, ctx.shape = layer, crossing, beside, x.shape
        x = x if crossing is None else crossing.take()
        ctx.save_for_backward(x if weight.requires_grad else None)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None, None]:
        dy, (x,), layer = grads[0], ctx.saved_tensors, ctx.layer
        for_x, for_weight, for_bias, *_ = ctx.needs_input_grad
        dx = sent_back(dy @ layer.weight, ctx.crossing, ctx.shape) if for_x else None
        if for_weight:
            layer.add_or_wait(dy, x, beside=ctx.beside)
        db = dy.sum(0, dtype=wide(dy.dtype)) if for_bias else None
        return dx, None, db, None, None, None


def sent_back(dx: Tensor, crossing: AsyncCollective | None, shape: torch.Size) -> Tensor:
    """The gradient of what arrived, on its way by the crossing, if there is one, to what left with this shape."""
    return dx if crossing is None else crossing.begin_back(dx, shape)


class ColumnLinear(Linear):
    """[t, D] -> [T, sum of out_i / tp], one part beside the next. Gathers tokens, splits output features.

    `parts` maps checkpoint names to (number of units, unit length): heads are never cut through. Fewer units than
    ranks: neighboring ranks hold copies of one unit. Units of length 1 are features, padded with zeros to a multiple of
    the ranks.
    forward all_gather, backward reduce_scatter.
    """

    def __init__(self, width: int, parts: dict[str, tuple[int, int]], mesh: Mesh, *, bias: bool = False) -> None:
        super().__init__()
        self.axis = mesh["tp"]
        tp = self.axis.size
        cut = []
        for name, (units, length) in parts.items():
            if length == 1:
                cut.append(Part.padded(name, units, tp))
                continue
            assert units % tp == 0 or tp % units == 0, f"{name}: {units} units over tp={tp}; arch refuses this"
            cut.append(Part(name, units * length, copies=max(1, tp // units)))
        self.lengths = [part.local_length(tp) for part in cut]
        self.weight = nn.Parameter(torch.empty(sum(self.lengths), width))
        self.bias = nn.Parameter(torch.empty(sum(self.lengths))) if bias else None
        self.placements = dict.fromkeys(("weight", "bias"), Placement((Split(0, "tp", tuple(cut)),)))

    def forward(self, x: Tensor) -> Tensor:
        return run_sync(self.turns(x))

    def turns(self, x: Tensor) -> AsyncForward[Tensor]:
        """The same: tokens are gathered during other work, if there is any."""
        left = start(x, crossing := async_all_gather(self.axis))
        yield from switch(self.axis)
        return self.product(left, self.bias, crossing)


class RowLinear(Linear):
    """[T, in / tp] -> [t, D]. Splits input features, padded with zeros to a multiple of the ranks; sums over ranks and
    scatters tokens.

    The bias is added once, to this rank's tokens, so its gradient is partial.
    forward reduce_scatter, backward all_gather.
    """

    def __init__(self, in_features: int, width: int, mesh: Mesh, *, bias: bool = False) -> None:
        super().__init__()
        self.axis = mesh["tp"]
        part = Part.padded("", in_features, self.axis.size)
        self.weight = nn.Parameter(torch.empty(width, part.local_length(self.axis.size)))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None
        self.placements = {
            "weight": Placement((Split(1, "tp", (part,)),)),
            "bias": Placement(partial_over=("tp",)),
        }

    def forward(self, x: Tensor) -> Tensor:
        return run_sync(self.turns(x))

    def turns(self, x: Tensor, beside: DelayedWgrad | None = None) -> AsyncForward[Tensor]:
        """The same: sums are scattered during other work, if there is any, and dw may be computed beside some."""
        y = yield from reduce_scatter_async(self.product(x, None, beside=beside), self.axis)
        return y if self.bias is None else y + self.bias


class ReplicatedLinear(Linear):
    """[t, in] -> [t, out], whole on every rank, which sees its own tokens only: gradients are partial. No collectives."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.placements = dict.fromkeys(("weight", "bias"), Placement(partial_over=("tp",)))

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)

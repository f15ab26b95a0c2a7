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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.comm import all_gather, reduce_scatter
from dovetail.mesh import Mesh
from dovetail.placement import Part, Placement, Split


class Linear(nn.Module):
    """A product whose weight gradient may wait: what all these layers are.

    With `split`, a backward pass while `waits` leaves the weight's gradient out, and `add_weight_gradient` adds it for
    the micro-batch that has waited longest. `weight` must be the same tensor until then (FSDP2: gathered). No collectives.
    """

    weight: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.split = self.waits = False
        self.waiting: deque[tuple[Tensor, Tensor]] = deque()  # dy [T, out] and x [T, in]

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x w.T + bias."""
        if not self.split:
            return F.linear(x, self.weight, bias)
        y: Tensor = _SplitProduct.apply(x, self.weight, self)
        return y if bias is None else y + bias

    def add_weight_gradient(self) -> None:
        """The gradient that has waited longest, summed into `weight.grad`."""
        dy, x = self.waiting.popleft()
        with torch.no_grad():
            if self.weight.grad is None:
                self.weight.grad = dy.T @ x
            else:
                self.weight.grad.addmm_(dy.T, x)


class _SplitProduct(torch.autograd.Function):
    """forward: y = x w.T. backward: dx = dy w; dw = dy.T x, or none while the layer waits. No collectives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Linear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (dy,), (x, weight) = grads, ctx.saved_tensors
        if ctx.layer.waits:
            ctx.layer.waiting.append((dy, x))
            return dy @ weight, None, None
        return dy @ weight, dy.T @ x, None


class ColumnLinear(Linear):
    """[t, D] -> [T, sum of out_i / tp], one part beside the next. Gathers tokens, splits output features.

    `parts` maps checkpoint names to (number of units, unit length): heads are never cut through. Fewer units than
    ranks: neighboring ranks hold copies of one unit.
    forward all_gather, backward reduce_scatter.
    """

    def __init__(self, width: int, parts: dict[str, tuple[int, int]], mesh: Mesh, *, bias: bool = False) -> None:
        super().__init__()
        self.axis = mesh["tp"]
        tp = self.axis.size
        cut = []
        for name, (units, length) in parts.items():
            assert units % tp == 0 or tp % units == 0, f"{name}: {units} units over tp={tp}; arch refuses this"
            cut.append(Part(name, units * length, copies=max(1, tp // units)))
        self.lengths = [part.local_length(tp) for part in cut]
        self.weight = nn.Parameter(torch.empty(sum(self.lengths), width))
        self.bias = nn.Parameter(torch.empty(sum(self.lengths))) if bias else None
        self.placements = dict.fromkeys(("weight", "bias"), Placement((Split(0, "tp", tuple(cut)),)))

    def forward(self, x: Tensor) -> Tensor:
        return self.product(all_gather(x, self.axis), self.bias)


class RowLinear(Linear):
    """[T, in / tp] -> [t, D]. Splits input features, sums over ranks and scatters tokens.

    The bias is added once, to this rank's tokens, so its gradient is partial.
    forward reduce_scatter, backward all_gather.
    """

    def __init__(self, in_features: int, width: int, mesh: Mesh, *, bias: bool = False) -> None:
        super().__init__()
        self.axis = mesh["tp"]
        self.weight = nn.Parameter(torch.empty(width, in_features // self.axis.size))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None
        self.placements = {
            "weight": Placement((Split(1, "tp", (Part("", in_features),)),)),
            "bias": Placement(partial_over=("tp",)),
        }

    def forward(self, x: Tensor) -> Tensor:
        y = reduce_scatter(self.product(x, None), self.axis)
        return y if self.bias is None else y + self.bias


class TokenLinear(Linear):
    """[t, in] -> [t, out], whole on every rank, which sees its own tokens only: gradients are partial. No collectives."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.placements = dict.fromkeys(("weight", "bias"), Placement(partial_over=("tp",)))

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)

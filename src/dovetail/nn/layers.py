"""Tensor-parallel linear layers, embedding, norm, and their weight gradients. Between blocks tokens are sharded, inside features.

ColumnLinear      forward  y = all_gather(x) w.T       [t, D] -> [T, out / tp]
                  backward dx = reduce_scatter(dy w)
RowLinear         forward  y = reduce_scatter(x w.T)   [T, in / tp] -> [t, D]
                  backward dx = all_gather(dy) w
ReplicatedLinear  forward  y = x w.T                   [t, in] -> [t, out], of this rank's tokens
                  backward dx = dy w

dw = dy.T x is added to `weight.grad` in its `grad_dtype`, now or from a queue.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.kernels.reference import wide
from dovetail.kernels.registry import KernelSet
from dovetail.nn.products import AddWeightGrad, GateUpGradients, Products
from dovetail.parallel.collectives import reduce_scatter
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.overlap import (
    AsyncCollective,
    AsyncForward,
    reduce_scatter_async,
    run_sync,
    start_all_gather,
)
from dovetail.parallel.placement import Part, Placement, Split


class WgradQueue:
    """Weight gradients that wait until `flush`, by key.

    bucket: the key under which `accumulate` defers; None: it computes at once.
    """

    def __init__(self) -> None:
        self.bucket: Hashable = None
        self.deferred: dict[Hashable, deque[Callable[[], None]]] = {}

    def accumulate(self, weight: Tensor, dy: Tensor, x: Tensor, add: AddWeightGrad) -> None:
        """weight.grad += dy.T @ x, now or in `flush`, before FSDP2 reshards the weight."""
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
        bucket = self.bucket
        self.bucket = None
        try:
            yield
        finally:
            self.bucket = bucket


class GradAccumulator(nn.Module):
    """Accumulates its weights' gradients once it has a queue."""

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
        """dz.T @ x, when backward reaches the `accumulated` call."""
        assert self.wgrad_queue is not None
        work = partial(accumulate_product, self.get_parameter(name), dz, x, add)
        self.wgrad_queue.defer(self, work)


class _AccumulateGrad(torch.autograd.Function):
    """forward: the weight. backward: accumulates its gradient and deferred ones."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, owner: GradAccumulator, name: str) -> Tensor:
        ctx.owner = owner
        ctx.name = name
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
    total, first = grad_buffer(weight)
    if first:
        total.zero_()
    rows = rows.to(total.dtype)
    if total.device.type == "cpu":
        total.index_add_(0, index, rows)
    else:
        total.index_put_((index,), rows, accumulate=True)  # sorts first


def grad_buffer(weight: Tensor) -> tuple[Tensor, bool]:
    """The gradient, and whether it is new, uninitialized memory."""
    if weight.grad is not None:
        return weight.grad, False
    dtype = weight.grad_dtype or weight.dtype
    weight.grad = torch.empty_like(weight, dtype=dtype, requires_grad=False)
    return weight.grad, True


class RMSNorm(nn.Module):
    """The gradient is partial: ranks of tp see other tokens or heads."""

    def __init__(self, width: int, eps: float, kernels: KernelSet) -> None:
        super().__init__()
        self.eps = eps
        self.kernels = kernels
        self.weight = nn.Parameter(torch.empty(width))
        self.placements = {"weight": Placement(partial_over=("tp",))}

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add_norm(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.kernels.add_norm(x, y, self.weight, self.eps)


ProductForward = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # x, weight, bias -> y


class Linear(GradAccumulator):
    """A layer of one weight, multiplied by `products`."""

    weight: nn.Parameter
    adapters: nn.ModuleDict  # of `nn.adapters.add_adapters`

    def __init__(self, kernels: KernelSet) -> None:
        super().__init__()
        self.products = Products(kernels)

    def product(
        self, x: Tensor, bias: Tensor | None, gather: AsyncCollective | None = None
    ) -> Tensor:
        """x w.T + bias. With a gather: of its result; x is what `start` returned."""
        y: Tensor = _Linear.apply(
            x, self.weight, bias, self, gather, self.products.linear, self.products
        )
        return y

    def fused_product(
        self,
        x: Tensor,
        gather: AsyncCollective | None,
        forward: ProductForward,
        gradients: Products | GateUpGradients,
    ) -> Tensor:
        """`product` by another forward pass and its gradients; nothing of `forward` is kept."""
        y: Tensor = _Linear.apply(x, self.weight, None, self, gather, forward, gradients)
        return y


class _Linear(torch.autograd.Function):
    """forward: y = x w.T + b. backward: dx = dy w, which starts the inverse collective; db = sum(dy); dw = dy.T x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: Linear,
        collective: AsyncCollective | None,
        forward: ProductForward,
        gradients: Products | GateUpGradients,
    ) -> Tensor:
        ctx.layer = layer
        ctx.collective = collective
        ctx.shape = x.shape
        ctx.gradients = gradients
        x = x if collective is None else collective.wait()
        needs_x = weight.requires_grad or layer.products.trains_adapters
        ctx.save_for_backward(x if needs_x else None)  # FSDP2 gathers the weight again
        return forward(x, weight, bias)

    @staticmethod
    def backward(
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None, None]:
        dy = grads[0]
        (x,) = ctx.saved_tensors
        layer = ctx.layer
        gradients = ctx.gradients
        for_x, for_weight, for_bias, *_ = ctx.needs_input_grad
        dx = None
        dw = None
        db = None
        if for_x:
            dx = gradients.input_grad(dy, layer.weight)
            if ctx.collective is not None:
                dx = ctx.collective.start_backward(dx, ctx.shape)
        queue = layer.wgrad_queue
        if layer.products.trains_adapters:
            accumulate = accumulate_product if queue is None else queue.accumulate
            layer.products.add_adapter_grads(accumulate, dy, x)
        if for_weight and queue is not None:
            queue.accumulate(layer.weight, dy, x, gradients.add_weight_grad_)
        elif for_weight:
            dw = torch.empty_like(layer.weight)
            gradients.add_weight_grad_(dw, dy, x, first=True)
        if for_bias:
            db = dy.sum(0, dtype=wide(dy.dtype))
        return dx, dw, db, None, None, None, None


class ColumnLinear(Linear):
    """parts: name -> (units, unit length). Fewer heads than ranks are copied; features (length 1) are padded."""

    def __init__(
        self,
        width: int,
        parts: dict[str, tuple[int, int]],
        mesh: Mesh,
        kernels: KernelSet,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__(kernels)
        self.axis = mesh["tp"]
        tp = self.axis.size
        sharded = []
        for name, (units, length) in parts.items():
            if length == 1:
                sharded.append(Part.padded(name, units, tp))
                continue
            divides = units % tp == 0 or tp % units == 0
            assert divides, f"{name}: {units} units over tp={tp}; arch refuses this"
            sharded.append(Part(name, units * length, copies=max(1, tp // units)))
        self.lengths = [part.local_length(tp) for part in sharded]
        self.weight = nn.Parameter(torch.empty(sum(self.lengths), width))
        self.bias = nn.Parameter(torch.empty(sum(self.lengths))) if bias else None
        placement = Placement((Split(0, "tp", tuple(sharded)),))
        self.placements = {"weight": placement, "bias": placement}

    def forward(self, x: Tensor) -> Tensor:
        return run_sync(self.forward_async(x))

    def forward_async(self, x: Tensor) -> AsyncForward[Tensor]:
        x, gather = yield from start_all_gather(x, self.axis)
        return self.product(x, self.bias, gather)


class RowLinear(Linear):
    """Padded inputs. The bias is added to this rank's tokens: its gradient is partial."""

    def __init__(
        self, in_features: int, width: int, mesh: Mesh, kernels: KernelSet, *, bias: bool = False
    ) -> None:
        super().__init__(kernels)
        self.axis = mesh["tp"]
        part = Part.padded("", in_features, self.axis.size)
        self.weight = nn.Parameter(torch.empty(width, part.local_length(self.axis.size)))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None
        self.placements = {
            "weight": Placement((Split(1, "tp", (part,)),)),
            "bias": Placement(partial_over=("tp",)),
        }

    def forward(self, x: Tensor) -> Tensor:
        return run_sync(self.forward_async(x))

    def forward_async(self, x: Tensor) -> AsyncForward[Tensor]:
        y = yield from reduce_scatter_async(self.product(x, None), self.axis)
        return y if self.bias is None else y + self.bias


class ReplicatedLinear(Linear):
    """Gradients are partial."""

    def __init__(
        self, in_features: int, out_features: int, kernels: KernelSet, *, bias: bool = False
    ) -> None:
        super().__init__(kernels)
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        placement = Placement(partial_over=("tp",))
        self.placements = {"weight": placement, "bias": placement}

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)


def vocab_placement(vocab_size: int, tp: int, *, tied: bool) -> tuple[int, Placement]:
    """The rows of each rank of a padded [V, D] table, and the table's placement."""
    part = Part.padded("", vocab_size, tp)
    partial_over = ("ends",) if tied else ()
    return part.local_length(tp), Placement((Split(0, "tp", (part,)),), partial_over)


class VocabEmbedding(GradAccumulator):
    """[T] -> [t, D]. `pad` gets no gradient. forward reduce_scatter, backward all_gather."""

    def __init__(
        self, vocab_size: int, width: int, mesh: Mesh, *, tied: bool = False, pad: int | None = None
    ) -> None:
        super().__init__()
        self.axis = mesh["tp"]
        rows, placement = vocab_placement(vocab_size, self.axis.size, tied=tied)
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.placements = {"weight": placement}
        self.pad = None
        if pad is not None and pad // rows == self.axis.rank:
            self.pad = pad % rows

    def forward(self, tokens: Tensor) -> Tensor:
        if self.axis.size == 1:
            return self._lookup(tokens)
        rows = self.weight.shape[0]
        local = tokens - self.axis.rank * rows
        is_local = (local >= 0) & (local < rows)
        # Other tokens look up rows apart: gradients of many zeros would be slow to add to one.
        anywhere = torch.arange(len(tokens), device=tokens.device) % rows
        found = self._lookup(torch.where(is_local, local, anywhere))
        return reduce_scatter(found * is_local[:, None], self.axis)

    def _lookup(self, ids: Tensor) -> Tensor:
        if self.wgrad_queue is None or not (self.weight.requires_grad and torch.is_grad_enabled()):
            return F.embedding(ids, self.weight, self.pad)
        out: Tensor = _Lookup.apply(ids, self.weight, self)
        return out


class _Lookup(torch.autograd.Function):
    """forward: rows of the table. backward: accumulates their gradients."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, table: VocabEmbedding) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.table = table
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        rows = grads[0]
        pad = ctx.table.pad
        rows = rows if pad is None else rows.masked_fill((ids == pad)[:, None], 0.0)
        accumulate_rows(ctx.table.weight, rows, ids)
        return None, None, None

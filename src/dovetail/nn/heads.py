"""Heads: values, or log-probs and entropies from vocabulary-sharded logits, in one pass.

Ranks combine four numbers a token:

    d = (z - m) / tau     m = max z    s = sum e^d      u = sum d e^d           t = z_y if this rank holds column y, else 0
    D = (m - M) / tau     M = max m    S = sum s e^D    U = sum e^D (u + s D)
    logprob = (sum t - M) / tau - ln S                  entropy = ln S - U / S
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.batch.loss import Loss, LossFn, Sum, TokenStats
from dovetail.batch.micro import MicroBatch
from dovetail.batch.packed import PackedBatch
from dovetail.kernels.reference import wide
from dovetail.kernels.registry import KernelSet
from dovetail.nn.context_parallel import SequenceGather
from dovetail.nn.layers import GradAccumulator, grad_buffer, vocab_placement
from dovetail.nn.products import Products
from dovetail.parallel.axes import Axis
from dovetail.parallel.collectives import all_gather, gather_replicated, stack_over
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import Placement

ENTROPY = 1  # its place among the statistics: a loss without it needs no gradient of it


def is_separable(loss: Callable[..., Any]) -> bool:
    return hasattr(loss, "separable") and bool(loss.separable)


class Normalizer(NamedTuple):
    """M, S and U / S [n]: more exact than log-sum-exp."""

    peak: Tensor
    total: Tensor
    offset: Tensor


def combine(stats: Tensor, temperature: Tensor | None = None) -> tuple[TokenStats, Normalizer]:
    """`vocab_stats` of all ranks [ranks, n, 4] -> the whole vocabulary's."""
    m, s, u, t = stats.unbind(-1)
    peak = m.amax(0)
    is_empty = m == float("-inf")
    shift = torch.where(is_empty, 0.0, m - peak)
    chosen = t.sum(0) - peak
    if temperature is not None:
        shift = shift / temperature
        chosen = chosen / temperature
    scale = torch.where(is_empty, 0.0, shift.exp())
    total = (s * scale).sum(0)
    moments = scale * (u + s * shift)
    offset = moments.sum(0) / total
    log_total = total.log()
    found = TokenStats(chosen - log_total, log_total - offset)
    return found, Normalizer(peak, total, offset)


@dataclass(frozen=True)
class VocabShard:
    """This rank's rows of the head, w [columns, D] without padding."""

    weight: Tensor
    first: int
    axis: Axis
    products: Products
    owner: GradAccumulator | None = None

    @property
    def kernels(self) -> KernelSet:
        return self.products.kernels

    def stats(
        self, x: Tensor, batch: PackedBatch, rows: slice, *, keep: bool
    ) -> tuple[Tensor | None, TokenStats, Normalizer]:
        targets = batch.targets[rows] - self.first
        temperature = _temperature(batch, rows, x.dtype)
        fused = self.fused_kernels(x)
        x = x[rows]
        if fused is not None:
            z, stats = fused.logit_stats(x, self.weight, targets, temperature, keep=keep)
        else:
            z = self.products.logits(x, self.weight)
            stats = self.kernels.vocab_stats(z, targets, temperature)
        everyones = stack_over(stats, self.axis)
        token_stats, normalizer = combine(everyones, temperature)
        return z, token_stats, normalizer

    def fused_kernels(self, x: Tensor) -> ModuleType | None:
        """The kernels that compute statistics within the product, if they take x [n, D]."""
        fused = self.products.head
        if fused is None or not fused.takes(x, self.weight):
            return None
        return fused


def fused_token_stats(x: Tensor, shard: VocabShard, batch: PackedBatch) -> TokenStats:
    with torch.no_grad():
        parts = []
        for rows in _chunks(len(batch), shard.kernels.head_chunk):
            _, stats, _ = shard.stats(x, batch, rows, keep=False)
            parts.append(stats)
        logprob = torch.cat([stats.logprob for stats in parts])
        entropy = torch.cat([stats.entropy for stats in parts])
        return TokenStats(logprob, entropy)


def fused_loss(
    x: Tensor,
    shard: VocabShard,
    batch: PackedBatch,
    loss: LossFn,
    make_pass: "Callable[..., HeadPass] | None" = None,
) -> Loss:
    """x [n, D] on the counted tokens [n]. Only `total` has a gradient."""
    trains = x.requires_grad or shard.weight.requires_grad
    needs_grad = torch.is_grad_enabled() and trains
    make = make_pass or HeadPass
    with torch.no_grad():
        run = make(x, shard, batch, loss, needs_grad=needs_grad)
        result = run.separable() if is_separable(loss) else run.whole()
    if not needs_grad:
        return result
    added = run.dw is not None and shard.owner is not None
    dw = None
    if run.dw is not None and not added:
        dw = run.dw.to(shard.weight.dtype)
    total = _WithGradients.apply(result.total, x, shard.weight, run.dx, dw, added)
    return result._replace(total=total)


class HeadPass:
    """A loss, dx [n, D] and dw [columns, D]. fresh: dw is uninitialized."""

    def __init__(
        self, x: Tensor, shard: VocabShard, batch: PackedBatch, loss: LossFn, *, needs_grad: bool
    ) -> None:
        self.x = x
        self.shard = shard
        self.batch = batch
        self.loss = loss
        self.needs_grad = needs_grad
        self.chunks = [*_chunks(len(batch), shard.kernels.head_chunk)]
        self.dx = torch.empty_like(x) if needs_grad else x
        self.dw = None
        self.fresh = True
        w = shard.weight
        if not (needs_grad and w.requires_grad):
            return
        if shard.owner is None:
            self.dw = torch.empty_like(w, dtype=wide(w.dtype))
            return
        whole = shard.owner.get_parameter("weight")
        total, self.fresh = grad_buffer(whole)
        rows = len(w)
        if self.fresh:
            total[rows:].zero_()
        self.dw = total[:rows]

    def separable(self) -> Loss:
        values = [self.chunk(rows) for rows in self.chunks]
        return values[0] if len(values) == 1 else _sum_of(values)

    def chunk(self, rows: slice) -> Loss:
        z, stats, normalizer = self.shard.stats(self.x, self.batch, rows, keep=self.needs_grad)
        part = self.part(rows)
        value, (g, h) = loss_gradients(self.loss, stats, part, self.needs_grad)
        if self.needs_grad and z is not None:
            self._backward(rows, z, normalizer, g, h)
        return value

    def part(self, rows: slice) -> PackedBatch:
        if rows.stop - rows.start == len(self.batch):
            return self.batch
        index = torch.arange(rows.start, rows.stop, device=self.x.device)
        return self.batch.compact(index)

    def whole(self) -> Loss:
        """Two passes: the second recomputes logits for the gradients."""
        stats = fused_token_stats(self.x, self.shard, self.batch)
        value, (g, h) = loss_gradients(self.loss, stats, self.batch, self.needs_grad)
        if not self.needs_grad:
            return value
        for rows in self.chunks:
            z, _, normalizer = self.shard.stats(self.x, self.batch, rows, keep=True)
            assert z is not None
            h_rows = None if h is None else h[rows]
            self._backward(rows, z, normalizer, g[rows], h_rows)
            del z
        return value

    def _backward(
        self, rows: slice, z: Tensor, normalizer: Normalizer, g: Tensor, h: Tensor | None
    ) -> None:
        """Overwrites z."""
        shard = self.shard
        batch = self.batch
        dtype = self.x.dtype
        targets = batch.targets[rows] - shard.first
        temperature = _temperature(batch, rows, dtype)
        gradient = shard.kernels.vocab_grad_  # overwrites z
        self.add_products(rows, gradient(z, targets, normalizer, g, h, temperature, dtype=dtype))

    def add_products(self, rows: slice, dz: Tensor) -> None:
        x = self.x
        shard = self.shard
        first = self.fresh and rows.start == 0
        fused = shard.fused_kernels(x)
        if fused is not None:
            fused.logit_grads_(dz, x[rows], shard.weight, self.dx[rows], self.dw, first=first)
            return
        if self.dw is not None:
            shard.products.add_weight_grad_(self.dw, dz, x[rows], first=first)
        shard.products.input_grad(dz, shard.weight, out=self.dx[rows])


def loss_gradients(
    loss: LossFn, stats: Any, batch: PackedBatch, needs_grad: bool, leaves: int = 2
) -> tuple[Loss, Any]:
    """Also gradients in the first `leaves` statistics: zeros where unused, None for the entropy."""
    if not needs_grad:
        return _detached(loss(stats, batch)), stats[:leaves]
    with torch.enable_grad():
        given = [x.detach().requires_grad_() for x in stats[:leaves]]
        others = stats[leaves:]
        value = loss(type(stats)(*given, *others), batch)
        grads: tuple[Tensor | None, ...] = (None,) * leaves
        if value.total.requires_grad:
            grads = torch.autograd.grad(value.total, given, allow_unused=True)
    zeroed = list(grads)
    for i, grad in enumerate(grads):
        if grad is None and i != ENTROPY:
            zeroed[i] = torch.zeros_like(stats.logprob)
    return _detached(value), tuple(zeroed)


class _WithGradients(torch.autograd.Function):
    """forward: the total. backward: dx and dw times the upstream gradient, 1 where dw was accumulated."""

    @staticmethod
    def forward(
        ctx: Any,
        total: Tensor,
        _x: Tensor,
        _weight: Tensor,
        dx: Tensor,
        dw: Tensor | None,
        added: bool,
    ) -> Tensor:
        ctx.save_for_backward(dx, dw)
        ctx.added = added
        return total.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        (upstream,) = grads
        if ctx.added and upstream.device.type == "cpu":
            assert float(upstream) == 1, "dw is accumulated already"
        dx.mul_(upstream.to(dx.dtype))
        if dw is not None:
            dw.mul_(upstream.to(dw.dtype))
        return None, dx, dw, None, None, None


def _sum_of(losses: list[Loss]) -> Loss:
    totals, counts, metrics = zip(*losses, strict=True)
    by_name: dict[str, list[Sum]] = {}
    for part in metrics:
        for name, value in part.items():
            by_name.setdefault(name, []).append(value)
    summed = {}
    for name, values in by_name.items():
        total = torch.stack([value.total for value in values])
        count = torch.stack([value.count for value in values])
        summed[name] = Sum(total.sum(0), count.sum(0))
    total = torch.stack(totals)
    count = torch.stack(counts)
    return Loss(total.sum(0), count.sum(0), summed)


def _detached(loss: Loss) -> Loss:
    total, count, metrics = loss
    sums = {}
    for name, value in metrics.items():
        detached = torch.as_tensor(value.total).detach()
        sums[name] = Sum(detached, torch.as_tensor(value.count))
    return Loss(total.detach(), torch.as_tensor(count), sums)


def _temperature(batch: PackedBatch, rows: slice, dtype: torch.dtype) -> Tensor | None:
    if "temperature" not in batch.fields:
        return None
    return batch.fields["temperature"][rows].to(wide(dtype))


def _chunks(n: int, size: int) -> Iterator[slice]:
    """One empty slice for n = 0: every rank runs the same collectives."""
    return (slice(start, min(start + size, n)) for start in range(0, max(n, 1), size))


class LMHead(GradAccumulator):
    """[t, D] -> statistics or loss of counted tokens. forward all_gather, backward reduce_scatter."""

    def __init__(
        self, vocab_size: int, width: int, mesh: Mesh, kernels: KernelSet, *, tied: bool = False
    ) -> None:
        super().__init__()
        self.axis = mesh["tp"]
        self.products = Products(kernels)
        rows, placement = vocab_placement(vocab_size, self.axis.size, tied=tied)
        self.first = self.axis.rank * rows
        self.columns = max(0, min(rows, vocab_size - self.first))
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.placements = {"weight": placement}

    def forward(self, x: Tensor, micro: MicroBatch, loss: LossFn | None) -> TokenStats | Loss:
        counted = all_gather(x, self.axis)[micro.index]
        if loss is None:
            return fused_token_stats(counted, self.shard, micro.counted)
        run: Callable[..., Any] = loss.in_head if hasattr(loss, "in_head") else fused_loss
        return run(counted, self.shard, micro.counted, loss)

    def logits(self, x: Tensor) -> Tensor:
        """[n, columns] in the wide dtype, of x [n, D] on all ranks of tp."""
        return self.products.logits(x, self.shard.weight).to(wide(x.dtype))

    @property
    def shard(self) -> VocabShard:
        weight: Tensor = self.weight
        if self.columns < len(weight):
            weight = weight[: self.columns]
        owner = None if self.wgrad_queue is None else self
        return VocabShard(weight, self.first, self.axis, self.products, owner)


class ValueHead(nn.Module):
    """[t, D] -> values [T] in the wide dtype. Gradients are partial."""

    def __init__(self, width: int, mesh: Mesh, *, bias: bool) -> None:
        super().__init__()
        self.axis = mesh["tp"]
        self.weight = nn.Parameter(torch.empty(1, width))
        self.bias = nn.Parameter(torch.empty(1)) if bias else None
        self.placements = dict.fromkeys(("weight", "bias"), Placement(partial_over=("tp",)))

    def forward(self, x: Tensor, micro: MicroBatch, loss: LossFn | None) -> Tensor | Loss:
        local = F.linear(x, self.weight, self.bias)
        column = local[:, 0].to(wide(x.dtype))
        values = gather_replicated(column, self.axis)
        if loss is None:
            return values
        return loss(values[micro.index], micro.counted)


def gather_over_cp(loss: LossFn, micro: MicroBatch, axis: Axis) -> LossFn:
    """Returns a loss that sees whole sequences: a separable one takes pieces as they are."""
    if axis.size == 1 or is_separable(loss):
        return loss
    return SequenceGather(loss, micro, axis)

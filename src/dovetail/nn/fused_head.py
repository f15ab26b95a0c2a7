"""Fused linear log-prob and entropy from vocabulary-sharded logits, in one pass and one collective.

Each rank reduces its columns to four numbers a token; the ranks gather and combine them in order:

    d = (z - m) / tau     m = max z    s = sum e^d      u = sum d e^d           t = z_y if this rank holds column y, else 0
    D = (m - M) / tau     M = max m    S = sum s e^D    U = sum e^D (u + s D)
    logprob = (sum t - M) / tau - ln S                  entropy = ln S - U / S

The maximum is subtracted before the division by tau, and the first moment is shifted: both keep digits at large logits. Padded
columns are cut off first.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dovetail.batch.loss import Loss, LossFn, Sum, TokenStats, is_separable
from dovetail.batch.packed import PackedBatch
from dovetail.kernels.reference import wide
from dovetail.kernels.registry import HeadProducts, KernelSet
from dovetail.nn.grad_accumulation import GradAccumulator, grad_buffer
from dovetail.parallel.collectives import stack_over
from dovetail.parallel.mesh import Axis


class Normalizer(NamedTuple):
    """M, S and U / S (the mean of d under p) of each row, all [n]. At large logits log-sum-exp would be less exact."""

    peak: Tensor
    total: Tensor
    offset: Tensor


def combine(stats: Tensor, temperature: Tensor | None = None) -> tuple[TokenStats, Normalizer]:
    """`vocab_stats` of every rank [ranks, n, 4] -> statistics and normalizer of the whole vocabulary."""
    m, s, u, t = stats.unbind(-1)
    peak = m.amax(0)
    shift, chosen = torch.where(m == float("-inf"), 0.0, m - peak), t.sum(0) - peak
    if temperature is not None:
        shift, chosen = shift / temperature, chosen / temperature
    scale = torch.where(m == float("-inf"), 0.0, shift.exp())
    total = (s * scale).sum(0)
    moment = (scale * (u + s * shift)).sum(0)
    log_total, offset = total.log(), moment / total
    return TokenStats(chosen - log_total, log_total - offset), Normalizer(peak, total, offset)


@dataclass(frozen=True)
class VocabShard:
    """This rank's rows of the head, w [columns, D] without padding, from row `first` on."""

    weight: Tensor
    first: int
    axis: Axis
    kernels: KernelSet
    owner: GradAccumulator | None = None  # accumulates the gradient, in the first rows of its weight's

    def stats(
        self, x: Tensor, batch: PackedBatch, rows: slice, *, keep: bool
    ) -> tuple[Tensor | None, TokenStats, Normalizer]:
        """Logits without temperature, if `keep`, statistics and normalizer of some of the batch's rows of x [n, D]."""
        targets, temperature = batch.targets[rows] - self.first, _temperature(batch, rows, x.dtype)
        products, x, z = self.products(x), x[rows], None
        if products is not None:
            z, stats = products.logit_stats(x, self.weight, targets, temperature, keep=keep)
        else:
            z = self.kernels.logits(x, self.weight)
            stats = self.kernels.vocab_stats(z, targets, temperature)
        return z, *combine(stack_over(stats, self.axis), temperature)

    def products(self, x: Tensor) -> HeadProducts | None:
        products = self.kernels.head
        return products if products is not None and products.takes(x, self.weight) else None


def fused_token_stats(x: Tensor, shard: VocabShard, batch: PackedBatch) -> TokenStats:
    """Statistics of `batch.targets` [n] from hidden states x [n, D], without a gradient."""
    with torch.no_grad():
        stats = [shard.stats(x, batch, rows, keep=False)[1] for rows in _chunks(len(batch), shard.kernels.head_chunk)]
        return TokenStats(*(torch.cat(column) for column in zip(*stats, strict=True)))


def fused_loss(x: Tensor, shard: VocabShard, batch: PackedBatch, loss: LossFn) -> Loss:
    """The loss of hidden states x [n, D] on the counted tokens of `batch` [n]. Only `total` has a gradient."""
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or shard.weight.requires_grad)
    with torch.no_grad():
        gradients = _Gradients.of(x, shard) if needs_grad else None
        run = _separable if is_separable(loss) else _whole
        result = run(x, shard, batch, loss, gradients)
    if gradients is None:
        return result
    dx, dw, added = gradients.dx, gradients.dw, False
    if dw is not None:
        dw, added = (None, True) if shard.owner else (dw.to(shard.weight.dtype), False)
    return result._replace(total=_WithGradients.apply(result.total, x, shard.weight, dx, dw, added))


@dataclass(frozen=True)
class _Gradients:
    """Buffers dx [n, D] and dw [columns, D] in the wide dtype, None if frozen. fresh: dw is uninitialized."""

    dx: Tensor
    dw: Tensor | None
    fresh: bool = True

    @classmethod
    def of(cls, x: Tensor, shard: VocabShard) -> "_Gradients":
        w, dx = shard.weight, torch.empty_like(x)
        if not w.requires_grad:
            return cls(dx, None)
        if shard.owner is None:
            return cls(dx, torch.empty_like(w, dtype=wide(w.dtype)))
        total, fresh = grad_buffer(shard.owner.get_parameter("weight"))
        if fresh:
            total[len(w) :].zero_()
        return cls(dx, total[: len(w)], fresh)


def _separable(x: Tensor, shard: VocabShard, batch: PackedBatch, loss: LossFn, gradients: _Gradients | None) -> Loss:
    """One pass: loss and gradients chunk by chunk."""
    values = []
    for rows in _chunks(len(batch), shard.kernels.head_chunk):
        z, stats, normalizer = shard.stats(x, batch, rows, keep=gradients is not None)
        part = batch
        if rows.stop - rows.start < len(batch):
            part = batch.compact(torch.arange(rows.start, rows.stop, device=x.device))
        value, g, h = _loss_gradients(loss, stats, part, gradients is not None)
        values.append(value)
        if gradients is not None and z is not None:
            _backward_chunk(x, rows, z, shard, batch, normalizer, (g, h), gradients)
        del z  # or two chunks of logits are alive at once
    return values[0] if len(values) == 1 else _sum_of(values)


def _whole(x: Tensor, shard: VocabShard, batch: PackedBatch, loss: LossFn, gradients: _Gradients | None) -> Loss:
    """Two passes: the loss of all statistics, then gradients from recomputed logits."""
    value, g, h = _loss_gradients(loss, fused_token_stats(x, shard, batch), batch, gradients is not None)
    if gradients is not None:
        for rows in _chunks(len(batch), shard.kernels.head_chunk):
            z, _, normalizer = shard.stats(x, batch, rows, keep=True)
            assert z is not None
            gh = (g[rows], None if h is None else h[rows])
            _backward_chunk(x, rows, z, shard, batch, normalizer, gh, gradients)
            del z
    return value


def _loss_gradients(
    loss: LossFn, stats: TokenStats, batch: PackedBatch, needs_grad: bool
) -> tuple[Loss, Tensor, Tensor | None]:
    """The loss's value and its gradients in the two statistics: zeros, or None for the entropy, where it ignores one."""
    if not needs_grad:
        return _detached(loss(stats, batch)), stats.logprob, None
    with torch.enable_grad():
        leaves = TokenStats(stats.logprob.detach().requires_grad_(), stats.entropy.detach().requires_grad_())
        value = loss(leaves, batch)
        if not value.total.requires_grad:
            return _detached(value), torch.zeros_like(stats.logprob), None
        g, h = torch.autograd.grad(value.total, leaves, allow_unused=True)
    return _detached(value), torch.zeros_like(stats.logprob) if g is None else g, h


def _backward_chunk(
    x: Tensor,
    rows: slice,
    z: Tensor,
    shard: VocabShard,
    batch: PackedBatch,
    normalizer: Normalizer,
    gh: tuple[Tensor, Tensor | None],
    gradients: _Gradients,
) -> None:
    """The gradients of some rows. Overwrites their logits z."""
    local_targets, temperature = batch.targets[rows] - shard.first, _temperature(batch, rows, x.dtype)
    dz = shard.kernels.vocab_grad_(z, local_targets, normalizer, *gh, temperature, dtype=x.dtype)
    first, products = gradients.fresh and rows.start == 0, shard.products(x)
    if products is not None:
        products.logit_grads_(dz, x[rows], shard.weight, gradients.dx[rows], gradients.dw, first=first)
        return
    if gradients.dw is not None:
        shard.kernels.add_weight_grad_(gradients.dw, dz, x[rows], first=first)
    torch.mm(dz, shard.weight, out=gradients.dx[rows])


class _WithGradients(torch.autograd.Function):
    """forward: the total. backward: dx and dw, known already, times the upstream gradient, 1 where dw was accumulated."""

    @staticmethod
    def forward(
        ctx: Any, total: Tensor, _x: Tensor, _weight: Tensor, dx: Tensor, dw: Tensor | None, added: bool
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
        dx, dw = (grad if grad is None else grad.mul_(upstream.to(grad.dtype)) for grad in (dx, dw))
        return None, dx, dw, None, None, None


def _sum_of(losses: list[Loss]) -> Loss:
    """A metric may be in some of the parts only."""
    totals, counts, metrics = zip(*losses, strict=True)
    summed = {}
    for name in dict.fromkeys(name for part in metrics for name in part):
        parts = zip(*(part[name] for part in metrics if name in part), strict=True)
        summed[name] = Sum(*(torch.stack(part).sum(0) for part in parts))
    return Loss(torch.stack(totals).sum(0), torch.stack(counts).sum(0), summed)


def _detached(loss: Loss) -> Loss:
    metrics = {
        name: Sum(torch.as_tensor(s.total).detach(), torch.as_tensor(s.count)) for name, s in loss.metrics.items()
    }
    return Loss(loss.total.detach(), torch.as_tensor(loss.count), metrics)


def _temperature(batch: PackedBatch, rows: slice, dtype: torch.dtype) -> Tensor | None:
    return batch.fields["temperature"][rows].to(wide(dtype)) if "temperature" in batch.fields else None


def _chunks(n: int, size: int) -> Iterator[slice]:
    """Slices that cover n rows; an empty one for none: every rank runs the same collectives."""
    return (slice(start, min(start + size, n)) for start in range(0, max(n, 1), size))

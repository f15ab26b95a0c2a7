"""Distillation inside the fused head, chunk by chunk, on vocabulary-parallel logits of both models."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import log, log1p
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from dovetail.batch.loss import Loss, LossFn, TokenStats
from dovetail.batch.packed import PackedBatch
from dovetail.kernels.divergence import Divergence, Pair
from dovetail.kernels.reference import widened
from dovetail.nn.heads import HeadPass, Normalizer, VocabShard, fused_loss, loss_gradients
from dovetail.nn.products import Products
from dovetail.parallel.collectives import stack_over

ROW = "teacher_row"  # field: a token's row of `TeacherStates.hidden`
MIN_TAIL = 1e-7  # as in TRL


class DistillStats(NamedTuple):
    logprob: Tensor
    entropy: Tensor
    divergence: Tensor
    teacher_logprob: Tensor
    teacher_entropy: Tensor


@dataclass(frozen=True)
class TeacherStates:
    """hidden [N, D] by `teacher_row`; weight [columns, D]: the teacher's rows for this rank's columns.

    vocab_size: columns of all ranks.
    """

    hidden: Tensor
    weight: Tensor
    vocab_size: int


@dataclass(frozen=True)
class TopK:
    """The teacher's k likeliest tokens. tail: the others count as one; else both are renormalized."""

    k: int
    tail: bool = True


class HiddenStates:
    """Takes the place of a loss: final hidden states of counted tokens [n, D]."""

    separable: ClassVar[bool] = True

    def __call__(self, stats: Any, batch: PackedBatch, /) -> Loss:
        raise AssertionError("a head computes no statistics for it")

    @staticmethod
    def in_head(x: Tensor, _shard: VocabShard, _batch: PackedBatch, _loss: LossFn) -> Tensor:
        return x


def distilled_loss(
    x: Tensor,
    shard: VocabShard,
    batch: PackedBatch,
    loss: LossFn,
    *,
    teacher: TeacherStates,
    divergence: Divergence,
    top_k: TopK | None = None,
) -> Loss:
    """`fused_loss` of a separable loss of `DistillStats`; the batch's `temperature` divides both models' logits."""
    return fused_loss(x, shard, batch, loss, partial(DistillationPass, teacher, divergence, top_k))


class DistillationPass(HeadPass):
    def __init__(
        self,
        teacher: TeacherStates,
        divergence: Divergence,
        top_k: TopK | None,
        *given: Any,
        **keys: Any,
    ) -> None:
        super().__init__(*given, **keys)
        self.teacher = teacher
        self.divergence = divergence
        self.top_k = top_k

    def chunk(self, rows: slice) -> Loss:
        part = self.part(rows)
        z, stats, normalizer = self.shard.stats(self.x, self.batch, rows, keep=True)
        plain = Products(self.shard.kernels)
        own = replace(self.shard, weight=self.teacher.weight, products=plain, owner=None)
        w, theirs, other = own.stats(
            self.teacher.hidden[part.fields[ROW]], part, slice(0, len(part)), keep=True
        )
        assert z is not None and w is not None
        temperature = (
            part.fields["temperature"].to(stats.logprob.dtype)
            if "temperature" in part.fields
            else None
        )
        pair = Pair(w, *normalizer, other.peak, other.total, temperature)
        divergence: Tensor
        gradient: Callable[..., Tensor]
        if self.top_k is None:
            sums = stack_over(
                self.shard.kernels.divergence_sums(z, pair, self.divergence), self.shard.axis
            ).sum(0)
            divergence = self.divergence.of(*sums.unbind(-1))
            given: dict[str, Any] = {"second": sums[:, 1], "divergence": self.divergence}
            gradient = partial(
                self.shard.kernels.divergence_grad_,
                z,
                pair,
                part.targets - self.shard.first,
                **given,
            )
        else:
            chosen = top_columns(z, pair, self.shard, self.top_k.k)
            divergence, slopes = top_divergence(chosen, self.divergence, self.top_k)
            gradient = partial(self._top_gradient, z, normalizer, part, stats, chosen, slopes)
        del w, pair
        value, grads = loss_gradients(
            self.loss,
            DistillStats(*stats, divergence, *theirs),
            part,
            needs_grad=self.needs_grad,
            leaves=3,
        )
        if self.needs_grad:
            self.add_products(rows, gradient(grads=grads, dtype=self.x.dtype))
        return value

    def _top_gradient(
        self,
        z: Tensor,
        normalizer: Normalizer,
        part: PackedBatch,
        stats: TokenStats,
        chosen: "TopColumns",
        slopes: Tensor,
        *,
        grads: tuple[Tensor, Tensor | None, Tensor],
        dtype: torch.dtype,
    ) -> Tensor:
        """-p (g + sum e + h (log p + entropy)) / temperature, plus e at the top k and g at the target; e = slopes x k.

        Those columns are written exactly, not added to rounded numbers.
        """
        g, h, k = grads
        slopes = slopes * k[:, None]
        same = chosen.ids == part.targets[:, None]
        e = torch.cat([slopes + same * g[:, None], (g + (slopes * same).sum(-1))[:, None]], -1)
        logprobs = torch.cat([chosen.logprob, stats.logprob[:, None]], -1)
        columns = torch.cat([chosen.ids, part.targets[:, None]], -1) - self.shard.first
        total = g + slopes.sum(-1)
        temperature = part.fields.get("temperature")
        heat = None if temperature is None else temperature.to(total.dtype)
        by_entropy = 0.0 if h is None else h[:, None] * (logprobs + stats.entropy[:, None])
        exact = e - logprobs.exp() * (total[:, None] + by_entropy)
        exact = exact if heat is None else exact / heat[:, None]
        none = torch.full_like(part.targets, -1)
        dz: Tensor = self.shard.kernels.vocab_grad_(
            z, none, normalizer, total, h, heat, dtype=dtype
        )
        if dz.shape[1]:  # foreign columns repeat a local one
            local = (columns >= 0) & (columns < dz.shape[1])
            first = local.to(torch.int8).argmax(-1, keepdim=True)
            spare = torch.where(local.any(-1, keepdim=True), columns.gather(-1, first), 0)
            kept = torch.where(
                local.any(-1, keepdim=True), exact.gather(-1, first), dz[:, :1].to(exact.dtype)
            )
            dz.scatter_(
                -1, torch.where(local, columns, spare), torch.where(local, exact, kept).to(dz.dtype)
            )
        return dz


class TopColumns(NamedTuple):
    """Ids [n, k], and log-probs of both models over their whole vocabularies."""

    ids: Tensor
    logprob: Tensor
    teacher_logprob: Tensor


def top_columns(z: Tensor, pair: Pair, shard: VocabShard, k: int) -> TopColumns:
    """Ranks find those of their columns, then choose among them. The same on every rank."""
    values, ids = widened(pair.w).topk(min(k, pair.w.shape[1]))
    missing = (0, k - values.shape[1])
    values = torch.nn.functional.pad(values, missing, value=float("-inf"))
    ids = torch.nn.functional.pad(ids + shard.first, missing, value=-1)
    values, ids = (stack_over(x, shard.axis).movedim(0, 1).flatten(1) for x in (values, ids))
    values, order = values.topk(k)
    ids = ids.gather(-1, order)
    local = (ids >= shard.first) & (ids < shard.first + z.shape[1])
    picked = z.new_zeros(ids.shape)
    if z.shape[1]:
        picked = torch.where(local, z.gather(-1, torch.where(local, ids - shard.first, 0)), 0.0)
    picked = stack_over(widened(picked), shard.axis).sum(0)

    def logprob(x: Tensor, peak: Tensor, total: Tensor) -> Tensor:
        shifted = x - peak[:, None]
        return (
            shifted if pair.temperature is None else shifted / pair.temperature[:, None]
        ) - total.log()[:, None]

    theirs = logprob(values, pair.teacher_peak, pair.teacher_total)
    return TopColumns(ids, logprob(picked, pair.peak, pair.total), theirs)


def top_divergence(
    chosen: TopColumns, divergence: Divergence, top_k: TopK
) -> tuple[Tensor, Tensor]:
    """[n], and its gradient in the student's log-probs [n, k]."""
    with torch.enable_grad():
        leaf = chosen.logprob.detach().requires_grad_()
        a, b = (_closed(x, tail=top_k.tail) for x in (leaf, chosen.teacher_logprob))
        if divergence.kind == "jsd":
            m = torch.logaddexp(a + log1p(-divergence.beta), b + log(divergence.beta))
        else:
            m = a if divergence.kind == "forward_kl" else b
        value = divergence.of((b.exp() * (b - m)).sum(-1), (a.exp() * (a - m)).sum(-1))
        (slopes,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), slopes


def _closed(logprob: Tensor, *, tail: bool) -> Tensor:
    """A distribution over the k, or over the k and the rest."""
    total = logprob.logsumexp(-1, keepdim=True)
    if not tail:
        return logprob - total
    return torch.cat([logprob, torch.log(-torch.expm1(total.clamp(max=-MIN_TAIL)))], -1)

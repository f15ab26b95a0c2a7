"""Losses of distillation: the divergence from a teacher, computed inside the fused head, and of sampled tokens alone."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from dovetail.batch.loss import Loss, LossFn, Sum, TokenStats
from dovetail.batch.packed import PackedBatch
from dovetail.errors import ConfigError
from dovetail.kernels.divergence import Divergence, Kind
from dovetail.kernels.reference import widened
from dovetail.nn.distillation import DistillStats, TeacherStates, TopK, distilled_loss
from dovetail.nn.heads import VocabShard
from dovetail.rl.losses import PolicyLoss


@dataclass(frozen=True, kw_only=True)
class DistillationLoss:
    """The divergence of a teacher's distribution q and the student's p at each counted token (Agarwal et al. 2024, eq. 1):

        forward_kl  KL(q, p)
        reverse_kl  KL(p, q)
        jsd         beta KL(q, m) + (1 - beta) KL(p, m), m = beta q + (1 - beta) p

    as TRL's GKDTrainer: beta 0 is forward_kl and 1 is reverse_kl. teacher: from `Teacher.read`, with the batch. top_k: over the
    teacher's k likeliest tokens, 0 for all; tail: the others count as one token (as in TRL), else both are renormalized.
    """

    teacher: TeacherStates
    divergence: Kind = "jsd"
    beta: float = 0.5
    top_k: int = 0
    tail: bool = True
    separable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= 1:
            raise ConfigError(f"beta={self.beta}; expected 0 (forward KL) to 1 (reverse KL)")

    @property
    def measure(self) -> Divergence:
        if self.divergence == "jsd" and self.beta in (0, 1):
            return Divergence("reverse_kl" if self.beta else "forward_kl")
        return Divergence(self.divergence, self.beta)

    def __call__(self, stats: Any, batch: PackedBatch, /) -> Loss:
        if not isinstance(stats, DistillStats):  # asked for the count alone (`engine/expert_routing.py`)
            stats = DistillStats(*stats, *[torch.zeros_like(stats.logprob)] * 3)
        losses = widened(stats.divergence)
        ones = torch.ones_like(losses.detach())
        weight, count = batch.fields.get("weight", ones), batch.fields.get("count", ones)
        metrics = {
            "divergence": stats.divergence,
            "sampled_reverse_kl": stats.logprob - stats.teacher_logprob,
            "entropy_mean": stats.entropy,
            "teacher_entropy_mean": stats.teacher_entropy,
        }
        return Loss((weight * losses).sum(), count.sum(), {name: _metric(x) for name, x in metrics.items()})

    def in_head(self, x: Tensor, shard: VocabShard, batch: PackedBatch, loss: LossFn) -> Loss:
        top = TopK(self.top_k, self.tail) if self.top_k else None
        return distilled_loss(x, shard, batch, loss, teacher=self.teacher, divergence=self.measure, top_k=top)


@dataclass(frozen=True)
class SampledReverseKL:
    """A policy gradient of sampled tokens with the advantage log q - log p, which has no gradient (on-policy distillation).

    q: `fields["teacher_logprob"]`; p: of the sampling policy, `fields["old_logprob"]`, or without it the update's own.
    """

    policy: PolicyLoss = field(default_factory=PolicyLoss)
    separable: ClassVar[bool] = True

    def __call__(self, stats: TokenStats, batch: PackedBatch, /) -> Loss:
        sampled = batch.fields.get("old_logprob", stats.logprob.detach())
        advantage = batch.fields["teacher_logprob"] - sampled
        total, count, metrics = self.policy(stats, batch.with_fields(advantage=advantage))
        return Loss(total, count, {**metrics, "sampled_reverse_kl": _metric(-advantage)})


def _metric(x: Tensor) -> Sum:
    return Sum(x.detach().sum(), torch.full((), float(x.numel()), dtype=torch.float64, device=x.device))

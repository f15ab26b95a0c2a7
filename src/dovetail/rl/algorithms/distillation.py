"""Distillation: on given rows or on-policy (GKD: Agarwal et al. 2024)."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch
from torch import Tensor

from dovetail.batch.loss import Loss, LossFn, Sum, TokenStats
from dovetail.batch.packed import PackedBatch
from dovetail.errors import ConfigError
from dovetail.kernels.divergence import Divergence, Kind
from dovetail.kernels.reference import widened
from dovetail.nn.distillation import DistillStats, TeacherStates, TopK, distilled_loss
from dovetail.nn.heads import VocabShard
from dovetail.rl.algorithms.fields import BatchFields
from dovetail.rl.custom import Custom
from dovetail.rl.losses import PolicyLoss, aggregate

if TYPE_CHECKING:
    from dovetail.recipe.distillation import DistillationSection
    from dovetail.recipe.schema import Recipe


@dataclass(frozen=True, kw_only=True)
class DistillationLoss:
    """The divergence of teacher q and student p at each counted token, as TRL's GKDTrainer (Agarwal et al. 2024, eq. 1):

        forward_kl  KL(q, p)
        reverse_kl  KL(p, q)
        jsd         beta KL(q, m) + (1 - beta) KL(p, m), m = beta q + (1 - beta) p; beta 0 is forward_kl, 1 reverse_kl
    top_k: over the teacher's k likeliest tokens, 0 or more than there are for all. tail: the others are one token,
    else p and q are renormalized.
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
        if not isinstance(
            stats, DistillStats
        ):  # asked for the count alone (`engine/expert_routing.py`)
            stats = DistillStats(*stats, *[torch.zeros_like(stats.logprob)] * 3)
        metrics = {
            "divergence": stats.divergence,
            "sampled_reverse_kl": stats.logprob - stats.teacher_logprob,
            "entropy_mean": stats.entropy,
            "teacher_entropy_mean": stats.teacher_entropy,
        }
        sums = {name: Sum.of(x) for name, x in metrics.items()}
        return Loss(*aggregate(widened(stats.divergence), batch), sums)

    def in_head(self, x: Tensor, shard: VocabShard, batch: PackedBatch, loss: LossFn) -> Loss:
        k = min(self.top_k, self.teacher.vocab_size)
        top = TopK(k, self.tail) if k else None
        return distilled_loss(
            x, shard, batch, loss, teacher=self.teacher, divergence=self.measure, top_k=top
        )


@dataclass(frozen=True)
class SampledReverseKL:
    """On-policy distillation: a policy gradient with the advantage `teacher_logprob` - `old_logprob` (default: the update's)."""

    policy: PolicyLoss = field(default_factory=PolicyLoss)
    separable: ClassVar[bool] = True

    def __call__(self, stats: TokenStats, batch: PackedBatch, /) -> Loss:
        sampled = batch.fields.get("old_logprob", stats.logprob.detach())
        advantage = batch.fields["teacher_logprob"] - sampled
        total, count, metrics = self.policy(stats, batch.with_fields(advantage=advantage))
        return Loss(total, count, {**metrics, "sampled_reverse_kl": Sum.of(-advantage)})


@dataclass(frozen=True)
class Distillation:
    """Learns from a teacher's whole distributions, or from its log-probs of sampled tokens."""

    section: "DistillationSection"
    fields: BatchFields

    @classmethod
    def make(cls, recipe: "Recipe", _: Custom) -> Self:
        section = cast("DistillationSection", recipe.algorithm)
        scored = section.is_sampled and section.updates > 1
        return cls(section, BatchFields(old_logprob="policy" if scored else None))

    def divergence_loss(self, teacher: TeacherStates) -> DistillationLoss:
        section = self.section
        return DistillationLoss(
            teacher=teacher,
            divergence=cast("Kind", section.divergence),
            beta=section.beta,
            top_k=section.loss_top_k,
            tail=section.loss_add_tail,
        )

    def sampled_loss(self) -> SampledReverseKL:
        return SampledReverseKL()

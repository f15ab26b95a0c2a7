"""PPO with a critic: Schulman et al. 2017; advantages: Schulman et al. 2016."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from dovetail.batch.loss import Loss, LossFn, Sum
from dovetail.batch.packed import PackedBatch
from dovetail.kernels.reference import widened
from dovetail.rl.advantages import gae
from dovetail.rl.algorithms.policy_gradient import Rewards, RLAlgorithm
from dovetail.rl.losses import aggregate

if TYPE_CHECKING:
    from dovetail.recipe.algorithms import PPOSection


@dataclass(frozen=True, kw_only=True)
class PPO(RLAlgorithm):
    """A by generalized advantage estimation; the critic learns R = A + V."""

    section: "PPOSection"

    @property
    def value_loss(self) -> LossFn:
        return ValueLoss(self.section.value_clip, self.section.value_coef)

    def advantages(self, rewards: Rewards, batch: PackedBatch) -> dict[str, Tensor]:
        advantage, returns = gae(
            rewards.token,
            batch.fields["old_value"],
            batch.mask,
            batch.sequence_ids,
            gamma=self.section.gamma,
            lam=self.section.lam,
        )
        return {"advantage": advantage, "return": returns}


@dataclass(frozen=True)
class ValueLoss:
    """coef max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2) / 2, as in OpenAI baselines' PPO2.

    R: `fields["return"]`. v_old: `fields["old_value"]`. clip None: no clipping.
    """

    clip: float | None = 0.2
    coef: float = 1.0
    separable: ClassVar[bool] = True

    def __call__(self, values: Tensor, batch: PackedBatch, /) -> Loss:
        values = widened(values)
        target = batch.fields["return"]
        loss = (values - target) ** 2
        metrics = {
            "value_error": Sum.of(loss),
            "value_mean": Sum.of(values),
            "return_mean": Sum.of(target),
        }
        if self.clip is not None:
            old = batch.fields["old_value"]
            moved = values - old
            # `old + moved` of small moves would count as clipped by its rounding
            near = torch.where(
                moved.abs() > self.clip, old + moved.clamp(-self.clip, self.clip), values
            )
            clipped = (near - target) ** 2
            metrics["value_clip_fraction"] = Sum.of(clipped > loss)
            loss = torch.maximum(loss, clipped)
        return Loss(*aggregate(loss * (self.coef / 2), batch), metrics)

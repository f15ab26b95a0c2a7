"""What RL algorithms share: rewards of tokens and responses, and the policy-gradient loss."""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self, cast

import torch
from torch import Tensor

from dovetail.batch.loss import LossFn
from dovetail.batch.packed import PackedBatch
from dovetail.kernels.reference import sum_rows
from dovetail.rl.advantages import terminal_rewards, whiten
from dovetail.rl.algorithms.fields import BatchFields, rl_fields
from dovetail.rl.custom import Custom, CustomAdvantage, custom_advantages
from dovetail.rl.losses import PolicyLoss, kl_estimate
from dovetail.rl.samples import Sample

if TYPE_CHECKING:
    from dovetail.recipe.algorithms import PolicyGradientSection
    from dovetail.recipe.schema import Recipe


class Rewards(NamedTuple):
    """Rewards of a step.

    token: [T], less the KL penalty if it is part of the reward. response: [S], their sums.
    groups: [S], equal for responses to the same prompt.
    """

    token: Tensor
    response: Tensor
    groups: Tensor


@dataclass(frozen=True, kw_only=True)
class RLAlgorithm(ABC):
    """An RL algorithm: what its batches hold, its advantages and its losses."""

    section: "PolicyGradientSection"
    fields: BatchFields
    loss: LossFn
    custom_advantage: CustomAdvantage | None = None

    @classmethod
    def make(cls, recipe: "Recipe", custom: Custom) -> Self:
        section = cast("PolicyGradientSection", recipe.algorithm)
        fields = rl_fields(section, recipe)
        return cls(
            section=section,
            fields=fields,
            loss=cls.make_loss(recipe, fields, custom),
            custom_advantage=custom.advantage,
        )

    @classmethod
    def make_loss(cls, recipe: "Recipe", fields: BatchFields, custom: Custom) -> LossFn:
        return policy_loss(recipe, fields, custom)

    @property
    def value_loss(self) -> LossFn | None:
        """The critic's loss."""
        return None

    @abstractmethod
    def advantages(self, rewards: Rewards, batch: PackedBatch) -> dict[str, Tensor]:
        """Returns the field `advantage` [T], and others that the losses read."""

    def with_advantages(self, batch: PackedBatch, samples: Seq[Sample]) -> PackedBatch:
        """Adds the advantages of `samples`, whitened if the recipe says so."""
        rewards = self.rewards(batch, samples)
        if self.custom_advantage is None:
            found = self.advantages(rewards, batch)
        else:
            given = (rewards.response, rewards.groups, batch)
            found = {"advantage": custom_advantages(self.custom_advantage, *given)}
        if self.section.normalize_advantage:
            found["advantage"] = whiten(found["advantage"], batch.mask)
        return batch.with_fields(**{name: x.to(torch.float32) for name, x in found.items()})

    def rewards(self, batch: PackedBatch, samples: Seq[Sample]) -> Rewards:
        section = self.section
        scores = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
        token = terminal_rewards(scores, batch.mask, batch.sequence_ids)
        if section.kl_in == "reward" and section.kl_coef:
            old = batch.fields["old_logprob"]
            kl = kl_estimate(old, batch.fields["reference_logprob"], section.kl_estimator)
            token = token - section.kl_coef * torch.where(batch.mask, kl, 0.0)
        response = sum_rows(token, batch.sequence_ids, batch.num_sequences)
        groups = torch.tensor([sample.group for sample in samples])
        return Rewards(token, response, groups)


def policy_loss(recipe: "Recipe", fields: BatchFields, custom: Custom) -> PolicyLoss:
    """Returns the loss of a recipe, with its importance weights if the update computes them."""
    section = cast("PolicyGradientSection", recipe.algorithm)
    keys = section.values_for(PolicyLoss)
    if section.kl_in == "reward":
        keys["kl_coef"] = 0.0
    correction = recipe.correction
    if correction is not None and fields.importance == "loss":
        keys["sampler_bounds"] = correction.bounds
        keys["outside"] = correction.outside
    if custom.loss is not None:
        return PolicyLoss(**keys, custom=custom.loss)
    return PolicyLoss(**keys, term=section.loss.name or "ppo", **section.loss.options)


def to_tokens(x: Tensor, batch: PackedBatch) -> Tensor:
    """Returns x [S] of each response at its tokens [T], and 0 elsewhere."""
    return torch.where(batch.mask, x[batch.sequence_ids], 0.0)

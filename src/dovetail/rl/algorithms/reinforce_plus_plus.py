"""REINFORCE++: Hu et al. 2025, eqs. 6 to 9."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dovetail.batch.packed import PackedBatch
from dovetail.rl.advantages import gae, group_relative
from dovetail.rl.algorithms.policy_gradient import Rewards, RLAlgorithm, to_tokens

if TYPE_CHECKING:
    from dovetail.recipe.algorithms import ReinforcePlusPlusSection


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus(RLAlgorithm):
    """A = rewards to go, discounted, with each token's KL penalty; with a baseline r - mean of the group.

    Both are whitened over the tokens of a step.
    """

    section: "ReinforcePlusPlusSection"

    def advantages(self, rewards: Rewards, batch: PackedBatch) -> dict[str, Tensor]:
        if self.section.group_baseline:
            relative = group_relative(rewards.response, rewards.groups, divide_by_std=False)
            return {"advantage": to_tokens(relative, batch)}
        no_values = torch.zeros_like(rewards.token)
        rewards_to_go, _ = gae(
            rewards.token, no_values, batch.mask, batch.sequence_ids, gamma=self.section.gamma
        )
        return {"advantage": rewards_to_go}

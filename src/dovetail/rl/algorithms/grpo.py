"""GRPO, group-relative policy optimization: Shao et al. 2024, section 4.1.2."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from dovetail.batch.packed import PackedBatch
from dovetail.rl.advantages import group_relative
from dovetail.rl.algorithms.policy_gradient import Rewards, RLAlgorithm, to_tokens

if TYPE_CHECKING:
    from dovetail.recipe.algorithms import GRPOSection


@dataclass(frozen=True, kw_only=True)
class GRPO(RLAlgorithm):
    """A = (r - mean of the group) / std of the group; Dr. GRPO (Liu et al. 2025): r - mean."""

    section: "GRPOSection"

    def advantages(self, rewards: Rewards, batch: PackedBatch) -> dict[str, Tensor]:
        relative = group_relative(
            rewards.response, rewards.groups, divide_by_std=self.section.scale_by_std
        )
        return {"advantage": to_tokens(relative, batch)}

"""RLOO, REINFORCE leave-one-out: Ahmadian et al. 2024, section 4."""

from dataclasses import dataclass

from torch import Tensor

from dovetail.batch.packed import PackedBatch
from dovetail.rl.advantages import leave_one_out
from dovetail.rl.algorithms.policy_gradient import Rewards, RLAlgorithm, to_tokens


@dataclass(frozen=True, kw_only=True)
class RLOO(RLAlgorithm):
    """A = r - mean of the group's other rewards."""

    def advantages(self, rewards: Rewards, batch: PackedBatch) -> dict[str, Tensor]:
        relative = leave_one_out(rewards.response, rewards.groups)
        return {"advantage": to_tokens(relative, batch)}

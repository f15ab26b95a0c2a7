"""Algorithms by their names in a recipe."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dovetail.rl.algorithms.cpo import CPO, SimPO
from dovetail.rl.algorithms.distillation import Distillation
from dovetail.rl.algorithms.dpo import DPO
from dovetail.rl.algorithms.grpo import GRPO
from dovetail.rl.algorithms.kto import KTO
from dovetail.rl.algorithms.orpo import ORPO
from dovetail.rl.algorithms.policy_gradient import RLAlgorithm
from dovetail.rl.algorithms.ppo import PPO
from dovetail.rl.algorithms.preference import PreferenceAlgorithm
from dovetail.rl.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from dovetail.rl.algorithms.reward_model import RewardTraining
from dovetail.rl.algorithms.rloo import RLOO
from dovetail.rl.algorithms.sft import SFT
from dovetail.rl.custom import Custom

if TYPE_CHECKING:
    from dovetail.recipe.schema import Recipe

AnyAlgorithm = SFT | RLAlgorithm | PreferenceAlgorithm | Distillation

ALGORITHMS: Mapping[str, type[AnyAlgorithm]] = {
    "sft": SFT,
    "grpo": GRPO,
    "ppo": PPO,
    "rloo": RLOO,
    "reinforce_plus_plus": ReinforcePlusPlus,
    "dpo": DPO,
    "kto": KTO,
    "cpo": CPO,
    "simpo": SimPO,
    "orpo": ORPO,
    "reward": RewardTraining,
    "distillation": Distillation,
}


def make_algorithm(recipe: "Recipe", custom: Custom) -> AnyAlgorithm:
    """Returns the algorithm of a recipe, with the user's functions in place of its own."""
    return ALGORITHMS[recipe.algorithm.name].make(recipe, custom)

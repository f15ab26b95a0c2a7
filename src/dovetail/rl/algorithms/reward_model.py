"""A reward model by Bradley-Terry: Ouyang et al. 2022, eq. 1."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.batch.loss import Loss, LossFn
from dovetail.batch.packed import PackedBatch
from dovetail.data.examples import Preference
from dovetail.engine.native import Engine
from dovetail.kernels.reference import widened
from dovetail.rl.algorithms.pairs import Pairs, reward_metrics
from dovetail.rl.algorithms.preference import PreferenceAlgorithm

if TYPE_CHECKING:
    from dovetail.recipe.preferences import PreferenceSection, RewardTrainingSection


@dataclass(frozen=True, kw_only=True)
class RewardLoss:
    """Bradley-Terry: -log s(v_w - v_l) + center (v_w + v_l)^2, of the value v at the `last_tokens`.

    Ouyang et al. 2022, eq. 1; centering: Eisenstein et al. 2023, eq. 2.
    """

    center: float = 0.0
    separable: ClassVar[bool] = False

    def __call__(self, values: Tensor, batch: PackedBatch, /) -> Loss:
        pairs = Pairs(batch)
        chosen, rejected = pairs.sums(widened(values))
        losses = -F.logsigmoid(chosen - rejected) + self.center * (chosen + rejected) ** 2
        return Loss(losses.sum(), pairs.count, reward_metrics(chosen, rejected))


def last_tokens(batch: PackedBatch) -> Tensor:
    """A mask [T] of the last token of each sequence."""
    ends = torch.zeros(len(batch), dtype=torch.bool, device=batch.tokens.device)
    ends[batch.cu_seqlens[1:].long() - 1] = True
    return ends


@dataclass(frozen=True, kw_only=True)
class RewardTraining(PreferenceAlgorithm):
    """Trains the value at the last token of each sequence."""

    @classmethod
    def make_loss(cls, section: "PreferenceSection") -> LossFn:
        keys = cast("RewardTrainingSection", section)
        return RewardLoss(center=keys.center_rewards_coefficient)

    def pack(self, rows: Seq[Preference]) -> PackedBatch:
        batch = super().pack(rows)
        return batch.with_mask(last_tokens(batch))

    def stats(self, batch: PackedBatch, policy: Engine) -> Tensor:
        return policy.values(batch)[batch.mask]

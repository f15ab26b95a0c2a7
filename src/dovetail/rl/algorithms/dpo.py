"""DPO, direct preference optimization: Rafailov et al. 2023."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

from dovetail.batch.loss import Loss, LossFn, TokenStats
from dovetail.batch.packed import PackedBatch
from dovetail.kernels.reference import widened
from dovetail.rl.algorithms.pairs import (
    Margin,
    Pairs,
    check_smoothing,
    margin_losses,
    mean_over,
    reference_of,
    reward_metrics,
)
from dovetail.rl.algorithms.preference import PreferenceAlgorithm

if TYPE_CHECKING:
    from dovetail.recipe.preferences import DPOSection, PreferenceSection


@dataclass(frozen=True, kw_only=True)
class DPOLoss:
    """Direct preference optimization, with m = beta (r_w - r_l) and label smoothing e.

    sigmoid  -(1 - e) log s(m) - e log s(-m): Rafailov et al. 2023, eq. 7; e > 0: cDPO (Mitchell 2023)
    robust   (-(1 - e) log s(m) + e log s(-m)) / (1 - 2 e): Chowdhury et al. 2024, section 3
    hinge    max(0, 1 - m): SLiC (Zhao et al. 2023, eq. 1) with DPO's rewards, Liu et al. 2024, table 1
    ipo      (r_w / |w| - r_l / |l| - 1 / (2 beta))^2: Azar et al. 2023, eq. 17, by token as its authors and TRL
    """

    kind: Margin = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    separable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_smoothing(self.kind, self.label_smoothing)

    def __call__(self, stats: TokenStats, batch: PackedBatch, /) -> Loss:
        logprob = widened(stats.logprob)
        pairs = Pairs(batch)
        ratio = logprob - reference_of(batch)
        chosen, rejected = pairs.means(ratio) if self.kind == "ipo" else pairs.sums(ratio)
        losses = margin_losses(self.kind, chosen - rejected, self.beta, self.label_smoothing)
        chosen, rejected = pairs.sums(ratio)
        metrics = reward_metrics(
            self.beta * chosen, self.beta * rejected, logps=pairs.sums(logprob)
        )
        return Loss(
            losses.sum(),
            pairs.count,
            {**metrics, "entropy_mean": mean_over(stats.entropy, pairs.response)},
        )


@dataclass(frozen=True, kw_only=True)
class DPO(PreferenceAlgorithm):
    section: "DPOSection"

    @classmethod
    def make_loss(cls, section: "PreferenceSection") -> LossFn:
        keys = cast("DPOSection", section)
        return DPOLoss(kind=keys.loss, **keys.values_for(DPOLoss))

    @property
    def scores_reference_once(self) -> bool:
        return self.section.precompute_ref_log_probs

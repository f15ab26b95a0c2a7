"""CPO, contrastive preference optimization, and SimPO: pairs without a reference."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, cast

from dovetail.batch.loss import Loss, LossFn, TokenStats
from dovetail.batch.packed import PackedBatch
from dovetail.engine.native import Engine
from dovetail.kernels.reference import widened
from dovetail.rl.algorithms.pairs import (
    Margin,
    Pairs,
    check_smoothing,
    chosen_nll,
    margin_losses,
    mean_over,
    nll_fields,
    reward_metrics,
)
from dovetail.rl.algorithms.preference import PreferenceAlgorithm

if TYPE_CHECKING:
    from dovetail.recipe.preferences import CPOSection, PreferenceSection, SimPOSection


@dataclass(frozen=True, kw_only=True)
class CPOLoss:
    """As DPO with log p for r, plus the negative log-likelihood by `nll_fields`.

    sigmoid  contrastive preference optimization: Xu et al. 2024, eq. 3
    simpo    -log s(beta log p(w) / |w| - beta log p(l) / |l| - gamma): Meng et al. 2024, eq. 6
    """

    kind: Literal["sigmoid", "hinge", "ipo", "simpo"] = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = 0.5
    separable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_smoothing(self.kind, self.label_smoothing)

    def __call__(self, stats: TokenStats, batch: PackedBatch, /) -> Loss:
        logprob = widened(stats.logprob)
        pairs = Pairs(batch)
        per_token = self.kind in ("ipo", "simpo")
        chosen, rejected = pairs.means(logprob) if per_token else pairs.sums(logprob)
        margin = chosen - rejected
        kind: Margin = "sigmoid"
        if self.kind == "simpo":
            margin = margin - self.gamma / self.beta
        else:
            kind = self.kind
        losses = margin_losses(kind, margin, self.beta, self.label_smoothing)
        metrics = reward_metrics(self.beta * chosen, self.beta * rejected, logps=(chosen, rejected))
        nll, nll_metrics = chosen_nll(logprob, batch)
        metrics |= {**nll_metrics, "entropy_mean": mean_over(stats.entropy, pairs.response)}
        return Loss(losses.sum() + nll, pairs.count, metrics)


@dataclass(frozen=True, kw_only=True)
class CPO(PreferenceAlgorithm):
    section: "CPOSection | SimPOSection"

    @classmethod
    def make_loss(cls, section: "PreferenceSection") -> LossFn:
        keys = cast("CPOSection", section)
        return CPOLoss(kind=keys.loss, **keys.values_for(CPOLoss))

    def complete(
        self, batch: PackedBatch, policy: Engine, reference: Engine | None, max_tokens: int
    ) -> PackedBatch:
        if not self.section.cpo_alpha:
            return batch
        return batch.with_fields(**nll_fields(batch, self.section.cpo_alpha))


@dataclass(frozen=True, kw_only=True)
class SimPO(CPO):
    @classmethod
    def make_loss(cls, section: "PreferenceSection") -> LossFn:
        keys = cast("SimPOSection", section)
        return CPOLoss(kind="simpo", gamma=keys.simpo_gamma, **keys.values_for(CPOLoss))

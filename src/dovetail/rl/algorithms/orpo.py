"""ORPO, odds-ratio preference optimization: Hong et al. 2024."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.batch.loss import Loss, LossFn, Sum, TokenStats
from dovetail.batch.packed import PackedBatch, Sequence
from dovetail.engine.native import Engine
from dovetail.kernels.reference import widened
from dovetail.rl.algorithms.pairs import Pairs, chosen_nll, mean_over, nll_fields, reward_metrics
from dovetail.rl.algorithms.preference import PreferenceAlgorithm

if TYPE_CHECKING:
    from dovetail.recipe.preferences import PreferenceSection


@dataclass(frozen=True, kw_only=True)
class ORPOLoss:
    """nll(w) - beta log s(log odds(w) - log odds(l)), odds = p / (1 - p), log p a mean over tokens: Hong et al. 2024."""

    beta: float = 0.1
    separable: ClassVar[bool] = False

    def __call__(self, stats: TokenStats, batch: PackedBatch, /) -> Loss:
        logprob = widened(stats.logprob)
        pairs = Pairs(batch)
        chosen, rejected = pairs.means(logprob)
        log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
        nll, nll_metrics = chosen_nll(logprob, batch)
        metrics = {
            **reward_metrics(self.beta * chosen, self.beta * rejected, logps=(chosen, rejected)),
            "log_odds_ratio": Sum.of(F.logsigmoid(log_odds)),
            "log_odds_chosen": Sum.of(log_odds),
            **nll_metrics,
            "entropy_mean": mean_over(stats.entropy, pairs.response),
        }
        return Loss(nll - self.beta * F.logsigmoid(log_odds).sum(), pairs.count, metrics)


def _log1mexp(x: Tensor) -> Tensor:
    """Returns log(1 - e^x) of x <= 0 (Maechler 2012).

    At 0 it is the value of the smallest number, with the gradient 0: no completion is certain.
    """
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    far = x.clamp(max=-math.log(2))  # where the other branch is taken, its gradient is 0, not NaN
    return torch.where(x < -math.log(2), torch.log1p(-far.exp()), torch.log(-torch.expm1(x)))


@dataclass(frozen=True, kw_only=True)
class ORPO(PreferenceAlgorithm):
    """Trains the prompts of chosen rows, too; the field `completion` says what its odds are of."""

    @classmethod
    def make_loss(cls, section: "PreferenceSection") -> LossFn:
        return ORPOLoss(**section.values_for(ORPOLoss))

    def sequence(self, given: Sequence, pair: int, *, is_chosen: bool) -> Sequence:
        assert given.mask is not None
        completion = [float(kept) for kept in given.mask]
        mask = [True] * len(given.ids) if is_chosen else given.mask
        fields = {**given.fields, "completion": completion}
        return replace(given, group=pair, mask=mask, fields=fields)

    def complete(
        self, batch: PackedBatch, policy: Engine, reference: Engine | None, max_tokens: int
    ) -> PackedBatch:
        return batch.with_fields(**nll_fields(batch, 1.0))

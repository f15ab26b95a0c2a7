"""Supervised fine-tuning."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, cast

from dovetail.batch.loss import Loss, Sum, TokenStats
from dovetail.batch.packed import PackedBatch
from dovetail.kernels.reference import widened
from dovetail.nn.heads import is_separable
from dovetail.rl.custom import Custom, CustomLoss, custom_losses
from dovetail.rl.losses import aggregate

if TYPE_CHECKING:
    from dovetail.recipe.algorithms import SFTSection
    from dovetail.recipe.schema import Recipe


@dataclass(frozen=True)
class SFTLoss:
    """The negative log-likelihood -log p of each counted token, or the losses of a user's function."""

    custom: CustomLoss | None = None

    @property
    def separable(self) -> bool:
        return self.custom is None or is_separable(self.custom)

    def __call__(self, stats: TokenStats, batch: PackedBatch, /) -> Loss:
        if self.custom is None:
            loss = -widened(stats.logprob)
            metrics = dict[str, Sum]()
        else:
            loss, metrics = custom_losses(self.custom, stats, batch)
        return Loss(*aggregate(loss, batch), {**metrics, "entropy_mean": Sum.of(stats.entropy)})


@dataclass(frozen=True)
class SFT:
    section: "SFTSection"
    loss: SFTLoss

    @classmethod
    def make(cls, recipe: "Recipe", custom: Custom) -> Self:
        return cls(cast("SFTSection", recipe.algorithm), SFTLoss(custom.loss))

"""KTO, Kahneman-Tversky optimization: Ethayarajh et al. 2024."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from dovetail.batch.loss import Loss, LossFn, Sum, TokenStats
from dovetail.batch.packed import PackedBatch, Sequence
from dovetail.engine.native import Engine
from dovetail.kernels.reference import count_rows, sum_rows, widened
from dovetail.rl.algorithms.pairs import mean_over, reference_of
from dovetail.rl.algorithms.preference import PreferenceAlgorithm

if TYPE_CHECKING:
    from dovetail.recipe.preferences import PreferenceSection


@dataclass(frozen=True, kw_only=True)
class KTOLoss:
    """w (1 - s(beta (r - z))) of a desirable completion, w (1 - s(beta (z - r))) of another: Ethayarajh et al. 2024, eq. 7.

    Fields: `label`, 1 or 0; `kl`, z: the mean of r over mismatched prompts and completions, at least 0.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    separable: ClassVar[bool] = False

    def __call__(self, stats: TokenStats, batch: PackedBatch, /) -> Loss:
        logprob = widened(stats.logprob)
        owner = batch.sequence_ids
        kl = batch.fields["kl"]
        sizes = count_rows(owner, batch.num_sequences)
        there = (sizes > 0).to(logprob.dtype)  # not of padding

        def mean(x: Tensor) -> Tensor:
            return sum_rows(x, owner, len(sizes)) / sizes.clamp(min=1)

        good = mean(batch.fields["label"])
        logps = sum_rows(logprob, owner, len(sizes))
        bad = there - good
        ratio = logps - sum_rows(reference_of(batch), owner, len(sizes))
        sign = good - bad
        weight = self.desirable_weight * good + self.undesirable_weight * bad
        losses = weight * (1 - torch.sigmoid(self.beta * sign * (ratio - mean(kl))))
        rewards = self.beta * ratio
        metrics = {
            "rewards/chosen": mean_over(rewards, good),
            "rewards/rejected": mean_over(rewards, bad),
            "logps/chosen": mean_over(logps, good),
            "logps/rejected": mean_over(logps, bad),
            "kl": mean_over(mean(kl), there),
            "entropy_mean": Sum.of(stats.entropy),
        }
        return Loss(losses.sum(), there.sum(), metrics)


def mismatched(batch: PackedBatch, longest: int) -> PackedBatch:
    """Each prompt with the previous sequence's completion, of at most `longest` tokens."""
    tokens, masks = (
        [x.tolist() for x in column.split(batch.lengths)] for column in (batch.tokens, batch.mask)
    )
    starts = [mask.index(True) + 1 for mask in masks]
    rows = []
    for i, (ids, start) in enumerate(zip(tokens, starts, strict=True)):
        wrong = (ids[:start] + tokens[i - 1][starts[i - 1] :])[:longest]
        mask = [False] * start + [True] * (len(wrong) - start)
        rows.append(Sequence(wrong, mask, media=batch.media[i] if batch.media else None))
    return PackedBatch.pack(rows)


@dataclass(frozen=True, kw_only=True)
class KTO(PreferenceAlgorithm):
    """Takes completions one by one, with the field `label`."""

    @classmethod
    def make_loss(cls, section: "PreferenceSection") -> LossFn:
        return KTOLoss(**section.values_for(KTOLoss))

    def sequence(self, given: Sequence, pair: int, *, is_chosen: bool) -> Sequence:
        return replace(given, fields={**given.fields, "label": float(is_chosen)})

    def complete(
        self, batch: PackedBatch, policy: Engine, reference: Engine | None, max_tokens: int
    ) -> PackedBatch:
        """Adds z, the mean of r over mismatched prompts and completions."""
        if reference is None:
            return batch
        wrong = mismatched(batch, max_tokens)
        ratio = policy.score(wrong).logprob - reference.score(wrong).logprob
        kl = max(0.0, float(ratio[wrong.mask].sum()) / batch.num_sequences)
        return batch.with_fields(kl=torch.full((len(batch),), kl, dtype=ratio.dtype))

"""Losses of preferences, means over pairs; names, keys and defaults are TRL's.

A pair is a group of two sequences, first the chosen one (w), then the rejected one (l). log p(y): the sum over counted tokens,
|y| their number; r = log p - log p_ref by `fields["reference_logprob"]`; s: the sigmoid.
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.batch.loss import Loss, Sum, TokenStats
from dovetail.batch.packed import PackedBatch, to_device
from dovetail.errors import ConfigError, DataError
from dovetail.kernels.reference import count_rows, sum_rows, widened

Margin = Literal["sigmoid", "hinge", "ipo", "robust"]


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
        _check_smoothing(self.kind, self.label_smoothing)

    def __call__(self, stats: TokenStats, batch: PackedBatch, /) -> Loss:
        logprob = widened(stats.logprob)
        pairs = _Pairs(batch)
        ratio = logprob - reference_of(batch)
        own = pairs.means if self.kind == "ipo" else pairs.sums
        chosen, rejected = own(ratio)
        losses = margin_losses(self.kind, chosen - rejected, self.beta, self.label_smoothing)
        chosen, rejected = pairs.sums(ratio)
        metrics = reward_metrics(
            self.beta * chosen, self.beta * rejected, logps=pairs.sums(logprob)
        )
        return Loss(
            losses.sum(),
            pairs.count,
            {**metrics, "entropy_mean": _mean_over(stats.entropy, pairs.response)},
        )


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
        _check_smoothing(self.kind, self.label_smoothing)

    def __call__(self, stats: TokenStats, batch: PackedBatch, /) -> Loss:
        logprob = widened(stats.logprob)
        pairs = _Pairs(batch)
        chosen, rejected = (pairs.means if self.kind in ("ipo", "simpo") else pairs.sums)(logprob)
        kind: Margin = "sigmoid" if self.kind == "simpo" else self.kind
        margin = chosen - rejected - (self.gamma / self.beta if self.kind == "simpo" else 0.0)
        losses = margin_losses(kind, margin, self.beta, self.label_smoothing)
        metrics = reward_metrics(self.beta * chosen, self.beta * rejected, logps=(chosen, rejected))
        nll, nll_metrics = _nll(logprob, batch)
        metrics |= {**nll_metrics, "entropy_mean": _mean_over(stats.entropy, pairs.response)}
        return Loss(losses.sum() + nll, pairs.count, metrics)


@dataclass(frozen=True, kw_only=True)
class ORPOLoss:
    """nll(w) - beta log s(log odds(w) - log odds(l)), odds = p / (1 - p), log p a mean over tokens: Hong et al. 2024."""

    beta: float = 0.1
    separable: ClassVar[bool] = False

    def __call__(self, stats: TokenStats, batch: PackedBatch, /) -> Loss:
        logprob = widened(stats.logprob)
        pairs = _Pairs(batch)
        chosen, rejected = pairs.means(logprob)
        log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
        nll, nll_metrics = _nll(logprob, batch)
        metrics = {
            **reward_metrics(self.beta * chosen, self.beta * rejected, logps=(chosen, rejected)),
            "log_odds_ratio": Sum.of(F.logsigmoid(log_odds)),
            "log_odds_chosen": Sum.of(log_odds),
            **nll_metrics,
            "entropy_mean": _mean_over(stats.entropy, pairs.response),
        }
        return Loss(nll - self.beta * F.logsigmoid(log_odds).sum(), pairs.count, metrics)


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
            "rewards/chosen": _mean_over(rewards, good),
            "rewards/rejected": _mean_over(rewards, bad),
            "logps/chosen": _mean_over(logps, good),
            "logps/rejected": _mean_over(logps, bad),
            "kl": _mean_over(mean(kl), there),
            "entropy_mean": Sum.of(stats.entropy),
        }
        return Loss(losses.sum(), there.sum(), metrics)


@dataclass(frozen=True, kw_only=True)
class RewardLoss:
    """Bradley-Terry: -log s(v_w - v_l) + center (v_w + v_l)^2, of the value v at the `last_tokens`.

    Ouyang et al. 2022, eq. 1; centering: Eisenstein et al. 2023, eq. 2.
    """

    center: float = 0.0
    separable: ClassVar[bool] = False

    def __call__(self, values: Tensor, batch: PackedBatch, /) -> Loss:
        pairs = _Pairs(batch)
        chosen, rejected = pairs.sums(widened(values))
        losses = -F.logsigmoid(chosen - rejected) + self.center * (chosen + rejected) ** 2
        return Loss(losses.sum(), pairs.count, reward_metrics(chosen, rejected))


class _Pairs:
    """chosen, rejected: numbers of sequences [P]. response: 1 on completions [T]."""

    def __init__(self, batch: PackedBatch) -> None:
        numbers = torch.tensor(pair_numbers(batch.groups), dtype=torch.int64).view(-1, 2).T
        self.chosen, self.rejected = to_device(numbers, batch.tokens.device)
        self.response = batch.fields.get(
            "completion", torch.ones(len(batch), device=batch.tokens.device)
        )
        self.owner = batch.sequence_ids
        self.num_sequences = batch.num_sequences

    @property
    def count(self) -> Tensor:
        return torch.ones_like(self.chosen).sum()

    def sums(self, x: Tensor, sizes: Tensor | int = 1) -> tuple[Tensor, Tensor]:
        """Sums x [T] over completions, [P] of the chosen and of the rejected."""
        whole = sum_rows(x * self.response, self.owner, self.num_sequences) / sizes
        return whole[self.chosen], whole[self.rejected]

    def means(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.sums(
            x, sum_rows(self.response.to(x.dtype), self.owner, self.num_sequences).clamp(min=1)
        )


def pair_numbers(groups: Seq[int | None]) -> list[tuple[int, int]]:
    """The sequences of each pair."""
    members: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        if group is not None:
            members.setdefault(group, []).append(number)
    for group, numbers in members.items():
        if len(numbers) != 2:
            raise DataError(
                f"group {group} has {len(numbers)} sequences; a pair has two: "
                f"dt.Sequence(chosen, group={group}), then "
                f"dt.Sequence(rejected, group={group})"
            )
    return [(first, second) for first, second in members.values()]


def margin_losses(kind: Margin, difference: Tensor, beta: float, smoothing: float) -> Tensor:
    """[P], of the chosen less the rejected [P]; see `DPOLoss`."""
    if kind == "hinge":
        return torch.relu(1 - beta * difference)
    if kind == "ipo":
        return (difference - 1 / (2 * beta)) ** 2
    right = F.logsigmoid(beta * difference)
    wrong = F.logsigmoid(-beta * difference)
    if kind == "robust":
        return (-(1 - smoothing) * right + smoothing * wrong) / (1 - 2 * smoothing)
    return -(1 - smoothing) * right - smoothing * wrong


def nll_fields(batch: PackedBatch, coef: float) -> dict[str, Tensor]:
    """Field `nll_weight` [T]: coef x pairs / counted tokens of chosen sequences, on these; 0 elsewhere."""
    pairs = pair_numbers(batch.groups)
    chosen = torch.zeros(batch.num_sequences, dtype=torch.bool)
    chosen[[first for first, _ in pairs]] = True
    counted = batch.mask & chosen.to(batch.tokens.device)[batch.sequence_ids]
    share = coef * len(pairs) / max(int(counted.sum()), 1)
    dtype = max(
        (x.dtype for x in batch.fields.values()),
        default=torch.float32,
        key=lambda dtype: dtype.itemsize,
    )
    return {"nll_weight": counted.to(dtype) * share}


def last_tokens(batch: PackedBatch) -> Tensor:
    """A mask [T] of the last token of each sequence."""
    ends = torch.zeros(len(batch), dtype=torch.bool, device=batch.tokens.device)
    ends[batch.cu_seqlens[1:].long() - 1] = True
    return ends


def reward_metrics(
    chosen: Tensor, rejected: Tensor, logps: tuple[Tensor, Tensor] | None = None
) -> dict[str, Sum]:
    metrics = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": chosen > rejected,
        "rewards/margins": chosen - rejected,
    }
    if logps is not None:
        metrics |= {"logps/chosen": logps[0], "logps/rejected": logps[1]}
    return {name: Sum.of(x) for name, x in metrics.items()}


def reference_of(batch: PackedBatch) -> Tensor:
    if "reference_logprob" not in batch.fields:
        remedy = "batch.with_fields(reference_logprob=reference.score(batch).logprob)"
        raise ConfigError(f"the loss needs the field reference_logprob: {remedy}")
    return batch.fields["reference_logprob"]


def _check_smoothing(kind: str, smoothing: float) -> None:
    if kind in ("hinge", "ipo") and smoothing:
        raise ConfigError(
            f"label_smoothing={smoothing} has no meaning for the loss {kind}; leave it 0"
        )
    if not 0 <= smoothing < 0.5:
        raise ConfigError(
            f"label_smoothing={smoothing} is a share of wrong labels; expected 0 or more, below 0.5"
        )


def _nll(logprob: Tensor, batch: PackedBatch) -> tuple[Tensor, dict[str, Sum]]:
    if "nll_weight" not in batch.fields:
        return logprob.new_zeros(()), {}
    weight = batch.fields["nll_weight"]
    counted = (weight > 0).to(logprob.dtype)
    return -(weight * logprob).sum(), {
        "nll_loss": Sum(-(counted * logprob.detach()).sum(), counted.sum())
    }


def _log1mexp(x: Tensor) -> Tensor:
    """Returns log(1 - e^x) of x <= 0 (Maechler 2012).

    At 0 it is the value of the smallest number, with the gradient 0: no completion is certain.
    """
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    far = x.clamp(max=-math.log(2))  # where the other branch is taken, its gradient is 0, not NaN
    return torch.where(x < -math.log(2), torch.log1p(-far.exp()), torch.log(-torch.expm1(x)))


def _mean_over(x: Tensor, counted: Tensor) -> Sum:
    return Sum((widened(x.detach()) * counted).sum(), counted.sum())

"""What losses of preferences share; names, keys and defaults are TRL's.

A pair is a group of two sequences, first the chosen one (w), then the rejected one (l). log p(y):
the sum over counted tokens, |y| their number; r = log p - log p_ref by `fields["reference_logprob"]`;
s: the sigmoid. Losses are means over pairs.
"""

from collections.abc import Sequence as Seq
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.batch.loss import Sum
from dovetail.batch.packed import PackedBatch, to_device
from dovetail.errors import ConfigError, DataError
from dovetail.kernels.reference import sum_rows, widened

Margin = Literal["sigmoid", "hinge", "ipo", "robust"]


class Pairs:
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
        """Of x [T] over completions, [P] of the chosen and of the rejected."""
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


def check_smoothing(kind: str, smoothing: float) -> None:
    if kind in ("hinge", "ipo") and smoothing:
        raise ConfigError(
            f"label_smoothing={smoothing} has no meaning for the loss {kind}; leave it 0"
        )
    if not 0 <= smoothing < 0.5:
        raise ConfigError(
            f"label_smoothing={smoothing} is a share of wrong labels; expected 0 or more, below 0.5"
        )


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


def chosen_nll(logprob: Tensor, batch: PackedBatch) -> tuple[Tensor, dict[str, Sum]]:
    if "nll_weight" not in batch.fields:
        return logprob.new_zeros(()), {}
    weight = batch.fields["nll_weight"]
    counted = (weight > 0).to(logprob.dtype)
    return -(weight * logprob).sum(), {
        "nll_loss": Sum(-(counted * logprob.detach()).sum(), counted.sum())
    }


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


def mean_over(x: Tensor, counted: Tensor) -> Sum:
    return Sum((widened(x.detach()) * counted).sum(), counted.sum())

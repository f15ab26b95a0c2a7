"""Losses and advantages of users: what they are given and what they return."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dovetail.batch.loss import Sum, TokenStats
from dovetail.batch.packed import PackedBatch
from dovetail.batch.packing import kind_of
from dovetail.errors import ConfigError
from dovetail.kernels.reference import widened

# Returns token losses [T], or a pair of these and metrics by name, each [T].
CustomLoss = Callable[[TokenStats, PackedBatch], Any]
# Takes rewards [S], groups [S] and the batch; returns advantages [S] or [T].
CustomAdvantage = Callable[[Tensor, Tensor, PackedBatch], Any]


@dataclass(frozen=True)
class Custom:
    """The functions that a recipe imports in place of an algorithm's own."""

    loss: CustomLoss | None = None
    advantage: CustomAdvantage | None = None


def custom_losses(
    function: CustomLoss, stats: TokenStats, batch: PackedBatch
) -> tuple[Tensor, dict[str, Sum]]:
    """Returns losses [T] and metrics. Raises ConfigError for other shapes."""
    result = function(stats, batch)
    losses, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"metrics are {kind_of(metrics)}; expected a mapping of names to tensors")
    for name, value in {"the loss": losses, **metrics}.items():
        if not isinstance(value, Tensor) or value.shape != stats.logprob.shape:
            wanted = f"one number for each counted token, {list(stats.logprob.shape)}"
            raise ConfigError(f"{name} is {kind_of(value)}; expected {wanted}")
    return widened(losses), {name: Sum.of(value) for name, value in metrics.items()}


def custom_advantages(
    function: CustomAdvantage, rewards: Tensor, groups: Tensor, batch: PackedBatch
) -> Tensor:
    """Returns advantages [T], 0 outside responses. Raises ConfigError for other shapes."""
    result = function(rewards, groups, batch)
    if isinstance(result, Tensor) and result.shape == rewards.shape:
        result = result[batch.sequence_ids]
    if not isinstance(result, Tensor) or result.shape != batch.mask.shape:
        wanted = f"a number for each response, [{len(rewards)}], or token, [{len(batch)}]"
        raise ConfigError(f"the advantage is {kind_of(result)}; expected {wanted}")
    return torch.where(batch.mask, widened(result.detach()), 0.0)

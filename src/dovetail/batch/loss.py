"""The loss contract: statistics of tokens in, sums and a count out."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from dovetail.batch.packed import PackedBatch


class Sum(NamedTuple):
    """A quantity to be averaged: its sum over tokens or sequences, and how many there were."""

    total: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count, which nobody wants here


class Loss(NamedTuple):
    """What a loss returns: sums over this rank's tokens, never means. The engine divides once, by the global count."""

    total: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count, which nobody wants here
    metrics: Mapping[str, Sum] = {}


class LossFn(Protocol):
    """A loss of `TokenStats` (or of values [n]) and the batch's counted tokens: masked tokens are gone.

    A loss with an attribute `separable` that is True is a sum over tokens and may be handed a sequence piece by piece;
    any other sees whole sequences, at the price of a second head pass.
    """

    def __call__(self, stats: Any, batch: PackedBatch, /) -> Loss: ...


def is_separable(loss: LossFn) -> bool:
    """Whether `loss` declares itself a sum over tokens."""
    return hasattr(loss, "separable") and bool(loss.separable)


class TokenStats(NamedTuple):
    """Per-token log-probability of the target and entropy in nats, both [T] and both differentiable."""

    logprob: Tensor
    entropy: Tensor

"""The interface of losses: per-token statistics in, sums and a count out."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from dovetail.batch.packed import PackedBatch


class Sum(NamedTuple):
    """A sum over tokens or sequences, and their count."""

    total: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count


class Loss(NamedTuple):
    """Sums over this rank's tokens; the engine divides by the global count."""

    total: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    metrics: Mapping[str, Sum] = {}


class LossFn(Protocol):
    """A loss of `TokenStats`, or values [n], of a batch's counted tokens.

    With `separable = True` it may get a sequence in pieces; whole sequences cost a second pass of the head.
    """

    def __call__(self, stats: Any, batch: PackedBatch, /) -> Loss: ...


class TokenStats(NamedTuple):
    """Log-probability of the target and entropy in nats, [T], both differentiable."""

    logprob: Tensor
    entropy: Tensor

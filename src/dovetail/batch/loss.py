"""The interface of losses."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dovetail.batch.packed import PackedBatch
from dovetail.kernels.reference import widened


class Sum(NamedTuple):
    """A sum over tokens or sequences, and their count."""

    total: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count

    @classmethod
    def of(cls, x: Tensor) -> "Sum":
        x = widened(x.detach())
        return cls(x.sum(), torch.ones_like(x).sum())


class Loss(NamedTuple):
    """Sums over this rank's tokens; the engine divides by the global count."""

    total: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    metrics: Mapping[str, Sum] = {}


class LossFn(Protocol):
    """A loss of `TokenStats`, or of values [n], of counted tokens. With `separable = True` it may get a sequence in pieces."""

    def __call__(self, stats: Any, batch: PackedBatch, /) -> Loss: ...


class TokenStats(NamedTuple):
    """[T], in nats, differentiable."""

    logprob: Tensor
    entropy: Tensor

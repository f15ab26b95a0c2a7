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
    def of(cls, x: Tensor, chosen: Tensor | None = None) -> "Sum":
        """chosen: a mask of those that count; default: all."""
        x = widened(x.detach())
        ones = (
            torch.ones_like(x) if chosen is None else chosen.to(x.dtype)
        )  # an index would wait for the GPU
        return cls(x.sum() if chosen is None else (x * ones).sum(), ones.sum())


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

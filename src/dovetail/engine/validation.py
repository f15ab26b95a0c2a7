"""Checks of batches and of results of losses."""

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from dovetail.batch.loss import Loss, LossFn, Sum
from dovetail.batch.packed import PackedBatch
from dovetail.errors import ConfigError, DataError
from dovetail.nn.heads import is_separable
from dovetail.parallel.collectives import stack_numbers
from dovetail.parallel.mesh import Mesh

COMPARED = ("lengths", "groups", "names of fields", "tokens", "targets", "mask")


def check_same(batch: PackedBatch, mesh: Mesh) -> None:
    """DataError on every rank where ranks hold different batches. Collective, over gloo."""
    world = mesh["world"]
    prints = stack_numbers(fingerprint(batch), world, mesh.device) if world.size > 1 else []
    for rank, values in enumerate(prints):
        differ = [name for name, a, b in zip(COMPARED, prints[0], values, strict=True) if a != b]
        if differ:
            at = f"rank {rank} differs from rank 0 in {', '.join(differ)}"
            raise DataError(
                f"ranks were given different batches: {at}; every rank takes the same whole "
                "global batch"
            )
    if not isinstance(batch, PackedBatch):
        kind = type(batch).__name__
        raise DataError(
            f"the batch is a {kind}; pack the sequences: dt.PackedBatch.pack([[1, 5, 7], [1, 9]])"
        )


def fingerprint(batch: Any) -> list[int]:
    """Checksums of `COMPARED`; -1: no batch; 0: not on the host."""
    if not isinstance(batch, PackedBatch):
        return [-1] * len(COMPARED)
    names = sorted((name, str(x.dtype)) for name, x in batch.fields.items())
    described = (batch.lengths, batch.groups, names)
    found = [zlib.crc32(json.dumps(value).encode()) for value in described]
    for x in (batch.tokens, batch.targets, batch.mask):
        on_host = x.device.type == "cpu"  # elsewhere it would wait for the device
        found.append(zlib.crc32(x.contiguous().numpy().data) if on_host else 0)
    return found


@dataclass(frozen=True)
class ValidatedLoss:
    """Checks that results are scalars."""

    loss: LossFn

    @property
    def separable(self) -> bool:
        return is_separable(self.loss)

    @property
    def in_head(self) -> Callable[..., Any]:
        """AttributeError without one."""
        own: Any = self.loss
        return partial(own.in_head)

    def __call__(self, stats: Any, batch: PackedBatch, /) -> Loss:
        first: Tensor = stats if isinstance(stats, Tensor) else stats.logprob
        try:
            result = self.loss(stats, batch)
        except Exception as error:
            sequences = int((batch.cu_seqlens.diff() > 0).sum())
            error.add_note(
                f"raised by the loss of a micro-batch of {sequences} sequences with {len(batch)} "
                "counted tokens; which they "
                "are is the engine's choice: a loss can rely on groups only (dt.Sequence(..., "
                "group=1)), and a micro-batch may "
                "hold none (`dovetail docs contract`, Losses)"
            )
            raise
        if not isinstance(result, Loss):
            raise ConfigError(
                f"the loss returned a {type(result).__name__}; return dt.Loss(total, count, "
                "metrics): sums over the batch's "
                "tokens, and how many they are, as in dt.Loss(-stats.logprob.sum(), "
                "batch.mask.sum(), {})"
            )
        total = _scalar("total", result.total, first)
        count = _scalar("count", result.count, first)
        if not isinstance(result.metrics, Mapping):
            raise ConfigError(
                f"the loss's metrics are a {type(result.metrics).__name__}; give dt.Sum by name"
            )
        if torch.is_grad_enabled() and not total.requires_grad:
            if bool(total != 0):
                named = "values" if isinstance(stats, Tensor) else "stats.logprob or stats.entropy"
                raise ConfigError(
                    f"the loss's total, {float(total):.4g}, has no gradient: compute it from the "
                    f"{named} that the "
                    "loss is given; look for detach(), item() or no_grad()"
                )
            total = total + first[:0].sum()  # backward needs a graph
        metrics = {name: _metric(name, value, first) for name, value in result.metrics.items()}
        return Loss(total, count, metrics)


def _metric(name: Any, value: Any, like: Tensor) -> Sum:
    if not (isinstance(name, str) and name):  # "" is the loss itself
        raise ConfigError(
            f"the loss names a metric {name!r}; give it a name that is a string and not empty"
        )
    if not isinstance(value, Sum):
        raise ConfigError(
            f"the loss's metric {name!r} is a {type(value).__name__}; give dt.Sum(total, count)"
        )
    return Sum(*(_scalar(f"metric {name!r}", x, like) for x in value))


def _scalar(name: str, x: Any, like: Tensor) -> Tensor:
    if isinstance(x, Tensor) and not x.dim():
        return x.to(like.device)
    if isinstance(x, Real):
        return torch.full((), float(x), dtype=torch.float64, device=like.device)
    given = (
        f"is a tensor {list(x.shape)}; take its sum()"
        if isinstance(x, Tensor)
        else f"is a {type(x).__name__}"
    )
    raise ConfigError(f"the loss's {name} {given}; expected a number or a tensor of one")

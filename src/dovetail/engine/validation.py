"""What a caller hands an engine, looked at before it does harm: batches that differ between ranks, losses of a wrong form."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from dovetail.batch.loss import Loss, LossFn, Sum, is_separable
from dovetail.batch.packed import PackedBatch
from dovetail.errors import ConfigError, DataError
from dovetail.parallel.collectives import stack_numbers
from dovetail.parallel.mesh import Mesh

COMPARED = ("lengths", "names of fields", "tokens", "targets", "mask")


def check_same(batch: PackedBatch, mesh: Mesh) -> None:
    """Raise DataError on every rank where ranks hold different batches, or none. Collective: a few numbers, between hosts.

    Fields are compared by name and dtype: numbers that ranks computed may differ in a last bit. Of a batch on an accelerator
    only what the host knows is compared, since the rest would wait for the device.
    """
    world = mesh["world"]
    everyone = stack_numbers(fingerprint(batch), world, mesh.device) if world.size > 1 else []
    for rank, theirs in enumerate(everyone):
        differ = [name for name, a, b in zip(COMPARED, everyone[0], theirs, strict=True) if a != b]
        if differ:
            raise DataError(
                f"ranks were given different batches: rank {rank} differs from rank 0 in {', '.join(differ)}; every rank takes "
                "the same whole global batch, the engine deals it"
            )
    if not isinstance(batch, PackedBatch):
        raise DataError(
            f"the batch is a {type(batch).__name__}; pack the sequences: dt.PackedBatch.pack([[1, 5, 7], [1, 9]])"
        )


def fingerprint(batch: Any) -> list[int]:
    """A number for each of `COMPARED`, the same wherever that is the same; 0 for what is not on the host, and -1 of no batch."""
    if not isinstance(batch, PackedBatch):
        return [-1] * len(COMPARED)
    names = sorted((name, str(x.dtype)) for name, x in batch.fields.items())
    known = [zlib.crc32(json.dumps(each).encode()) for each in (batch.lengths, names)]
    columns = (batch.tokens, batch.targets, batch.mask)
    return [*known, *(zlib.crc32(x.contiguous().numpy().data) if x.device.type == "cpu" else 0 for x in columns)]


class _Noted:
    """Adds to what a loss raises what it was given."""

    def __init__(self, batch: PackedBatch) -> None:
        self.batch = batch

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, Exception):
            count = int((self.batch.cu_seqlens.diff() > 0).sum())
            error.add_note(
                f"raised by the loss of a micro-batch of {count} sequences with {len(self.batch)} counted tokens; which they are "
                "is the engine's choice, so a loss cannot rely on pairs or groups (docs/contract.md, Losses)"
            )


@dataclass(frozen=True)
class ValidatedBatch:
    """A loss whose results have the form that the engine adds up: scalars, as tensors of the statistics' device."""

    loss: LossFn

    @property
    def separable(self) -> bool:
        return is_separable(self.loss)

    def __call__(self, stats: Any, batch: PackedBatch, /) -> Loss:
        first: Tensor = stats if isinstance(stats, Tensor) else stats.logprob
        with _Noted(batch):
            found = self.loss(stats, batch)
        if not isinstance(found, Loss):
            raise ConfigError(
                f"the loss returned a {type(found).__name__}; return dt.Loss(total, count, metrics): sums over the batch's "
                "tokens, and how many they are, as in dt.Loss(-stats.logprob.sum(), batch.mask.sum(), {})"
            )
        total, count = _scalar("total", found.total, first), _scalar("count", found.count, first)
        if not isinstance(found.metrics, Mapping):
            raise ConfigError(
                f"the loss's metrics are a {type(found.metrics).__name__}; give a dict of names and dt.Sum"
            )
        if torch.is_grad_enabled() and not total.requires_grad:
            if bool(total != 0):
                raise ConfigError(
                    f"the loss's total, {float(total):.4g}, has no gradient: compute it from the {_named(stats)} that the "
                    "loss is given; look for detach(), item() or no_grad()"
                )
            total = total + first[:0].sum()  # nothing to train here
        return Loss(total, count, {name: _metric(name, each, first) for name, each in found.metrics.items()})


def _named(stats: Any) -> str:
    return "values" if isinstance(stats, Tensor) else "stats.logprob or stats.entropy"


def _metric(name: Any, found: Any, like: Tensor) -> Sum:
    if not (isinstance(name, str) and name):  # "" is the loss itself in the engine's sums
        raise ConfigError(f"the loss names a metric {name!r}; give it a name that is a string and not empty")
    if not isinstance(found, Sum):
        raise ConfigError(
            f"the loss's metric {name!r} is a {type(found).__name__}; give dt.Sum(total, count): the engine adds the sums of all "
            "micro-batches and ranks, and divides once"
        )
    return Sum(*(_scalar(f"metric {name!r}", x, like) for x in found))


def _scalar(name: str, x: Any, like: Tensor) -> Tensor:
    """A number as a tensor of no dimension where `like` lies; one that is there already stays as it is."""
    if isinstance(x, Tensor) and not x.dim():
        return x.to(like.device)
    if isinstance(x, Real):
        return torch.full((), float(x), dtype=torch.float64, device=like.device)
    found = f"is a tensor {list(x.shape)}; take its sum()" if isinstance(x, Tensor) else f"is a {type(x).__name__}"
    raise ConfigError(f"the loss's {name} {found}; expected a number or a tensor of one")

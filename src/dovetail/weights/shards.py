"""What of the checkpoint a rank holds: a model's placements turned into regions, with the tensors that they lie in."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count, takewhile

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dovetail.nn.model import StagedModel
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import (
    REPLICATED,
    Placement,
    Region,
    as_index,
    checkpoint_shapes,
    held_regions,
    placements_of,
)
from dovetail.weights.safetensors import TensorSpec

Dtypes = Callable[[str], torch.dtype | None]  # the dtype that a checkpoint tensor is written in; None: the parameter's


@dataclass(frozen=True)
class LocalParam:
    """One parameter of this rank, under its checkpoint's name. `tied` are the checkpoint's others for the same tensor."""

    name: str
    placement: Placement
    shape: tuple[int, ...]  # before FSDP2 cuts its rows
    local: Tensor  # what this rank stores of it
    regions: tuple[Region, ...]
    tied: tuple[str, ...]
    parameter: nn.Parameter | None  # None: a buffer


@dataclass(frozen=True)
class ParamShard:
    """A region that this rank holds, and how to get its bytes in their final dtype."""

    region: Region
    dtype: torch.dtype
    read: Callable[[], Tensor]


def local_params(model: nn.Module, mesh: Mesh, *, as_wrapped: bool = False) -> list[LocalParam]:
    """Every parameter of `model` on this rank, in the model's order; then the buffers that checkpoints have, too.

    `as_wrapped`: the regions are those that FSDP2 would leave this rank, though it does not wrap the model.
    """
    reshard(model)
    params, ties = dict(model.named_parameters()), tied_names(model)
    stored: Callable[[str], str] = model.stored_name if isinstance(model, StagedModel) else str
    found = []
    for own_name, placement in placements_of(model).items():
        param, name = params[own_name], stored(own_name)
        sharded = as_wrapped or isinstance(param, DTensor)
        where = held_regions(name, placement, tuple(param.shape), mesh.coords, mesh.sizes, sharded=sharded)
        local = local_tensor(param).detach()
        others = tuple(map(stored, ties.get(own_name, ())))
        found.append(LocalParam(name, placement, tuple(param.shape), local, where, others, param))
    for own_name, buffer in kept_buffers(model).items():
        name = stored(own_name)
        where = held_regions(name, REPLICATED, tuple(buffer.shape), mesh.coords, mesh.sizes, sharded=False)
        found.append(LocalParam(name, REPLICATED, tuple(buffer.shape), buffer, where, (), None))
    return found


def kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of `model` that belong to its checkpoint, by name. Every rank holds them whole."""
    buffers = dict(model.named_buffers())
    return {name: buffers[name] for name in model.state_dict(keep_vars=True) if name in buffers} if buffers else {}


def parameters_in(dtype: torch.dtype, model: nn.Module) -> Dtypes:
    """The `Dtypes` that computes products in `dtype`: buffers keep their own, since rounding what routers choose by changes
    the choice."""
    stored: Callable[[str], str] = model.stored_name if isinstance(model, StagedModel) else str
    kept = {stored(name) for name in kept_buffers(model)}
    return lambda name: None if name in kept else dtype


def local_tensor(x: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank."""
    return x.to_local() if isinstance(x, DTensor) else x


def reshard(model: nn.Module) -> None:
    """Have every parameter be its shard: after a forward without backward some are whole, in the compute dtype."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def tied_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """The further names of parameters that several modules share, by the first name."""
    first: dict[int, str] = {}
    found: dict[str, tuple[str, ...]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(param), name)
        if owner != name:
            found[owner] = (*found.get(owner, ()), name)
    return found


def export_names(region_name: str, tied: tuple[str, ...], listed: Collection[str] | None) -> tuple[str, ...]:
    """Under which names a tensor leaves: its own, or all of a tied tensor's names that the source checkpoint lists."""
    if not tied or listed is None:
        return (region_name,)
    return tuple(name for name in (region_name, *tied) if name in listed) or (region_name,)


def param_shards(
    params: list[LocalParam], dtype_of: Dtypes, listed: Collection[str] | None = None
) -> Iterator[tuple[str, ParamShard]]:
    """Everything that this rank could write, in the model's order, with its checkpoint name."""
    for param in params:
        for region in param.regions:
            for name in export_names(region.checkpoint_name, param.tied, listed):
                dtype = dtype_of(name) or param.local.dtype
                yield name, ParamShard(region, dtype, partial(_read, param.local, region, dtype))


def add_piece(found: dict[str, ParamShard], name: str, piece: ParamShard) -> None:
    """Add a piece of the tensor `name`; the second of a rank is called NAME#1."""
    found[f"{name}#{len(keys_of(name, found))}" if name in found else name] = piece


def keys_of(name: str, found: Mapping[str, ParamShard]) -> list[str]:
    """The keys of a tensor's pieces."""
    keys = (f"{name}#{i}" if i else name for i in count())
    return list(takewhile(found.__contains__, keys))


def tensor_of(key: str, names: Collection[str]) -> str:
    """Which of the checkpoint's `names` is that of the tensor that a piece belongs to."""
    return key if key in names else key.rpartition("#")[0]


def export_specs(params: list[LocalParam], dtype_of: Dtypes, listed: Collection[str] | None = None) -> list[TensorSpec]:
    """Every checkpoint tensor behind this rank's parameters, held here or not, in the model's order."""
    return [
        TensorSpec(name, dtype_of(name) or param.local.dtype, shape)
        for param in params
        for first, shape in checkpoint_shapes(param.name, param.placement, param.shape).items()
        for name in export_names(first, param.tied, listed)
    ]


def own_dtype(name: str) -> None:
    """The `Dtypes` that keeps every parameter's own."""


def _read(local: Tensor, region: Region, dtype: torch.dtype) -> Tensor:
    return local[as_index(region.local_slice)].to(dtype).contiguous()

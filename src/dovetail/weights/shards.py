"""Which regions of the checkpoint's tensors a rank holds."""

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

Dtypes = Callable[[str], torch.dtype | None]  # of a saved tensor; None: the parameter's


@dataclass(frozen=True)
class LocalParam:
    """One parameter of this rank, under its checkpoint's name."""

    name: str
    placement: Placement
    shape: tuple[int, ...]  # before FSDP2 cuts its rows
    local: Tensor
    regions: tuple[Region, ...]
    tied: tuple[str, ...]
    parameter: nn.Parameter | None  # None: a buffer


@dataclass(frozen=True)
class ParamShard:
    """A region that this rank holds; `read` gives it in `dtype`."""

    region: Region
    dtype: torch.dtype
    read: Callable[[], Tensor]


def local_params(model: nn.Module, mesh: Mesh, *, as_wrapped: bool = False) -> list[LocalParam]:
    """Every parameter of `model` on this rank, then its persistent buffers; `as_wrapped`: as if FSDP2 wrapped it."""
    reshard(model)
    params, ties = dict(model.named_parameters()), tied_names(model)
    checkpoint_name: Callable[[str], str] = model.stored_name if isinstance(model, StagedModel) else str
    result = []
    for own_name, placement in placements_of(model).items():
        param, name = params[own_name], checkpoint_name(own_name)
        sharded = as_wrapped or isinstance(param, DTensor)
        regions = held_regions(name, placement, tuple(param.shape), mesh.coords, mesh.sizes, sharded=sharded)
        local, tied = local_tensor(param).detach(), tuple(map(checkpoint_name, ties.get(own_name, ())))
        result.append(LocalParam(name, placement, tuple(param.shape), local, regions, tied, param))
    for own_name, buffer in kept_buffers(model).items():
        name, shape = checkpoint_name(own_name), tuple(buffer.shape)
        regions = held_regions(name, REPLICATED, shape, mesh.coords, mesh.sizes, sharded=False)
        result.append(LocalParam(name, REPLICATED, shape, buffer, regions, (), None))
    return result


def kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The persistent buffers by name. Every rank holds them whole."""
    buffers = dict(model.named_buffers())
    return {name: buffers[name] for name in model.state_dict(keep_vars=True) if name in buffers} if buffers else {}


def parameters_in(dtype: torch.dtype, model: nn.Module) -> Dtypes:
    """Parameters in `dtype`. Buffers keep their own: rounding a router's bias changes its choice."""
    stored: Callable[[str], str] = model.stored_name if isinstance(model, StagedModel) else str
    kept = {stored(name) for name in kept_buffers(model)}
    return lambda name: None if name in kept else dtype


def local_tensor(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, which remain after a forward without backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def tied_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """First name of a shared parameter -> its other names."""
    first: dict[int, str] = {}
    tied: dict[str, tuple[str, ...]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(param), name)
        if owner != name:
            tied[owner] = (*tied.get(owner, ()), name)
    return tied


def export_names(region_name: str, tied: tuple[str, ...], listed: Collection[str] | None) -> tuple[str, ...]:
    """A tensor's name, or a tied tensor's names that the source lists."""
    if not tied or listed is None:
        return (region_name,)
    return tuple(name for name in (region_name, *tied) if name in listed) or (region_name,)


def param_shards(
    params: list[LocalParam], dtype_of: Dtypes, listed: Collection[str] | None = None
) -> Iterator[tuple[str, ParamShard]]:
    """(checkpoint name, shard) of everything that this rank holds."""
    for param in params:
        for region in param.regions:
            for name in export_names(region.checkpoint_name, param.tied, listed):
                dtype = dtype_of(name) or param.local.dtype
                yield name, ParamShard(region, dtype, partial(_read, param.local, region, dtype))


def add_piece(pieces: dict[str, ParamShard], name: str, piece: ParamShard) -> None:
    """Add a piece of tensor `name`; a rank's second has the key NAME#1."""
    pieces[f"{name}#{len(keys_of(name, pieces))}" if name in pieces else name] = piece


def keys_of(name: str, pieces: Mapping[str, ParamShard]) -> list[str]:
    keys = (f"{name}#{i}" if i else name for i in count())
    return list(takewhile(pieces.__contains__, keys))


def tensor_of(key: str, names: Collection[str]) -> str:
    return key if key in names else key.rpartition("#")[0]


def export_specs(params: list[LocalParam], dtype_of: Dtypes, listed: Collection[str] | None = None) -> list[TensorSpec]:
    """Every checkpoint tensor of the parameters, whatever of it is held here."""
    return [
        TensorSpec(name, dtype_of(name) or param.local.dtype, shape)
        for param in params
        for first, shape in checkpoint_shapes(param.name, param.placement, param.shape).items()
        for name in export_names(first, param.tied, listed)
    ]


def own_dtype(name: str) -> None: ...


def _read(local: Tensor, region: Region, dtype: torch.dtype) -> Tensor:
    return local[as_index(region.local_slice)].to(dtype).contiguous()

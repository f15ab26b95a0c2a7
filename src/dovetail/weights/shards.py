"""Which regions of a checkpoint's tensors this rank holds."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypedDict, Unpack

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


class ExportRules(TypedDict, total=False):
    """dtype_of: default: the parameters'. listed: the source's names, whose order and choice of tied names are kept."""

    dtype_of: Dtypes
    listed: Collection[str] | None


@dataclass(frozen=True)
class LocalParam:
    """This rank's part of a parameter, under its checkpoint's name."""

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
    """Parameters, then persistent buffers. `as_wrapped`: as if wrapped by FSDP2."""
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
    """Persistent buffers, whole on every rank."""
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
    """Free parameters gathered by a forward without backward."""
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


def param_shards(params: list[LocalParam], **rules: Unpack[ExportRules]) -> Iterator[tuple[str, ParamShard]]:
    """(checkpoint name, shard)"""
    for param in params:
        for region in param.regions:
            for name in _export_names(region.checkpoint_name, param, rules):
                dtype = _export_dtype(name, param, rules)
                yield name, ParamShard(region, dtype, partial(_read, param.local, region, dtype))


def export_specs(params: list[LocalParam], **rules: Unpack[ExportRules]) -> list[TensorSpec]:
    """The whole checkpoint tensors of the parameters."""
    return [
        TensorSpec(name, _export_dtype(name, param, rules), shape)
        for param in params
        for first, shape in checkpoint_shapes(param.name, param.placement, param.shape).items()
        for name in _export_names(first, param, rules)
    ]


def _export_dtype(name: str, param: LocalParam, rules: ExportRules) -> torch.dtype:
    return ("dtype_of" in rules and rules["dtype_of"](name)) or param.local.dtype


def _export_names(name: str, param: LocalParam, rules: ExportRules) -> tuple[str, ...]:
    """Of a tied tensor all names that the source lists."""
    listed = rules.get("listed")
    both = (name, *param.tied)
    return tuple(n for n in both if n in listed) or (name,) if param.tied and listed is not None else (name,)


def _read(local: Tensor, region: Region, dtype: torch.dtype) -> Tensor:
    return local[as_index(region.local_slice)].to(dtype).contiguous()

"""Which regions of a checkpoint's tensors this rank holds.

Experts in checkpoints (a module has one tensor [E, out, in] a layer, gate before up); all are views of the parameter:

    fused    as in the module
    turned   [E, in, out]
    apart    `mlp.experts.7.gate_proj.weight`: a matrix for each expert
    mixtral  `block_sparse_moe.experts.7.w1.weight`
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypedDict, TypeVar, Unpack

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dovetail.nn.model import ExpertForm, StagedModel
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import (
    REPLICATED,
    Placement,
    Region,
    Slices,
    as_index,
    checkpoint_shapes,
    held_regions,
    overlap,
    placements_of,
    within,
)
from dovetail.weights.hf_reader import TensorSource
from dovetail.weights.safetensors import TensorSpec

T = TypeVar("T")
FUSED = (("experts.gate_up_proj", ("gate_proj", "up_proj")), ("experts.down_proj", ("down_proj",)))
MIXTRAL = (".mlp.", ".block_sparse_moe.", {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"})
Dtypes = Callable[[str], torch.dtype | None]  # None keeps the parameter's


class ExportRules(TypedDict, total=False):
    """dtype_of: default: the parameters'. listed: the source's names: their order, and which tied ones are kept."""

    dtype_of: Dtypes
    listed: Collection[str] | None


@dataclass(frozen=True)
class LocalParam:
    """A rank's part of a parameter, under its checkpoint's name."""

    name: str
    placement: Placement
    shape: tuple[int, ...]  # before FSDP2
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
    """Parameters, then persistent buffers. as_wrapped: as if by FSDP2."""
    reshard(model)
    params = dict(model.named_parameters())
    ties = tied_names(model)
    checkpoint_name: Callable[[str], str] = (
        model.stored_name if isinstance(model, StagedModel) else str
    )
    result = []
    for own_name, placement in placements_of(model).items():
        param = params[own_name]
        name = checkpoint_name(own_name)
        sharded = as_wrapped or isinstance(param, DTensor)
        regions = held_regions(name, placement, tuple(param.shape), mesh, sharded=sharded)
        local = local_tensor(param).detach()
        tied = tuple(map(checkpoint_name, ties.get(own_name, ())))
        result.append(LocalParam(name, placement, tuple(param.shape), local, regions, tied, param))
    for own_name, buffer in kept_buffers(model).items():
        name = checkpoint_name(own_name)
        shape = tuple(buffer.shape)
        regions = held_regions(name, REPLICATED, shape, mesh, sharded=False)
        result.append(LocalParam(name, REPLICATED, shape, buffer, regions, (), None))
    return result


def kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    buffers = dict(model.named_buffers())
    return (
        {name: buffers[name] for name in model.state_dict(keep_vars=True) if name in buffers}
        if buffers
        else {}
    )


def parameters_in(dtype: torch.dtype, model: nn.Module) -> Dtypes:
    """Buffers keep their own: rounding a router's bias changes its choice."""
    stored: Callable[[str], str] = model.stored_name if isinstance(model, StagedModel) else str
    kept = {stored(name) for name in kept_buffers(model)}
    return lambda name: None if name in kept else dtype


def local_tensor(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def reshard(model: nn.Module) -> None:
    """Frees parameters gathered by a forward without backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def tied_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    first: dict[int, str] = {}
    tied: dict[str, tuple[str, ...]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(param), name)
        if owner != name:
            tied[owner] = (*tied.get(owner, ()), name)
    return tied


def param_shards(
    params: list[LocalParam], **rules: Unpack[ExportRules]
) -> Iterator[tuple[str, ParamShard]]:
    for param in params:
        for region in param.regions:
            for name in _export_names(region.checkpoint_name, param, rules):
                dtype = _export_dtype(name, param, rules)
                yield name, ParamShard(region, dtype, partial(_read, param.local, region, dtype))


def export_specs(params: list[LocalParam], **rules: Unpack[ExportRules]) -> list[TensorSpec]:
    return [
        TensorSpec(name, _export_dtype(name, param, rules), shape)
        for param in params
        for first, shape in checkpoint_shapes(param.name, param.placement, param.shape).items()
        for name in _export_names(first, param, rules)
    ]


def _export_dtype(name: str, param: LocalParam, rules: ExportRules) -> torch.dtype:
    return ("dtype_of" in rules and rules["dtype_of"](name)) or param.local.dtype


def _export_names(name: str, param: LocalParam, rules: ExportRules) -> tuple[str, ...]:
    listed = rules.get("listed")
    if not param.tied or listed is None:
        return (name,)
    return tuple(n for n in (name, *param.tied) if n in listed) or (name,)


def _read(local: Tensor, region: Region, dtype: torch.dtype) -> Tensor:
    return local[as_index(region.local_slice)].to(dtype).contiguous()


def checkpoint_params(
    model: nn.Module, mesh: Mesh, *, as_wrapped: bool = False
) -> list[LocalParam]:
    """`local_params` with experts in the checkpoint's form."""
    return in_checkpoint_form(model, local_params(model, mesh, as_wrapped=as_wrapped))


def in_checkpoint_form(model: nn.Module, params: list[LocalParam]) -> list[LocalParam]:
    form: ExpertForm = model.experts if isinstance(model, StagedModel) else "fused"
    if form == "mixtral":
        params = [_renamed(param) for param in params]
    return params if form == "fused" else [view for param in params for view in _views(param, form)]


def form_of(model: StagedModel, source: TensorSource) -> ExpertForm:
    placements = placements_of(model)
    for own_name, param in model.named_parameters():
        if any(own_name.endswith(ending) for ending, _ in FUSED):
            name = model.stored_name(own_name)
            ((count, rows, columns),) = checkpoint_shapes(
                name, placements[own_name], tuple(param.shape)
            ).values()
            if name not in source.names:
                return "mixtral" if any(MIXTRAL[1] in n for n in source.names) else "apart"
            if rows != columns:  # a square matrix does not tell them apart
                return "turned" if source.shape(name) == (count, columns, rows) else "fused"
    return "fused"


def _views(param: LocalParam, form: ExpertForm) -> Iterator[LocalParam]:
    for ending, parts in FUSED:
        if param.name.endswith(ending):
            names = tuple(MIXTRAL[2][part] for part in parts) if form == "mixtral" else parts
            yield from [_turned(param)] if form == "turned" else _apart(param, names)
            return
    yield param


def _renamed(param: LocalParam) -> LocalParam:
    regions = (
        replace(r, checkpoint_name=r.checkpoint_name.replace(*MIXTRAL[:2])) for r in param.regions
    )
    return replace(param, name=param.name.replace(*MIXTRAL[:2]), regions=tuple(regions))


def _turned(param: LocalParam) -> LocalParam:
    splits = tuple(replace(split, dim=(0, 2, 1)[split.dim]) for split in param.placement.splits)
    regions = tuple(_swapped(region) for region in param.regions)
    placement = replace(param.placement, splits=splits)
    local = param.local.transpose(1, 2)
    return replace(
        param, placement=placement, shape=_swap(param.shape), local=local, regions=regions
    )


def _apart(param: LocalParam, parts: tuple[str, ...]) -> Iterator[LocalParam]:
    """Experts of other ranks have no region."""
    ((count, rows, columns),) = checkpoint_shapes(param.name, param.placement, param.shape).values()
    size = rows // len(parts)
    stem = param.name.rpartition(".")[0]
    for expert in range(count):
        for at, part in enumerate(parts):
            name = f"{stem}.{expert}.{part}.weight"
            matrix = ((expert, expert + 1), (at * size, (at + 1) * size), (0, columns))
            local = param.local.new_empty(0)
            regions = tuple[Region, ...]()
            for region in param.regions:
                shared = overlap(region.checkpoint_slice, matrix)
                if shared is not None:
                    local = param.local[as_index(_moved(shared, region))][0]
                    here = tuple((0, length) for length in local.shape)
                    regions = (
                        Region(
                            name, (size, columns), within(shared, matrix)[1:], here, region.owned
                        ),
                    )
            yield LocalParam(name, REPLICATED, (size, columns), local, regions, (), None)


def _moved(shared: Slices, region: Region) -> Slices:
    inside = within(shared, region.checkpoint_slice)
    return tuple(
        (a + base, b + base) for (a, b), (base, _) in zip(inside, region.local_slice, strict=True)
    )


def _swapped(r: Region) -> Region:
    shape = _swap(r.checkpoint_shape)
    there = _swap(r.checkpoint_slice)
    here = _swap(r.local_slice)
    return replace(r, checkpoint_shape=shape, checkpoint_slice=there, local_slice=here)


def _swap(dims: tuple[T, ...]) -> tuple[T, ...]:
    return dims[0], dims[2], dims[1]

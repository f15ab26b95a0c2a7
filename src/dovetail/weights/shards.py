"""The regions of a checkpoint's tensors that this rank holds.

A module has one tensor [E, out, in] of experts a layer, gate before up, of which checkpoints have
views:

    fused       as in the module
    transposed  [E, in, out]
    per_expert  `mlp.experts.7.gate_proj.weight`: a matrix for each expert
    mixtral     `block_sparse_moe.experts.7.w1.weight`
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
    as_index,
    checkpoint_shapes,
    held_regions,
    overlap,
    placements_of,
    whole,
    within,
)
from dovetail.weights.hf_reader import TensorSource
from dovetail.weights.safetensors import TensorSpec

T = TypeVar("T")
FUSED = (("experts.gate_up_proj", ("gate_proj", "up_proj")), ("experts.down_proj", ("down_proj",)))
ADAPTER = (".lora_A", ".lora_B")  # the ends of an adapter's parameters
STACKED = tuple(ending for ending, _ in FUSED)
MIXTRAL = (".mlp.", ".block_sparse_moe.", {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"})
Dtypes = Callable[[str], torch.dtype | None]  # None keeps the parameter's


class ExportRules(TypedDict, total=False):
    """How tensors are exported.

    dtype_of: default: the parameters'. checkpoint_names: those of the source, for the order, and
    for which of tied tensors are kept.
    """

    dtype_of: Dtypes
    checkpoint_names: Collection[str] | None


@dataclass(frozen=True)
class LocalParam:
    """The part of a parameter that this rank holds, under its name in the checkpoint."""

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
    """Return parameters, then persistent buffers. as_wrapped: as if by FSDP2."""
    reshard(model)
    params = dict(model.named_parameters())
    ties = tied_names(model)
    checkpoint_name = _checkpoint_name(model)
    result = []
    for own_name, placement in placements_of(model).items():
        param = params[own_name]
        name = checkpoint_name(own_name)
        shape = tuple(param.shape)
        sharded = as_wrapped or isinstance(param, DTensor)
        regions = held_regions(name, placement, shape, mesh, sharded=sharded)
        local = local_tensor(param).detach()
        tied = tuple(map(checkpoint_name, ties.get(own_name, ())))
        result.append(LocalParam(name, placement, shape, local, regions, tied, param))
    for own_name, buffer in kept_buffers(model).items():
        name = checkpoint_name(own_name)
        shape = tuple(buffer.shape)
        regions = held_regions(name, REPLICATED, shape, mesh, sharded=False)
        result.append(LocalParam(name, REPLICATED, shape, buffer, regions, (), None))
    return result


def kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers."""
    buffers = dict(model.named_buffers())
    if not buffers:
        return {}
    return {name: buffers[name] for name in model.state_dict(keep_vars=True) if name in buffers}


def _checkpoint_name(model: nn.Module) -> Callable[[str], str]:
    """Return the map from names of parameters to those in the checkpoint.

    Adapters are named after matrices of the checkpoint: `self_attn.q_proj.lora_A` is
    `self_attn.qkv_proj.adapters.q_proj.lora_A`, `mlp.experts.down_proj.lora_A` is
    `mlp.experts.adapters.down_proj.lora_A`.
    """
    stored: Callable[[str], str] = model.stored_name if isinstance(model, StagedModel) else str

    def named(name: str) -> str:
        layer, is_adapter, rest = name.partition(".adapters.")
        if not is_adapter:
            return stored(name)
        if not layer.endswith(".experts"):
            layer, _, _ = layer.rpartition(".")
        return f"{layer}.{rest}"

    return named


def parameters_in(dtype: torch.dtype, model: nn.Module) -> Dtypes:
    """Return the dtypes of an export.

    Buffers keep theirs: rounding a router's bias changes its choice.
    """
    kept = {*map(_checkpoint_name(model), kept_buffers(model))}
    return lambda name: None if name in kept else dtype


def local_tensor(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def reshard(model: nn.Module) -> None:
    """Free parameters that a forward without backward gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def tied_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return name -> further names of the same parameter."""
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
    """Yield the regions that this rank holds, with the names of their tensors."""
    for param in params:
        for region in param.regions:
            for name in _export_names(region.checkpoint_name, param, rules):
                dtype = _export_dtype(name, param, rules)
                read = partial(_read, param.local, region, dtype)
                yield name, ParamShard(region, dtype, read)


def export_specs(params: list[LocalParam], **rules: Unpack[ExportRules]) -> list[TensorSpec]:
    """Return what the export of `params` consists of."""
    specs = []
    for param in params:
        shapes = checkpoint_shapes(param.name, param.placement, param.shape)
        for first, shape in shapes.items():
            names = _export_names(first, param, rules)
            specs += [TensorSpec(name, _export_dtype(name, param, rules), shape) for name in names]
    return specs


def _export_dtype(name: str, param: LocalParam, rules: ExportRules) -> torch.dtype:
    dtype = rules["dtype_of"](name) if "dtype_of" in rules else None
    return dtype or param.local.dtype


def _export_names(name: str, param: LocalParam, rules: ExportRules) -> tuple[str, ...]:
    known = rules.get("checkpoint_names")
    if not param.tied or known is None:
        return (name,)
    return tuple(each for each in (name, *param.tied) if each in known) or (name,)


def _read(local: Tensor, region: Region, dtype: torch.dtype) -> Tensor:
    return local[as_index(region.local_slice)].to(dtype).contiguous()


def checkpoint_params(
    model: nn.Module, mesh: Mesh, *, as_wrapped: bool = False
) -> list[LocalParam]:
    """Return the model's own parameters, with experts in the form of the checkpoint."""
    return in_checkpoint_form(model, base_params(model, mesh, as_wrapped=as_wrapped))


def base_params(model: nn.Module, mesh: Mesh, *, as_wrapped: bool = False) -> list[LocalParam]:
    """Return `local_params` without those of adapters."""
    params = local_params(model, mesh, as_wrapped=as_wrapped)
    return [param for param in params if not param.name.endswith(ADAPTER)]


def adapter_params(model: nn.Module, mesh: Mesh) -> list[LocalParam]:
    """Return the parameters of adapters, named `MODULE.lora_A` and `MODULE.lora_B`."""
    return [param for param in local_params(model, mesh) if param.name.endswith(ADAPTER)]


def trained_params(model: nn.Module, mesh: Mesh) -> list[LocalParam]:
    """Return what a training state holds: the adapters if the model has any, else the model."""
    return adapter_params(model, mesh) or checkpoint_params(model, mesh)


def in_checkpoint_form(model: nn.Module, params: list[LocalParam]) -> list[LocalParam]:
    """Return `params` with experts in the form of the checkpoint."""
    form: ExpertForm = model.experts if isinstance(model, StagedModel) else "fused"
    if form == "fused":
        return params
    views: list[LocalParam] = []
    for param in params:
        views += _views(_renamed(param) if form == "mixtral" else param, form)
    return views


def form_of(model: StagedModel, source: TensorSource) -> ExpertForm:
    """Return the form of the experts in a checkpoint."""
    placements = placements_of(model)
    for own_name, param in model.named_parameters():
        if not own_name.endswith(STACKED):
            continue
        name = model.stored_name(own_name)
        if name not in source.names:
            return "mixtral" if any(MIXTRAL[1] in each for each in source.names) else "per_expert"
        shapes = checkpoint_shapes(name, placements[own_name], tuple(param.shape))
        count, rows, columns = shapes[name]
        if rows != columns:  # a square matrix does not tell them apart
            return "transposed" if source.shape(name) == (count, columns, rows) else "fused"
    return "fused"


def _views(param: LocalParam, form: ExpertForm) -> Iterator[LocalParam]:
    for ending, parts in FUSED:
        if param.name.endswith(ending):
            if form == "transposed":
                yield _transposed(param)
            elif form == "mixtral":
                yield from _per_expert(param, tuple(MIXTRAL[2][part] for part in parts))
            else:
                yield from _per_expert(param, parts)
            return
    yield param


def _renamed(param: LocalParam) -> LocalParam:
    ours, theirs, _ = MIXTRAL
    regions = []
    for region in param.regions:
        name = region.checkpoint_name.replace(ours, theirs)
        regions.append(replace(region, checkpoint_name=name))
    return replace(param, name=param.name.replace(ours, theirs), regions=tuple(regions))


def _transposed(param: LocalParam) -> LocalParam:
    splits = tuple(replace(split, dim=(0, 2, 1)[split.dim]) for split in param.placement.splits)
    return replace(
        param,
        placement=replace(param.placement, splits=splits),
        shape=_swap(param.shape),
        local=param.local.transpose(1, 2),
        regions=tuple(_swapped(region) for region in param.regions),
    )


def _per_expert(param: LocalParam, parts: tuple[str, ...]) -> Iterator[LocalParam]:
    """Yield the matrices of all experts; those of other ranks have no region."""
    shapes = checkpoint_shapes(param.name, param.placement, param.shape)
    count, rows, columns = shapes[param.name]
    size = rows // len(parts)
    shape = (size, columns)
    stem, _, _ = param.name.rpartition(".")
    for expert in range(count):
        for number, part in enumerate(parts):
            name = f"{stem}.{expert}.{part}.weight"
            start = number * size
            matrix = ((expert, expert + 1), (start, start + size), (0, columns))
            local = param.local.new_empty(0)
            regions = tuple[Region, ...]()
            for region in param.regions:
                shared = overlap(region.checkpoint_slice, matrix)
                if shared is None:
                    continue
                offset = within(region.checkpoint_slice, region.local_slice)
                local = param.local[as_index(within(shared, offset))][0]
                slices = within(shared, matrix)[1:]
                regions = (Region(name, shape, slices, whole(local.shape), region.owned),)
            yield LocalParam(name, REPLICATED, shape, local, regions, (), None)


def _swapped(region: Region) -> Region:
    return replace(
        region,
        checkpoint_shape=_swap(region.checkpoint_shape),
        checkpoint_slice=_swap(region.checkpoint_slice),
        local_slice=_swap(region.local_slice),
    )


def _swap(dims: tuple[T, ...]) -> tuple[T, ...]:
    return dims[0], dims[2], dims[1]

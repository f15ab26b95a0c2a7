"""Forms of experts in checkpoints. A module has one tensor [E, out, in] for all of a layer, gate before up.

    fused    as in the module
    turned   [E, in, out]
    apart    `mlp.experts.7.gate_proj.weight`: a matrix for each expert
    mixtral  `block_sparse_moe.experts.7.w1.weight`

All are views of the parameter.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from torch import nn

from dovetail.nn.model import ExpertForm, StagedModel
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import (
    REPLICATED,
    Region,
    Slices,
    as_index,
    checkpoint_shapes,
    overlap,
    placements_of,
    within,
)
from dovetail.weights.hf_reader import TensorSource
from dovetail.weights.shards import LocalParam, local_params

T = TypeVar("T")
FUSED = (("experts.gate_up_proj", ("gate_proj", "up_proj")), ("experts.down_proj", ("down_proj",)))
MIXTRAL = (".mlp.", ".block_sparse_moe.", {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"})


def stored(model: nn.Module, mesh: Mesh, *, as_wrapped: bool = False) -> list[LocalParam]:
    """`local_params` in the checkpoint's form."""
    return as_stored(model, local_params(model, mesh, as_wrapped=as_wrapped))


def as_stored(model: nn.Module, params: list[LocalParam]) -> list[LocalParam]:
    """Tensors sharded like the parameters of `model`, in its checkpoint's form."""
    form: ExpertForm = model.experts if isinstance(model, StagedModel) else "fused"
    if form == "mixtral":
        params = [_renamed(param) for param in params]
    return params if form == "fused" else [view for param in params for view in _views(param, form)]


def form_of(model: StagedModel, source: TensorSource) -> ExpertForm:
    placements = placements_of(model)
    for own_name, param in model.named_parameters():
        if any(own_name.endswith(ending) for ending, _ in FUSED):
            name = model.stored_name(own_name)
            ((count, rows, columns),) = checkpoint_shapes(name, placements[own_name], tuple(param.shape)).values()
            if name not in source.names:
                return "mixtral" if any(MIXTRAL[1] in n for n in source.names) else "apart"
            if rows != columns:  # a square one does not show it
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
    regions = (replace(r, checkpoint_name=r.checkpoint_name.replace(*MIXTRAL[:2])) for r in param.regions)
    return replace(param, name=param.name.replace(*MIXTRAL[:2]), regions=tuple(regions))


def _turned(param: LocalParam) -> LocalParam:
    splits = tuple(replace(split, dim=(0, 2, 1)[split.dim]) for split in param.placement.splits)
    swapped = ("checkpoint_shape", "checkpoint_slice", "local_slice")
    regions = tuple(replace(r, **{name: _swap(vars(r)[name]) for name in swapped}) for r in param.regions)
    placement, local = replace(param.placement, splits=splits), param.local.transpose(1, 2)
    return replace(param, placement=placement, shape=_swap(param.shape), local=local, regions=regions)


def _apart(param: LocalParam, parts: tuple[str, ...]) -> Iterator[LocalParam]:
    """Every expert's matrices; those of other ranks have no region."""
    ((count, rows, columns),) = checkpoint_shapes(param.name, param.placement, param.shape).values()
    size, stem = rows // len(parts), param.name.rpartition(".")[0]
    for expert in range(count):
        for at, part in enumerate(parts):
            name = f"{stem}.{expert}.{part}.weight"
            matrix = ((expert, expert + 1), (at * size, (at + 1) * size), (0, columns))
            local, regions = param.local.new_empty(0), tuple[Region, ...]()
            for region in param.regions:
                shared = overlap(region.checkpoint_slice, matrix)
                if shared is not None:
                    local = param.local[as_index(_moved(shared, region))][0]
                    here = tuple((0, length) for length in local.shape)
                    regions = (Region(name, (size, columns), within(shared, matrix)[1:], here, region.owned),)
            yield LocalParam(name, REPLICATED, (size, columns), local, regions, (), None)


def _moved(shared: Slices, region: Region) -> Slices:
    inside = within(shared, region.checkpoint_slice)
    return tuple((a + base, b + base) for (a, b), (base, _) in zip(inside, region.local_slice, strict=True))


def _swap(dims: tuple[T, ...]) -> tuple[T, ...]:
    return dims[0], dims[2], dims[1]

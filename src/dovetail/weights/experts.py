"""Experts as a checkpoint has them, where transformers' module has one tensor [E, out, in] for all of a layer.

    fused    as in the module
    turned   one tensor, [E, in, out]
    apart    a matrix for each expert, gate and up in two: `experts.7.gate_proj.weight`

Each is a view of the parameter's memory, so loading writes through it and saving reads through it; nothing is copied.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from torch import nn

from dovetail.mesh import Mesh
from dovetail.nn.model import ExpertForm, StagedModel
from dovetail.placement import Region, Slices
from dovetail.weights.pieces import Held, held
from dovetail.weights.reader import TensorSource

T = TypeVar("T")
FUSED = (("experts.gate_up_proj", ("gate_proj", "up_proj")), ("experts.down_proj", ("down_proj",)))


def stored(model: nn.Module, mesh: Mesh, *, as_wrapped: bool = False) -> list[Held]:
    """`held`, in the form that the checkpoint has."""
    return as_stored(model, held(model, mesh, as_wrapped=as_wrapped))


def as_stored(model: nn.Module, params: list[Held]) -> list[Held]:
    """Tensors that lie as the parameters of `model` do, in the form that its checkpoint has."""
    form: ExpertForm = model.experts if isinstance(model, StagedModel) else "fused"
    return params if form == "fused" else [view for param in params for view in _views(param, form)]


def form_of(model: StagedModel, source: TensorSource) -> ExpertForm:
    """The form in which a checkpoint has the experts of `model`: it lists them fused, or it has them apart."""
    for own_name, param in model.named_parameters():
        if any(own_name.endswith(ending) for ending, _ in FUSED):
            name, (count, rows, columns) = model.stored_name(own_name), param.shape
            if name not in source.names:
                return "apart"
            return "turned" if rows != columns and source.shape(name) == (count, columns, rows) else "fused"
    return "fused"


def _views(param: Held, form: ExpertForm) -> Iterator[Held]:
    for ending, parts in FUSED:
        if param.name.endswith(ending):
            yield from [_turned(param)] if form == "turned" else _apart(param, parts)
            return
    yield param


def _turned(param: Held) -> Held:
    """The same with its last two dims exchanged."""
    regions = tuple(
        replace(
            region,
            checkpoint_shape=_swap(region.checkpoint_shape),
            checkpoint_slice=_swap(region.checkpoint_slice),
            local_slice=_swap(region.local_slice),
        )
        for region in param.regions
    )
    return replace(param, shape=_swap(param.shape), local=param.local.transpose(1, 2), regions=regions)


def _apart(param: Held, parts: tuple[str, ...]) -> Iterator[Held]:
    """Every expert's matrices, those that this rank holds with a region."""
    count, rows, columns = param.shape
    size = rows // len(parts)
    stem = param.name.rpartition(".")[0]
    whole: Slices = ((0, size), (0, columns))
    for expert in range(count):
        for at, part in enumerate(parts):
            name, local = f"{stem}.{expert}.{part}.weight", param.local.new_empty(0)
            regions: tuple[Region, ...] = ()
            for region in param.regions:
                (first, stop), (start, _) = region.checkpoint_slice[0], region.local_slice[0]
                if first <= expert < stop:
                    local = param.local[start + expert - first, at * size : (at + 1) * size]
                    regions = (Region(name, (size, columns), whole, whole, region.owned),)
            yield Held(name, param.placement, (size, columns), local, regions, (), None)


def _swap(triple: tuple[T, ...]) -> tuple[T, ...]:
    first, second, third = triple
    return first, third, second

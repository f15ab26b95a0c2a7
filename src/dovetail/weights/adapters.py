"""Adapters of a model: first values, and the sum with the base."""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import Unpack

import torch
from torch import Tensor

from dovetail.kernels.reference import wide
from dovetail.nn.model import StagedModel
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import Region, as_index
from dovetail.weights.shards import (
    ExportRules,
    LocalParam,
    adapter_params,
    base_params,
    in_checkpoint_form,
)
from dovetail.weights.stream import export_params, gather_whole

DOWN = ".lora_A"
UP = ".lora_B"
CHUNKS = 16  # of the parameters; those of one are copied at a time
# The tensor of all experts that holds the rows of a matrix, after those of how many others.
ROWS_IN: Mapping[str, tuple[str, int]] = {
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


@dataclass(frozen=True)
class WholeAdapter:
    """A [rank, in] and B [out, rank] of a matrix, or [E, rank, in] and [E, out, rank]."""

    down: Tensor
    up: Tensor
    scale: float
    first_row: int = 0  # of the matrix within the tensor of the base

    def add_to(self, weight: Tensor, region: Region) -> None:
        """Add the product to the rows and columns of `weight` that `region` describes."""
        *experts, rows, columns = region.checkpoint_slice
        start, stop = rows
        first = max(start, self.first_row)
        last = min(stop, self.first_row + self.up.shape[-2])
        if first >= last:
            return
        index = as_index(tuple(experts))
        up_rows = slice(first - self.first_row, last - self.first_row)
        up = self.up[index][..., up_rows, :]
        down = self.down[index][..., slice(*columns)]
        local = weight[as_index(region.local_slice)]
        target = local[..., first - start : last - start, :]
        dtype = torch.promote_types(wide(weight.dtype), up.dtype)
        delta = up.to(dtype) @ down.to(dtype)
        merged = target.to(dtype) + self.scale * delta
        target.copy_(merged)


def init_adapters(model: StagedModel, mesh: Mesh) -> None:
    """Draw A ~ U(-1 / sqrt(in), 1 / sqrt(in)) as PEFT does, and set B to 0; alike in any layout."""
    assert model.adapter is not None
    with torch.no_grad():
        for param in adapter_params(model, mesh):
            param.local.zero_()
            if not param.name.endswith(DOWN):
                continue
            key = f"{model.adapter.seed}/{param.name}"
            generator = torch.Generator()
            generator.manual_seed(zlib.crc32(key.encode()))
            for region in param.regions:
                shape = region.checkpoint_shape
                bound = 1 / sqrt(shape[-1])
                values = torch.empty(shape, dtype=torch.float64)
                values.uniform_(-bound, bound, generator=generator)
                part = values[as_index(region.checkpoint_slice)]
                target = param.local[as_index(region.local_slice)]
                target.copy_(part)


def whole_adapters(
    model: StagedModel, mesh: Mesh, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield `MODULE.lora_A` and `MODULE.lora_B`, whole, on every rank. Collective.

    dtype: default: as they are trained.
    """
    exported = export_params(adapter_params(model, mesh), mesh, dtype_of=lambda _: dtype)
    yield from gather_whole(exported, mesh, sorted(exported.specs))


def merged_weights(
    model: StagedModel, mesh: Mesh, **rules: Unpack[ExportRules]
) -> Iterator[tuple[str, Tensor]]:
    """Yield HF names and whole tensors of the base with its adapters added. Collective."""
    adapters = _by_weight(model, dict(whole_adapters(model, mesh)))
    params = base_params(model, mesh)
    chunk = -(-len(params) // CHUNKS)
    for number in range(CHUNKS):  # as many on every pipeline rank
        first = number * chunk
        some = params[first : first + chunk]
        merged = [_merged(param, adapters) for param in some]
        exported = export_params(in_checkpoint_form(model, merged), mesh, **rules)
        yield from gather_whole(exported, mesh, [*exported.specs])


def _by_weight(model: StagedModel, tensors: Mapping[str, Tensor]) -> dict[str, list[WholeAdapter]]:
    """Return the adapters by the name of the base's tensor in the checkpoint."""
    assert model.adapter is not None
    found: dict[str, list[WholeAdapter]] = {}
    for name, down in tensors.items():
        if not name.endswith(DOWN):
            continue
        module = name.removesuffix(DOWN)
        up = tensors[f"{module}{UP}"]
        scale = model.adapter.scale_of(module)
        weight = model.stored_name(f"{module}.weight")
        first_row = 0
        if down.dim() == 3:
            stem, _, leaf = module.rpartition(".")
            tensor, before = ROWS_IN.get(leaf, (leaf, 0))
            weight = f"{stem}.{tensor}"
            first_row = before * up.shape[1]
        found.setdefault(weight, []).append(WholeAdapter(down, up, scale, first_row))
    return found


def _merged(param: LocalParam, adapters: Mapping[str, list[WholeAdapter]]) -> LocalParam:
    if not any(region.checkpoint_name in adapters for region in param.regions):
        return param
    local = param.local.clone()
    for region in param.regions:
        for adapter in adapters.get(region.checkpoint_name, ()):
            adapter.add_to(local, region)
    return replace(param, local=local)

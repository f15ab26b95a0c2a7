"""Export of whole tensors under their HF names, in bounded buckets: one all-gather each."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Unpack

import torch
from torch import Tensor, nn

from dovetail.memory import aligned, view_at
from dovetail.parallel.collectives import stack_over
from dovetail.parallel.consensus import of_all
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import Slices, as_index, shape_of
from dovetail.weights.safetensors import CODES, DTYPES, TensorSpec
from dovetail.weights.shards import (
    ExportRules,
    LocalParam,
    ParamShard,
    checkpoint_params,
    export_specs,
    param_shards,
)

Named = tuple[str, Slices]  # tensor, rectangle
BUCKET_BYTES = 1 << 28


@dataclass(frozen=True)
class Export:
    """The tensors of a model, the same on every rank. local: regions that this rank owns."""

    specs: dict[str, TensorSpec]
    owners: dict[str, list[tuple[int, Slices]]]  # (world rank, rectangle)
    local: dict[str, list[ParamShard]]


@dataclass(frozen=True)
class _Bucket:
    """Tensors that are gathered together. length: bytes of the longest share."""

    names: list[str]
    starts: dict[Named, int]
    length: int


def export(model: nn.Module, mesh: Mesh, **rules: Unpack[ExportRules]) -> Export:
    """Return the export of a model. Collective."""
    return export_params(checkpoint_params(model, mesh), mesh, **rules)


def export_params(
    params: list[LocalParam], mesh: Mesh, prefix: str = "", **rules: Unpack[ExportRules]
) -> Export:
    """Return the export of `params`, with `prefix` before their names. Collective."""
    held = [(prefix + name, shard) for name, shard in param_shards(params, **rules)]
    rectangles = [(name, shard.region.checkpoint_slice) for name, shard in held]
    exported = export_specs(params, **rules)
    described = [(prefix + spec.name, CODES[spec.dtype], spec.shape) for spec in exported]
    specs: dict[str, TensorSpec] = {}
    owner_of: dict[Named, int] = {}
    for rank, (their_specs, their_rectangles) in enumerate(of_all([described, rectangles], mesh)):
        for name, code, shape in their_specs:
            specs[name] = TensorSpec(name, DTYPES[code], tuple(shape))
        for name, rectangle in their_rectangles:
            slices = tuple((start, stop) for start, stop in rectangle)
            owner_of.setdefault((name, slices), rank)
    known = rules.get("checkpoint_names")
    if known is not None:
        order = dict.fromkeys([*(name for name in known if name in specs), *specs])
        specs = {name: specs[name] for name in order}
    owners: dict[str, list[tuple[int, Slices]]] = {name: [] for name in specs}
    for (name, slices), rank in owner_of.items():
        owners[name].append((rank, slices))
    local: dict[str, list[ParamShard]] = defaultdict(list)
    for name, shard in held:
        if owner_of[name, shard.region.checkpoint_slice] == mesh["world"].rank:
            local[name].append(shard)
    for name, spec in specs.items():
        covered = sum(_num_bytes(slices, spec) for _, slices in owners[name])
        assert covered == spec.num_bytes, f"{name}: {covered} of {spec.num_bytes} bytes are owned"
    return Export(specs, owners, dict(local))


def stream(
    model: nn.Module, mesh: Mesh, *, bucket_bytes: int = BUCKET_BYTES, **rules: Unpack[ExportRules]
) -> Iterator[tuple[str, Tensor]]:
    """Yield HF names and whole tensors, the same on every rank. Collective.

    bucket_bytes: at once, unless one tensor is larger.
    """
    exported = export(model, mesh, **rules)
    return gather_whole(exported, mesh, list(exported.specs), bucket_bytes)


def gather_whole(
    exported: Export, mesh: Mesh, order: Sequence[str], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors in this order. Collective."""
    for bucket in _buckets(exported, order, mesh["world"].size, bucket_bytes):
        yield from _whole_tensors(exported, mesh, bucket)  # frees its memory


def _whole_tensors(exported: Export, mesh: Mesh, bucket: _Bucket) -> Iterator[tuple[str, Tensor]]:
    flat = torch.empty(bucket.length, dtype=torch.uint8, device=mesh.device)
    for name in bucket.names:
        for shard in exported.local.get(name, ()):
            slices = shard.region.checkpoint_slice
            start = bucket.starts[name, slices]
            view = _view(flat, start, slices, exported.specs[name])
            view.copy_(shard.read())
    rows = stack_over(flat, mesh["world"])
    del flat
    for name in bucket.names:
        spec = exported.specs[name]
        whole = torch.empty(spec.shape, dtype=spec.dtype, device=mesh.device)
        for rank, slices in exported.owners[name]:
            start = bucket.starts[name, slices]
            whole[as_index(slices)].copy_(_view(rows[rank], start, slices, spec))
        yield name, whole
        del whole


def _buckets(
    exported: Export, order: Sequence[str], world: int, bucket_bytes: int
) -> Iterator[_Bucket]:
    """Yield buckets: `world` x the longest share is within the bound."""

    def place(name: str, ends: Sequence[int]) -> tuple[dict[Named, int], list[int]]:
        placed = {}
        ends = list(ends)
        for rank, slices in exported.owners[name]:
            placed[name, slices] = ends[rank]
            ends[rank] += aligned(_num_bytes(slices, exported.specs[name]))
        return placed, ends

    names: list[str] = []
    starts: dict[Named, int] = {}
    ends = [0] * world
    for name in order:
        placed, grown = place(name, ends)
        if names and world * max(grown) > bucket_bytes:
            yield _Bucket(names, starts, max(ends))
            names = []
            starts = {}
            placed, grown = place(name, [0] * world)
        names.append(name)
        starts |= placed
        ends = grown
    if names:
        yield _Bucket(names, starts, max(ends))


def _num_bytes(slices: Slices, spec: TensorSpec) -> int:
    return spec.dtype.itemsize * prod(shape_of(slices))


def _view(flat: Tensor, start: int, slices: Slices, spec: TensorSpec) -> Tensor:
    return view_at(flat, start, spec.dtype, shape_of(slices))

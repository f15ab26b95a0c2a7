"""Exports whole tensors under their HF names, in bounded buckets: one all-gather of flat bytes each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor, nn

from dovetail.memory import aligned, view_at
from dovetail.parallel.collectives import stack_over
from dovetail.parallel.consensus import of_all
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import Slices, as_index
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
    """The same on every rank, but for `local`: regions that this rank owns."""

    specs: dict[str, TensorSpec]
    owners: dict[str, list[tuple[int, Slices]]]  # (world rank, rectangle)
    local: dict[str, list[ParamShard]]


@dataclass(frozen=True)
class _Bucket:
    names: list[str]
    starts: dict[Named, int]
    length: int


def export(model: nn.Module, mesh: Mesh, **rules: Unpack[ExportRules]) -> Export:
    """Collective."""
    return export_params(checkpoint_params(model, mesh), mesh, **rules)


def export_params(
    params: list[LocalParam], mesh: Mesh, prefix: str = "", **rules: Unpack[ExportRules]
) -> Export:
    """Collective."""
    held = [(prefix + name, piece) for name, piece in param_shards(params, **rules)]
    message = [
        [
            (prefix + spec.name, CODES[spec.dtype], spec.shape)
            for spec in export_specs(params, **rules)
        ],
        [(name, piece.region.checkpoint_slice) for name, piece in held],
    ]
    everyone = of_all(message, mesh)
    specs = {
        name: TensorSpec(name, DTYPES[code], tuple(shape))
        for rows, _ in everyone
        for name, code, shape in rows
    }
    if (listed := rules.get("listed")) is not None:
        specs = {
            name: specs[name]
            for name in dict.fromkeys([*(n for n in listed if n in specs), *specs])
        }
    chosen: dict[Named, int] = {}
    for rank, (_, regions) in enumerate(everyone):
        for name, slices in regions:
            chosen.setdefault((name, tuple((start, stop) for start, stop in slices)), rank)
    owners: dict[str, list[tuple[int, Slices]]] = {name: [] for name in specs}
    for (name, slices), rank in chosen.items():
        owners[name].append((rank, slices))
    local: dict[str, list[ParamShard]] = {}
    for name, piece in held:
        if chosen[name, piece.region.checkpoint_slice] == mesh["world"].rank:
            local.setdefault(name, []).append(piece)
    for name, spec in specs.items():
        covered = sum(_num_bytes(slices, spec) for _, slices in owners[name])
        assert covered == spec.num_bytes, (
            f"{name}: {covered} of {spec.num_bytes} bytes have an owner"
        )
    return Export(specs, owners, local)


def stream(
    model: nn.Module, mesh: Mesh, *, bucket_bytes: int = BUCKET_BYTES, **rules: Unpack[ExportRules]
) -> Iterator[tuple[str, Tensor]]:
    """(HF name, whole tensor), alike on every rank. bucket_bytes: at once, unless one tensor is larger. Collective."""
    exported = export(model, mesh, **rules)
    return gather_whole(exported, mesh, list(exported.specs), bucket_bytes)


def gather_whole(
    exported: Export, mesh: Mesh, order: Sequence[str], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, Tensor]]:
    for bucket in _buckets(exported, order, mesh["world"].size, bucket_bytes):
        yield from _whole_tensors(exported, mesh, bucket)  # frees its memory


def _whole_tensors(exported: Export, mesh: Mesh, bucket: _Bucket) -> Iterator[tuple[str, Tensor]]:
    flat = torch.empty(bucket.length, dtype=torch.uint8, device=mesh.device)
    for name in bucket.names:
        for piece in exported.local.get(name, ()):
            slices = piece.region.checkpoint_slice
            _view(flat, bucket.starts[name, slices], slices, exported.specs[name]).copy_(
                piece.read()
            )
    rows = stack_over(flat, mesh["world"])
    del flat
    for name in bucket.names:
        spec = exported.specs[name]
        whole = torch.empty(spec.shape, dtype=spec.dtype, device=mesh.device)
        for rank, slices in exported.owners[name]:
            whole[as_index(slices)].copy_(
                _view(rows[rank], bucket.starts[name, slices], slices, spec)
            )
        yield name, whole
        del whole


def _buckets(
    exported: Export, order: Sequence[str], world: int, bucket_bytes: int
) -> Iterator[_Bucket]:
    """`world` x the longest share is within the bound."""

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
    return TensorSpec("", spec.dtype, tuple(stop - start for start, stop in slices)).num_bytes


def _view(flat: Tensor, start: int, slices: Slices, spec: TensorSpec) -> Tensor:
    return view_at(flat, start, spec.dtype, [stop - begin for begin, stop in slices])

"""Whole tensors under their Hugging Face names, in bounded buckets, from any sharded model.

Each region has one owner. A bucket is one all-gather of flat bytes over the whole mesh.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dovetail.memory import aligned, view_at
from dovetail.parallel.collectives import gather_text, stack_over
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import Slices, as_index
from dovetail.weights.experts import stored
from dovetail.weights.safetensors import CODES, DTYPES, TensorSpec
from dovetail.weights.shards import (
    Dtypes,
    LocalParam,
    ParamShard,
    add_piece,
    export_specs,
    keys_of,
    own_dtype,
    param_shards,
)

Named = tuple[str, Slices]  # tensor, rectangle
BUCKET_BYTES = 1 << 28


@dataclass(frozen=True)
class Export:
    """A model's tensors and their owners, the same on every rank; `local`: the regions that this rank owns."""

    specs: dict[str, TensorSpec]
    owners: dict[str, list[tuple[int, Slices]]]  # tensor -> (world rank, rectangle)
    local: dict[str, ParamShard]


@dataclass(frozen=True)
class _Bucket:
    names: list[str]
    starts: dict[Named, int]  # in the owner's bytes
    length: int  # of the longest rank


def export(
    model: nn.Module, mesh: Mesh, *, dtype_of: Dtypes = own_dtype, listed: Collection[str] | None = None
) -> Export:
    """Agree on tensors and owners. Collective.

    `dtype_of`: the dtype of each tensor. `listed`: the source's names, whose order and choice of tied names are kept.
    """
    return export_params(stored(model, mesh), mesh, dtype_of=dtype_of, listed=listed)


def export_params(
    params: list[LocalParam],
    mesh: Mesh,
    *,
    dtype_of: Dtypes = own_dtype,
    listed: Collection[str] | None = None,
    prefix: str = "",
) -> Export:
    """`export` of tensors sharded like parameters, named `prefix` + name. Collective."""
    held = [(prefix + name, piece) for name, piece in param_shards(params, dtype_of, listed)]
    message = [
        [(prefix + spec.name, CODES[spec.dtype], spec.shape) for spec in export_specs(params, dtype_of, listed)],
        [(name, piece.region.checkpoint_slice) for name, piece in held],
    ]
    everyone = [json.loads(text) for text in gather_text(json.dumps(message), mesh["world"], mesh.device)]
    specs = {name: TensorSpec(name, DTYPES[code], tuple(shape)) for rows, _ in everyone for name, code, shape in rows}
    if listed is not None:
        specs = {name: specs[name] for name in dict.fromkeys([*(n for n in listed if n in specs), *specs])}
    holders: dict[Named, list[int]] = {}
    for rank, (_, regions) in enumerate(everyone):
        for name, slices in regions:
            holders.setdefault((name, tuple((start, stop) for start, stop in slices)), []).append(rank)
    chosen = spread(holders, {region: _num_bytes(region[1], specs[region[0]]) for region in holders}, len(everyone))
    owners: dict[str, list[tuple[int, Slices]]] = {name: [] for name in specs}
    for (name, slices), rank in chosen.items():
        owners[name].append((rank, slices))
    local: dict[str, ParamShard] = {}
    for name, piece in held:
        if chosen[name, piece.region.checkpoint_slice] == mesh["world"].rank:
            add_piece(local, name, piece)
    for name, spec in specs.items():
        covered = sum(_num_bytes(slices, spec) for _, slices in owners[name])
        assert covered == spec.num_bytes, f"{name}: {covered} of {spec.num_bytes} bytes have an owner"
    return Export(specs, owners, local)


def spread(holders: Mapping[Named, Sequence[int]], num_bytes: Mapping[Named, int], world: int) -> dict[Named, int]:
    """Each region's owner among its holders: the largest first, to the rank with the fewest bytes."""
    loads = [0] * world
    chosen: dict[Named, int] = {}
    for region in sorted(holders, key=lambda region: (len(holders[region]) > 1, -num_bytes[region])):
        owner = min(holders[region], key=lambda rank: (loads[rank], rank))
        loads[owner] += num_bytes[region]
        chosen[region] = owner
    return {region: chosen[region] for region in holders}


def stream(
    model: nn.Module,
    mesh: Mesh,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    dtype_of: Dtypes = own_dtype,
    listed: Collection[str] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(HF name, whole tensor) of every parameter, in the same order on every rank. Collective until exhausted.

    `bucket_bytes` bounds what is gathered at once, unless one tensor is larger.
    """
    exported = export(model, mesh, dtype_of=dtype_of, listed=listed)
    return gather_whole(exported, mesh, list(exported.specs), bucket_bytes)


def gather_whole(
    exported: Export, mesh: Mesh, order: Sequence[str], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `order`, whole on every rank. Collective until exhausted."""
    for bucket in _buckets(exported, order, mesh["world"].size, bucket_bytes):
        yield from _whole_tensors(exported, mesh, bucket)  # frees its memory before the next


def _whole_tensors(exported: Export, mesh: Mesh, bucket: _Bucket) -> Iterator[tuple[str, Tensor]]:
    flat = torch.empty(bucket.length, dtype=torch.uint8, device=mesh.device)
    for name in bucket.names:
        for key in keys_of(name, exported.local):
            piece = exported.local[key]
            slices = piece.region.checkpoint_slice
            _view(flat, bucket.starts[name, slices], slices, exported.specs[name]).copy_(piece.read())
    rows = stack_over(flat, mesh["world"])
    del flat
    for name in bucket.names:
        spec = exported.specs[name]
        whole = torch.empty(spec.shape, dtype=spec.dtype, device=mesh.device)
        for rank, slices in exported.owners[name]:
            whole[as_index(slices)].copy_(_view(rows[rank], bucket.starts[name, slices], slices, spec))
        yield name, whole
        del whole


def _buckets(exported: Export, order: Sequence[str], world: int, bucket_bytes: int) -> Iterator[_Bucket]:
    """Consecutive tensors; `world` times the longest rank's share stays within the bound."""

    def place(name: str, ends: Sequence[int]) -> tuple[dict[Named, int], list[int]]:
        placed, ends = {}, list(ends)
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
            names, starts = [], {}
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

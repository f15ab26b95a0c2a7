"""Hands out whole tensors under their Hugging Face names, one bounded bucket at a time, from any sharded model.

Every rank tells once which regions it holds; from then on all is computed. Of several that hold the same region one is
its owner, chosen so that all own about the same number of bytes. A bucket is one all-gather of flat bytes over
the whole mesh, and each tensor of it is put together from everyone's regions, so no kind of axis needs code of its own.
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

Named = tuple[str, Slices]  # a piece: its tensor, and which rectangle of it
Starts = tuple[dict[tuple[str, Slices], int], int]  # of one rank: where each piece begins in its bytes; how many in all

BUCKET_BYTES = 1 << 28


@dataclass(frozen=True)
class Export:
    """What a model's tensors are and who owns which part of them; the same on every rank but for `mine`."""

    specs: dict[str, TensorSpec]
    owners: dict[str, list[tuple[int, Slices]]]  # tensor -> (world rank, the rectangle that it owns)
    mine: dict[str, ParamShard]


def export(
    model: nn.Module, mesh: Mesh, *, dtype_of: Dtypes = own_dtype, listed: Collection[str] | None = None
) -> Export:
    """Agree on what leaves the model. Collective.

    `dtype_of` names the dtype of each tensor (None: the parameter's own). `listed` are the source checkpoint's names in
    its order: tensors follow that order, and a tied weight leaves under those of its names that are listed.
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
    """The same of tensors that lie as a model's parameters do, named `prefix` + the parameter's name. Collective."""
    here = [(prefix + name, piece) for name, piece in param_shards(params, dtype_of, listed)]
    told = [
        [(prefix + spec.name, CODES[spec.dtype], spec.shape) for spec in export_specs(params, dtype_of, listed)],
        [(name, piece.region.checkpoint_slice) for name, piece in here],
    ]
    everyone = [json.loads(text) for text in gather_text(json.dumps(told), mesh["world"], mesh.device)]
    specs = {name: TensorSpec(name, DTYPES[code], tuple(shape)) for found, _ in everyone for name, code, shape in found}
    if listed is not None:
        specs = {
            name: specs[name] for name in [*(n for n in listed if n in specs), *(n for n in specs if n not in listed)]
        }
    holders: dict[tuple[str, Slices], list[int]] = {}
    for rank, (_, pieces) in enumerate(everyone):
        for name, slices in pieces:
            holders.setdefault((name, tuple((start, stop) for start, stop in slices)), []).append(rank)
    chosen = spread(holders, {piece: _num_bytes(piece[1], specs[piece[0]]) for piece in holders}, len(everyone))
    owners: dict[str, list[tuple[int, Slices]]] = {name: [] for name in specs}
    for (name, slices), rank in chosen.items():
        owners[name].append((rank, slices))
    mine: dict[str, ParamShard] = {}
    for name, piece in here:
        if chosen[name, piece.region.checkpoint_slice] == mesh["world"].rank:
            add_piece(mine, name, piece)
    for name, spec in specs.items():
        covered = sum(_num_bytes(slices, spec) for _, slices in owners[name])
        assert covered == spec.num_bytes, f"{name}: {covered} of {spec.num_bytes} bytes have an owner"
    return Export(specs, owners, mine)


def spread(holders: Mapping[Named, Sequence[int]], num_bytes: Mapping[Named, int], world: int) -> dict[Named, int]:
    """Each piece's owner among the ranks that hold it. The largest are given first, to whoever owns the fewest bytes."""
    loads = [0] * world
    chosen: dict[Named, int] = {}
    for piece in sorted(holders, key=lambda piece: (len(holders[piece]) > 1, -num_bytes[piece])):
        owner = min(holders[piece], key=lambda rank: (loads[rank], rank))
        loads[owner] += num_bytes[piece]
        chosen[piece] = owner
    return {piece: chosen[piece] for piece in holders}


def stream(
    model: nn.Module,
    mesh: Mesh,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    dtype_of: Dtypes = own_dtype,
    listed: Collection[str] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(HF name, whole tensor) of every parameter, on every rank in the same order. Collective until it is exhausted.

    `bucket_bytes` bounds what is gathered at once, unless a single tensor is larger.
    """
    found = export(model, mesh, dtype_of=dtype_of, listed=listed)
    return gather_whole(found, mesh, list(found.specs), bucket_bytes)


def gather_whole(
    found: Export, mesh: Mesh, order: Sequence[str], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """The tensors named in `order`, whole on every rank. Collective until it is exhausted."""
    for bucket in _buckets(found, order, mesh["world"].size, bucket_bytes):
        yield from _whole_tensors(found, mesh, bucket)  # a generator of its own: its memory is gone before the next


def _whole_tensors(found: Export, mesh: Mesh, bucket: list[str]) -> Iterator[tuple[str, Tensor]]:
    starts = _starts(found, bucket, mesh["world"].size)
    rows = stack_over(_own_bytes(found, mesh, bucket, starts), mesh["world"])
    for name in bucket:
        spec = found.specs[name]
        whole = torch.empty(spec.shape, dtype=spec.dtype, device=mesh.device)
        for rank, slices in found.owners[name]:
            whole[as_index(slices)].copy_(_view(rows[rank], starts[rank][0][name, slices], slices, spec))
        yield name, whole
        del whole


def _own_bytes(found: Export, mesh: Mesh, bucket: list[str], starts: list[Starts]) -> Tensor:
    """This rank's regions of a bucket, as long as the longest rank's."""
    flat = torch.empty(max(end for _, end in starts), dtype=torch.uint8, device=mesh.device)
    for name in bucket:
        for key in keys_of(name, found.mine):
            piece, slices = found.mine[key], found.mine[key].region.checkpoint_slice
            start = starts[mesh["world"].rank][0][name, slices]
            _view(flat, start, slices, found.specs[name]).copy_(piece.read())
    return flat


def _buckets(found: Export, order: Sequence[str], world: int, bucket_bytes: int) -> Iterator[list[str]]:
    """Runs of `order` whose gathered size, `world` times the longest rank's share, stays within the bound."""
    bucket: list[str] = []
    lengths = [0] * world
    for name in order:
        grown = list(lengths)
        for rank, slices in found.owners[name]:
            grown[rank] += aligned(_num_bytes(slices, found.specs[name]))
        if bucket and world * max(grown) > bucket_bytes:
            yield bucket
            grown = [after - before for after, before in zip(grown, lengths, strict=True)]
            bucket = []
        bucket.append(name)
        lengths = grown
    if bucket:
        yield bucket


def _starts(found: Export, bucket: list[str], world: int) -> list[Starts]:
    """For each rank: where each tensor's region begins in its bytes, and how many bytes it has in all."""
    starts: list[dict[tuple[str, Slices], int]] = [{} for _ in range(world)]
    ends = [0] * world
    for name in bucket:
        for rank, slices in found.owners[name]:
            starts[rank][name, slices] = ends[rank]
            ends[rank] += aligned(_num_bytes(slices, found.specs[name]))
    return list(zip(starts, ends, strict=True))


def _num_bytes(slices: Slices, spec: TensorSpec) -> int:
    return TensorSpec("", spec.dtype, tuple(stop - start for start, stop in slices)).num_bytes


def _view(flat: Tensor, start: int, slices: Slices, spec: TensorSpec) -> Tensor:
    """The rectangle stored at `start` of a row of bytes."""
    return view_at(flat, start, spec.dtype, [stop - begin for begin, stop in slices])

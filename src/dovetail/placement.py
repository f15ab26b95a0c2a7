"""What lives where: which slice of which checkpoint tensor a local parameter is.

A `Placement` is declared once, on the layer that owns the parameter (its `placements` attribute). Loading, saving,
streaming, initialization, gradient reduction and the gradient norm all read it; nobody else slices a weight. A fused
parameter (q, k, v in one GEMM) is several `Part`s along the split dim, so it has several names outside and one inside.
`regions` turns a placement into slices for any rank; `held_regions` composes them with the rows that FSDP2 leaves it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from torch import nn


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor inside a (possibly fused) local parameter, along the split dim.

    `size` is its length in the checkpoint. `copies` > 1: the axis has more ranks than the tensor has pieces, so each
    piece is held by that many neighboring ranks. `padding`: rows past the end that exist only locally, to make the
    length divide; they are zero, never loaded, never exported.
    """

    name: str
    size: int
    copies: int = 1
    padding: int = 0

    def local_length(self, axis_size: int) -> int:
        """Rows of this part in every rank's local parameter."""
        return (self.size + self.padding) * self.copies // axis_size


@dataclass(frozen=True)
class Split:
    """A dim cut over a mesh axis."""

    dim: int
    axis: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Placement:
    """How one local parameter maps to checkpoint tensors.

    `partial_over`: axes whose ranks each see only their own tokens or heads, or one use of a tied table, so the gradient
    must be summed over them.
    """

    splits: tuple[Split, ...] = ()
    partial_over: tuple[str, ...] = ()


REPLICATED = Placement()
Slices = tuple[tuple[int, int], ...]  # (start, stop) for every dim


@dataclass(frozen=True)
class Region:
    """A rectangle of one checkpoint tensor and where it lies in the local parameter: equal shapes, dim by dim."""

    checkpoint_name: str
    checkpoint_shape: tuple[int, ...]
    checkpoint_slice: Slices
    local_slice: Slices
    owned: bool  # of the ranks that hold the same piece, this one writes it and counts it in norms
    copies: int = 1  # neighboring tp ranks that hold this piece because the axis has more ranks than pieces

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.checkpoint_slice)

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


def placements_of(model: nn.Module) -> dict[str, Placement]:
    """The placement of every parameter of `model`, by its full name; a shared parameter appears once."""
    found: dict[str, Placement] = {}
    names = dict(model.named_parameters())
    for prefix, module in model.named_modules():
        declared: Mapping[str, Placement] = module.__dict__.get("placements", {})
        for leaf, _ in module.named_parameters(recurse=False):
            name = f"{prefix}.{leaf}" if prefix else leaf
            if name in names:
                found[name] = declared.get(leaf, REPLICATED)
    return found


def checkpoint_names(name: str, placement: Placement) -> tuple[str, ...]:
    """The checkpoint's names of a parameter: `...self_attn.qkv_proj.weight` with parts q, k, v has three."""
    parts = placement.splits[0].parts if placement.splits else ()
    if len(parts) < 2:
        return (name,)
    stem, _, leaf = name.rpartition(".")
    parent, _, _ = stem.rpartition(".")
    return tuple(f"{parent}.{part.name}.{leaf}" if parent else f"{part.name}.{leaf}" for part in parts)


def regions(
    name: str, placement: Placement, local_shape: tuple[int, ...], coords: Mapping[str, int], sizes: Mapping[str, int]
) -> tuple[Region, ...]:
    """The checkpoint slices that make up a parameter of `local_shape` on the rank at `coords`.

    Pieces wholly made of padding have no region. Of ranks that hold the same piece only the first owns it.
    """
    names = checkpoint_names(name, placement)
    copied_over = {"tp", *placement.partial_over} - {split.axis for split in placement.splits}
    first = all(coords[axis] == 0 for axis in copied_over)
    if not placement.splits:
        whole = tuple((0, length) for length in local_shape)
        return (Region(names[0], local_shape, whole, whole, first),)
    (split,) = placement.splits  # a second split arrives with the experts
    rank, found, offset = coords[split.axis], [], 0
    for part_name, part in zip(names, split.parts, strict=True):
        length = part.local_length(sizes[split.axis])
        start = rank // part.copies * length
        stop = min(start + length, part.size)
        if stop > start:
            checkpoint = [(0, n) for n in local_shape]
            local = list(checkpoint)
            checkpoint[split.dim] = (start, stop)
            local[split.dim] = (offset, offset + stop - start)
            shape = (*local_shape[: split.dim], part.size, *local_shape[split.dim + 1 :])
            owned = first and rank % part.copies == 0
            found.append(Region(part_name, shape, tuple(checkpoint), tuple(local), owned, part.copies))
        offset += length
    return tuple(found)


def fsdp_rows(rows: int, rank: int, size: int) -> tuple[int, int]:
    """The rows of dim 0 that FSDP2 gives to one rank: equal chunks rounded up, so the last may hold fewer or none."""
    chunk = -(-rows // size)
    return min(rank * chunk, rows), min((rank + 1) * chunk, rows)


def narrow_rows(found: tuple[Region, ...], start: int, stop: int) -> tuple[Region, ...]:
    """The part of `found` whose local rows lie in [start, stop), with local slices counted from `start`."""
    kept = []
    for region in found:
        (low, high), *rest = region.local_slice
        lo, hi = max(low, start), min(high, stop)
        if lo < hi:
            at = region.checkpoint_slice[0][0] + lo - low
            kept.append(
                replace(
                    region,
                    checkpoint_slice=((at, at + hi - lo), *region.checkpoint_slice[1:]),
                    local_slice=((lo - start, hi - start), *rest),
                )
            )
    return tuple(kept)


def held_regions(
    name: str,
    placement: Placement,
    local_shape: tuple[int, ...],
    coords: Mapping[str, int],
    sizes: Mapping[str, int],
    *,
    sharded: bool,
) -> tuple[Region, ...]:
    """The regions that a rank really holds: FSDP2's rows where it shards, else all, owned by one replica."""
    found = regions(name, placement, local_shape, coords, sizes)
    if sharded:
        return narrow_rows(found, *fsdp_rows(local_shape[0], coords["fsdp"], sizes["fsdp"]))
    return found if coords["fsdp"] == 0 else tuple(replace(region, owned=False) for region in found)


def overlap(first: Slices, second: Slices) -> Slices | None:
    """The rectangle that two slices of one tensor share, or None."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def within(inner: Slices, outer: Slices) -> Slices:
    """`inner` counted from the start of `outer`."""
    return tuple((start - base, stop - base) for (start, stop), (base, _) in zip(inner, outer, strict=True))


def as_index(slices: Slices) -> tuple[slice, ...]:
    """`slices` as an index into a tensor."""
    return tuple(slice(start, stop) for start, stop in slices)

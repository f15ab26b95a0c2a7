"""What lives where: which slice of which checkpoint tensor a local parameter is.

A `Placement` is declared once, on the layer that owns the parameter (its `placements` attribute). Loading, saving,
streaming, initialization, gradient reduction and the gradient norm all read it; nobody else slices a weight. A fused
parameter (q, k, v in one GEMM) is several `Part`s along the split dim, so it has several names outside and one inside.
`regions` turns a placement into slices for any rank; `held_regions` composes them with the rows that FSDP2 leaves it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import NamedTuple

from torch import nn


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor inside a (possibly fused) local parameter, along the split dim.

    `size` is its length in the checkpoint. `copies` > 1: the axis has more ranks than the tensor has pieces, so each
    piece is held by that many neighboring ranks. `padding`: rows past the end that exist only locally, to make the
    length divide; they are zero, never loaded, never exported. Parts of one name lie one after the other in its tensor.
    """

    name: str
    size: int
    copies: int = 1
    padding: int = 0

    @classmethod
    def padded(cls, name: str, size: int, axis_size: int) -> "Part":
        """One that every rank of an axis of this size has equally much of, zeros included."""
        return cls(name, size, padding=-size % axis_size)

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
    """How one local parameter maps to checkpoint tensors: a product of splits, of which at most one has several parts.

    `sharded_over`: the axis of the ranks that hold the same parameter, over which FSDP2 shards its rows. `partial_over`:
    axes whose ranks each see only their own tokens or heads, or one use of a tied table, so the gradient must be summed
    over them.
    """

    splits: tuple[Split, ...] = ()
    partial_over: tuple[str, ...] = ()
    sharded_over: str = "fsdp"


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
    parts = dict.fromkeys(part.name for split in placement.splits for part in split.parts if part.name)
    if len(parts) < 2:
        return (name,)
    stem, _, leaf = name.rpartition(".")
    parent, _, _ = stem.rpartition(".")
    return tuple(f"{parent}.{part}.{leaf}" if parent else f"{part}.{leaf}" for part in parts)


def checkpoint_shapes(name: str, placement: Placement, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Name and whole shape of each checkpoint tensor behind a parameter of this local shape."""
    names = checkpoint_names(name, placement)
    found = dict.fromkeys(names, shape)
    for split in placement.splits:
        sizes: dict[str, int] = {}
        for part in split.parts:
            sizes[part.name] = sizes.get(part.name, 0) + part.size
        whole = list(sizes.values()) * (len(names) if len(sizes) == 1 else 1)
        for each, size in zip(names, whole, strict=True):
            found[each] = (*found[each][: split.dim], size, *found[each][split.dim + 1 :])
    return found


class _Stretch(NamedTuple):
    """What one part contributes along the split dim: where it lies in its tensor and in the local parameter."""

    name: str
    checkpoint: tuple[int, int]
    local: tuple[int, int]
    owned: bool
    copies: int


def _stretches(split: Split, rank: int, size: int) -> Iterator[_Stretch]:
    """The parts of a split as a rank of its axis holds them; those made of padding alone are not there."""
    at: dict[str, int] = {}
    offset = 0
    for part in split.parts:
        length, base = part.local_length(size), at.get(part.name, 0)
        start = rank // part.copies * length
        stop = min(start + length, part.size)
        if stop > start:
            local = (offset, offset + stop - start)
            yield _Stretch(part.name, (base + start, base + stop), local, rank % part.copies == 0, part.copies)
        at[part.name] = base + part.size
        offset += length


def regions(
    name: str, placement: Placement, local_shape: tuple[int, ...], coords: Mapping[str, int], sizes: Mapping[str, int]
) -> tuple[Region, ...]:
    """The checkpoint slices that make up a parameter of `local_shape` on the rank at `coords`.

    Pieces wholly made of padding have no region. Of ranks that hold the same piece only the first owns it.
    """
    shapes = checkpoint_shapes(name, placement, local_shape)
    parts = dict.fromkeys(part.name for split in placement.splits for part in split.parts if part.name)
    named = dict(zip(parts, shapes, strict=True)) if len(shapes) > 1 else {}
    copied_over = {"tp", *placement.partial_over} - {split.axis for split in placement.splits}
    first = all(coords[axis] == 0 for axis in copied_over)
    found = []
    for stretches in product(*(_stretches(s, coords[s.axis], sizes[s.axis]) for s in placement.splits)):
        checkpoint, local = [(0, n) for n in local_shape], [(0, n) for n in local_shape]
        for split, stretch in zip(placement.splits, stretches, strict=True):
            checkpoint[split.dim], local[split.dim] = stretch.checkpoint, stretch.local
        tensor = next((named[stretch.name] for stretch in stretches if stretch.name in named), name)
        owned = first and all(stretch.owned for stretch in stretches)
        copies = prod(stretch.copies for stretch in stretches)
        found.append(Region(tensor, shapes[tensor], tuple(checkpoint), tuple(local), owned, copies))
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
    axis = placement.sharded_over
    if sharded:
        return narrow_rows(found, *fsdp_rows(local_shape[0], coords[axis], sizes[axis]))
    return found if coords[axis] == 0 else tuple(replace(region, owned=False) for region in found)


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

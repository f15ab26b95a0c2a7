"""Placements: the checkpoint slices of a local parameter, declared in a layer's `placements`."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import NamedTuple

from torch import nn

from dovetail.parallel.axes import Axis
from dovetail.parallel.mesh import Mesh


@dataclass(frozen=True)
class Part:
    """A checkpoint tensor of a (fused) local parameter.

    copies: neighboring ranks with the same slice. padding: zero rows.
    """

    name: str
    size: int
    copies: int = 1
    padding: int = 0

    @classmethod
    def padded(cls, name: str, size: int, axis_size: int) -> "Part":
        return cls(name, size, padding=-size % axis_size)

    def local_length(self, axis_size: int) -> int:
        return (self.size + self.padding) * self.copies // axis_size


@dataclass(frozen=True)
class Split:
    """A dim of a parameter that an axis shards, and the checkpoint tensors along it."""

    dim: int
    axis: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Placement:
    """A product of splits, at most one with several parts.

    partial_over: axes over which gradients are summed.
    sharded_over: the axis over which FSDP2 shards the rows.
    """

    splits: tuple[Split, ...] = ()
    partial_over: tuple[str, ...] = ()
    sharded_over: str = "fsdp"


REPLICATED = Placement()
Slices = tuple[tuple[int, int], ...]  # (start, stop) by dim


@dataclass(frozen=True)
class Region:
    """A rectangle of a checkpoint tensor, and the same of the local parameter."""

    checkpoint_name: str
    checkpoint_shape: tuple[int, ...]
    checkpoint_slice: Slices
    local_slice: Slices
    owned: bool  # this holder writes it and counts it in norms
    copies: int = 1  # as `Part.copies`

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.checkpoint_slice)

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


def placements_of(model: nn.Module) -> dict[str, Placement]:
    """Return the placement of each parameter; without one it is replicated."""
    placements = {}
    names = dict(model.named_parameters())
    for prefix, module in model.named_modules():
        declared: Mapping[str, Placement] = module.__dict__.get("placements", {})
        for leaf, _ in module.named_parameters(recurse=False):
            name = f"{prefix}.{leaf}" if prefix else leaf
            if name in names:
                placements[name] = declared.get(leaf, REPLICATED)
    return placements


def _part_names(placement: Placement) -> list[str]:
    names: dict[str, None] = {}
    for split in placement.splits:
        names |= dict.fromkeys(part.name for part in split.parts if part.name)
    return [*names]


def checkpoint_names(name: str, placement: Placement) -> tuple[str, ...]:
    """Return the names of the checkpoint tensors of a parameter."""
    parts = _part_names(placement)
    if len(parts) < 2:
        return (name,)
    stem, _, leaf = name.rpartition(".")
    parent, _, _ = stem.rpartition(".")
    start = f"{parent}." if parent else ""
    return tuple(f"{start}{part}.{leaf}" for part in parts)


def checkpoint_shapes(
    name: str, placement: Placement, shape: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the checkpoint tensors of a parameter of this local shape."""
    names = checkpoint_names(name, placement)
    shapes = {name: [*shape] for name in names}
    for split in placement.splits:
        sizes: dict[str, int] = defaultdict(int)
        for part in split.parts:
            sizes[part.name] += part.size
        lengths = [*sizes.values()]
        if len(lengths) == 1:
            lengths *= len(names)
        for tensor, length in zip(names, lengths, strict=True):
            shapes[tensor][split.dim] = length
    return {name: tuple(shape) for name, shape in shapes.items()}


class _PartRange(NamedTuple):
    """The indices of a part along its dim, in the checkpoint and in the local parameter."""

    part: Part
    checkpoint: tuple[int, int]
    local: tuple[int, int]


def _part_ranges(split: Split, axis: Axis) -> Iterator[_PartRange]:
    checkpoint_ends: dict[str, int] = defaultdict(int)
    local = 0
    for part in split.parts:
        length = part.local_length(axis.size)
        base = checkpoint_ends[part.name]
        start = axis.rank // part.copies * length
        stop = min(start + length, part.size)
        if stop > start:
            checkpoint = (base + start, base + stop)
            yield _PartRange(part, checkpoint, (local, local + stop - start))
        checkpoint_ends[part.name] += part.size
        local += length


def fsdp_rows(rows: int, rank: int, size: int) -> tuple[int, int]:
    """Return the rows of a rank: equal chunks, rounded up."""
    chunk = -(-rows // size)
    return min(rank * chunk, rows), min((rank + 1) * chunk, rows)


def narrow_rows(held: Sequence[Region], start: int, stop: int) -> tuple[Region, ...]:
    """Return the parts of regions in local rows [start, stop), counted from `start`."""
    narrowed = []
    for region in held:
        (first, end), *local_rest = region.local_slice
        (checkpoint_first, _), *checkpoint_rest = region.checkpoint_slice
        low = max(first, start)
        high = min(end, stop)
        if low < high:
            offset = checkpoint_first - first
            checkpoint = ((low + offset, high + offset), *checkpoint_rest)
            local = ((low - start, high - start), *local_rest)
            narrowed.append(replace(region, checkpoint_slice=checkpoint, local_slice=local))
    return tuple(narrowed)


def held_regions(
    name: str, placement: Placement, local_shape: tuple[int, ...], mesh: Mesh, *, sharded: bool
) -> tuple[Region, ...]:
    """Return the slices of a local parameter without padding, after FSDP2's sharding.

    Each is owned by its first holder.
    """
    shapes = checkpoint_shapes(name, placement, local_shape)
    splits = placement.splits
    named = dict(zip(_part_names(placement), shapes, strict=True)) if len(shapes) > 1 else {}
    axis = mesh[placement.sharded_over]
    copied_over = {"tp", "dp_replicate", *placement.partial_over} - {split.axis for split in splits}
    is_first = all(mesh[name].rank == 0 for name in copied_over) and (sharded or axis.rank == 0)
    held = []
    for ranges in product(*(_part_ranges(split, mesh[split.axis]) for split in splits)):
        tensor = name
        checkpoint = [*whole(local_shape)]
        local = checkpoint.copy()
        owned = is_first
        copies = 1
        for split, (part, checkpoint_range, local_range) in zip(splits, ranges, strict=True):
            tensor = named.get(part.name, tensor)
            checkpoint[split.dim] = checkpoint_range
            local[split.dim] = local_range
            owned = owned and mesh[split.axis].rank % part.copies == 0
            copies *= part.copies
        held.append(Region(tensor, shapes[tensor], tuple(checkpoint), tuple(local), owned, copies))
    if not sharded:
        return tuple(held)
    start, stop = fsdp_rows(local_shape[0], axis.rank, axis.size)
    return narrow_rows(held, start, stop)


def whole(shape: Sequence[int]) -> Slices:
    """Return the slices of a whole tensor."""
    return tuple((0, length) for length in shape)


def shape_of(slices: Slices) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in slices)


def overlap(first: Slices, second: Slices) -> Slices | None:
    """Return the rectangle that both have, or None."""
    shared = []
    for (start, stop), (other_start, other_stop) in zip(first, second, strict=True):
        low = max(start, other_start)
        high = min(stop, other_stop)
        if low >= high:
            return None
        shared.append((low, high))
    return tuple(shared)


def within(inner: Slices, outer: Slices) -> Slices:
    """Return `inner`, counted from the start of `outer`."""
    pairs = zip(inner, outer, strict=True)
    return tuple((start - base, stop - base) for (start, stop), (base, _) in pairs)


def as_index(slices: Slices) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in slices)

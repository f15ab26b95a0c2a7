"""Placements: the checkpoint slices of a local parameter, declared in a layer's `placements`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import NamedTuple

from torch import nn

from dovetail.parallel.mesh import Axis, Mesh


@dataclass(frozen=True)
class Part:
    """A checkpoint tensor of a (fused) local parameter. copies: neighboring ranks with the same slice. padding: zero rows."""

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
    dim: int
    axis: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Placement:
    """A product of splits, at most one with several parts. partial_over: axes over which gradients are summed."""

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
        return tuple(stop - start for start, stop in self.checkpoint_slice)

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


def placements_of(model: nn.Module) -> dict[str, Placement]:
    placements: dict[str, Placement] = {}
    names = dict(model.named_parameters())
    for prefix, module in model.named_modules():
        declared: Mapping[str, Placement] = module.__dict__.get("placements", {})
        for leaf, _ in module.named_parameters(recurse=False):
            name = f"{prefix}.{leaf}" if prefix else leaf
            if name in names:
                placements[name] = declared.get(leaf, REPLICATED)
    return placements


def _part_names(placement: Placement) -> list[str]:
    return list(
        dict.fromkeys(part.name for split in placement.splits for part in split.parts if part.name)
    )


def checkpoint_names(name: str, placement: Placement) -> tuple[str, ...]:
    parts = _part_names(placement)
    if len(parts) < 2:
        return (name,)
    stem, _, leaf = name.rpartition(".")
    parent, _, _ = stem.rpartition(".")
    return tuple(f"{parent}.{part}.{leaf}" if parent else f"{part}.{leaf}" for part in parts)


def checkpoint_shapes(
    name: str, placement: Placement, shape: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    names = checkpoint_names(name, placement)
    shapes = dict.fromkeys(names, shape)
    for split in placement.splits:
        sizes: dict[str, int] = {}
        for part in split.parts:
            sizes[part.name] = sizes.get(part.name, 0) + part.size
        whole = list(sizes.values()) * (len(names) if len(sizes) == 1 else 1)
        for tensor, size in zip(names, whole, strict=True):
            shapes[tensor] = (*shapes[tensor][: split.dim], size, *shapes[tensor][split.dim + 1 :])
    return shapes


class _Stretch(NamedTuple):
    part: Part
    checkpoint: tuple[int, int]
    local: tuple[int, int]


def _stretches(split: Split, axis: Axis) -> Iterator[_Stretch]:
    at: dict[str, int] = {}
    offset = 0
    for part in split.parts:
        length = part.local_length(axis.size)
        base = at.get(part.name, 0)
        start = axis.rank // part.copies * length
        stop = min(start + length, part.size)
        if stop > start:
            yield _Stretch(part, (base + start, base + stop), (offset, offset + stop - start))
        at[part.name] = base + part.size
        offset += length


def fsdp_rows(rows: int, rank: int, size: int) -> tuple[int, int]:
    """Equal chunks, rounded up."""
    chunk = -(-rows // size)
    return min(rank * chunk, rows), min((rank + 1) * chunk, rows)


def narrow_rows(held: Sequence[Region], start: int, stop: int) -> tuple[Region, ...]:
    """Parts of regions in local rows [start, stop), counted from `start`."""
    out = []
    for region in held:
        (low, high), *rest = region.local_slice
        lo = max(low, start)
        hi = min(high, stop)
        if lo < hi:
            at = region.checkpoint_slice[0][0] + lo - low
            checkpoint = ((at, at + hi - lo), *region.checkpoint_slice[1:])
            out.append(
                replace(
                    region,
                    checkpoint_slice=checkpoint,
                    local_slice=((lo - start, hi - start), *rest),
                )
            )
    return tuple(out)


def held_regions(
    name: str, placement: Placement, local_shape: tuple[int, ...], mesh: Mesh, *, sharded: bool
) -> tuple[Region, ...]:
    """Slices of a local parameter without padding, after FSDP2's sharding. Each is owned by its first holder."""
    shapes = checkpoint_shapes(name, placement, local_shape)
    splits = placement.splits
    named = dict(zip(_part_names(placement), shapes, strict=True)) if len(shapes) > 1 else {}
    axis = mesh[placement.sharded_over]
    copied_over = {"tp", *placement.partial_over} - {split.axis for split in splits}
    first = all(mesh[name].rank == 0 for name in copied_over) and (sharded or axis.rank == 0)
    held = []
    for stretches in product(*(_stretches(split, mesh[split.axis]) for split in splits)):
        checkpoint = [(0, n) for n in local_shape]
        local = [(0, n) for n in local_shape]
        for split, stretch in zip(splits, stretches, strict=True):
            checkpoint[split.dim], local[split.dim] = stretch.checkpoint, stretch.local
        tensor = next((named[s.part.name] for s in stretches if s.part.name in named), name)
        owners = (
            mesh[split.axis].rank % s.part.copies == 0
            for split, s in zip(splits, stretches, strict=True)
        )
        owned = first and all(owners)
        copies = prod(s.part.copies for s in stretches)
        held.append(Region(tensor, shapes[tensor], tuple(checkpoint), tuple(local), owned, copies))
    return (
        narrow_rows(held, *fsdp_rows(local_shape[0], axis.rank, axis.size))
        if sharded
        else tuple(held)
    )


def overlap(first: Slices, second: Slices) -> Slices | None:
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def within(inner: Slices, outer: Slices) -> Slices:
    return tuple(
        (start - base, stop - base) for (start, stop), (base, _) in zip(inner, outer, strict=True)
    )


def as_index(slices: Slices) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in slices)

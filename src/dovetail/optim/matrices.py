"""Matrices of a sharded model, as Muon updates them, and the ranks that do it."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from dovetail.parallel.axes import Axis
from dovetail.parallel.placement import Region, Slices, as_index, overlap, shape_of, within
from dovetail.weights.shards import FUSED

ROUND_ELEMENTS = 3 << 26  # of a rank at a time; more where one matrix is larger
Shape = tuple[int, int]


@dataclass(frozen=True)
class LocalShard:
    """The part of a parameter that this rank holds and updates."""

    name: str
    local: nn.Parameter
    regions: tuple[Region, ...]


class MatrixShard(NamedTuple):
    """A rectangle of a matrix, and its place in a parameter of this rank."""

    matrix: str
    shape: Shape  # of the matrix
    slices: Slices
    owned: bool
    parameter: nn.Parameter
    local_index: tuple[Any, ...]


class Holder(NamedTuple):
    """A rank that has a rectangle of a matrix."""

    rank: int
    slices: Slices
    owned: bool


@dataclass(frozen=True)
class Assignment:
    """A matrix, the rank that orthogonalizes it, and all ranks that hold parts of it."""

    matrix: str
    shape: Shape
    owner: int
    holders: tuple[Holder, ...]

    @property
    def is_tall(self) -> bool:
        rows, columns = self.shape
        return rows > columns

    @property
    def owned(self) -> list[Holder]:
        """Holders of the whole matrix without copies."""
        return [holder for holder in self.holders if holder.owned]


def matrix_shards(shard: LocalShard) -> Iterator[MatrixShard]:
    """Yield the matrices as HF has them: q, k and v apart, and gate and up of each expert."""
    for region in shard.regions:
        if len(region.checkpoint_shape) > 2:
            yield from _expert_shards(shard, region)
            continue
        rows, columns = region.checkpoint_shape
        slices = region.checkpoint_slice
        index = as_index(region.local_slice)
        name = region.checkpoint_name
        yield MatrixShard(name, (rows, columns), slices, region.owned, shard.local, index)


def _expert_shards(shard: LocalShard, region: Region) -> Iterator[MatrixShard]:
    name = region.checkpoint_name
    held = region.checkpoint_slice
    offset = within(held, region.local_slice)  # from the parameter's indices to the checkpoint's
    num_parts = next(len(parts) for ending, parts in FUSED if name.endswith(ending))
    _, rows, columns = region.checkpoint_shape
    size = rows // num_parts
    for expert in range(*held[0]):
        for number in range(num_parts):
            start = number * size
            matrix = ((expert, expert + 1), (start, start + size), (0, columns))
            shared = overlap(held, matrix)
            if shared is None:
                continue
            _, *slices = within(shared, matrix)
            (local_expert, _), *local_slices = within(shared, offset)
            yield MatrixShard(
                f"{name}.{expert}.{number}",
                (size, columns),
                tuple(slices),
                region.owned,
                shard.local,
                (local_expert, *as_index(tuple(local_slices))),
            )


def assign_owners(
    shards: Sequence[Sequence[tuple[str, Shape, Slices, bool]]],
) -> list[Assignment]:
    """Assign each matrix to its least loaded holder. shards: those of each rank."""
    shapes = {}
    holders: dict[str, list[Holder]] = defaultdict(list)
    for rank, held in enumerate(shards):
        for matrix, (rows, columns), rectangle, owned in held:
            shapes[matrix] = (rows, columns)
            slices = tuple((start, stop) for start, stop in rectangle)
            holders[matrix].append(Holder(rank, slices, owned))
    ranks = {}
    for matrix, held_by in holders.items():
        ranks[matrix] = sorted({holder.rank for holder in held_by})

    def least_choice_then_longest(matrix: str) -> tuple[int, int, str]:
        return len(ranks[matrix]), -_work(shapes[matrix]), matrix

    work = [0] * len(shards)
    assignments = []
    for matrix in sorted(holders, key=least_choice_then_longest):
        shape = shapes[matrix]
        owner = min(ranks[matrix], key=lambda rank: work[rank])
        work[owner] += _work(shape)
        assignments.append(Assignment(matrix, shape, owner, tuple(holders[matrix])))
    return assignments


def _work(shape: Shape) -> int:
    short, long = sorted(shape)
    return short * short * (2 * long + short)


def split_rounds(assignments: Sequence[Assignment], world: Axis) -> list[list[Assignment]]:
    """Return the rounds of the update: each has the matrices of which this rank holds a part."""
    rounds: list[list[Assignment]] = []
    numbers = [0] * world.size
    filled = [0] * world.size
    for job in sorted(assignments, key=lambda job: (sorted(job.shape), job.matrix)):
        owner = job.owner
        elements = math.prod(job.shape)
        if filled[owner] and filled[owner] + elements > ROUND_ELEMENTS:
            numbers[owner] += 1
            filled[owner] = 0
        filled[owner] += elements
        while len(rounds) <= numbers[owner]:
            rounds.append([])
        if any(holder.rank == world.rank for holder in job.holders):
            rounds[numbers[owner]].append(job)
    return rounds


def num_elements(slices: Slices) -> int:
    return math.prod(shape_of(slices))

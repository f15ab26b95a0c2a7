"""Two halves of a micro-batch in turns: while a collective of one half is under way, the other half computes.

A layer that waits for other ranks is written as a generator, which yields once something is under way that it will wait for;
what it returns is its output. Run alone it goes straight through. In a backward pass the same happens in reverse: autograd
takes operations in the reverse order of the forward pass, and a `Crossing` begins at its second point and ends at its first.
"""

from collections.abc import Generator, Sequence
from itertools import chain, cycle
from typing import TypeVar

from torch import Tensor

from dovetail.crossing import arrive, leave, scattering
from dovetail.mesh import Axis

T = TypeVar("T")
Turns = Generator[None, None, T]


def straight(turns: Turns[T]) -> T:
    """From beginning to end."""
    while True:
        try:
            next(turns)
        except StopIteration as end:
            return end.value


def side_by_side(both: Sequence[Turns[T]], ahead: int = 0) -> tuple[T, ...]:
    """All to their ends, in turns; the first one is so many turns ahead: see `turns_ahead`."""
    ends: dict[int, T] = {}
    order = chain([0] * ahead, cycle(range(len(both))))
    while len(ends) < len(both):
        i = next(order)
        if i not in ends:
            try:
                next(both[i])
            except StopIteration as end:
                ends[i] = end.value
    return tuple(ends[i] for i in range(len(both)))


def turns_ahead(tp: Axis) -> int:
    """By how many the first half of a block is best ahead of the second.

    Between two collectives of tensor-parallel layers lie two turns with products in them and one with hardly more than a norm:
    one turn ahead, each half has products under the other's collectives, but for the first and the last of a block.
    """
    return 1 if tp.size > 1 else 0


def pause(axis: Axis) -> Turns[None]:
    """A turn of the other half, where the axis has collectives for it to cover."""
    if axis.size > 1:
        yield


def scattered(x: Tensor, axis: Axis) -> Turns[Tensor]:
    """`comm.reduce_scatter`: [n, ...] -> [n / size, ...]."""
    left = leave(x, crossing := scattering(axis))
    yield from pause(axis)
    return arrive(left, crossing)

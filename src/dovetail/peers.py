"""Gathers and sums between GPUs of one host by their copy engines, which leave the multiprocessors to products.

NCCL's collectives run on multiprocessors, and a product beside one loses those. Here every rank of an axis has a ring of slots in
memory that all of them reach (torch's symmetric memory). Collectives are numbered, and number k takes slot k % SLOTS of each
ring:

    gather    each rank lays its shard into its own slot and tells the others k; told by all, it copies their slots
    scatter   each rank copies to the slots of the others what they sum, and tells them k; told by all, it adds up its own slot

What is told is a number in the other's memory, which the front end of a GPU writes and waits for between two copies. Copies
within a GPU and sums need multiprocessors, and would wait for a long product beside them: they belong to the computation's
own stream, before the copies of a gather and after those of a scatter.

No slot is overwritten too early. What a rank does beside its computation is done in order, and it begins a collective when it has
taken the one SLOTS - 1 before. So when it lays a shard down for k, it was told k - SLOTS + 1 by all, who had copied k - SLOTS by
then. And when it copies to a slot for k, it was told k - 1 by all: by its owner, who had taken k - SLOTS by then, and by the
others, who had copied it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

Add = Callable[[Tensor, Tensor], object]  # [size, ...] and [...], which becomes the sum of the first, in order
SLOTS = 4
LEAST = 1 << 19  # bytes; a smaller tensor is as fast otherwise
MOST = 1 << 28  # bytes of a slot; a ring for larger tensors would take too much memory


class Memory(Protocol):
    """The slots of all ranks, as this one reaches them, and the numbers that it is told."""

    slot_bytes: int

    def slot(self, rank: int, number: int) -> Tensor:
        """The slot of that rank for a collective of that number, as bytes."""

    def follow(self) -> None:
        """What is asked for next comes after what the computation was asked for so far, and beside what it is asked for next."""

    def copy(self, to: Tensor, source: Tensor) -> None:
        """From dense memory to dense memory, beside the computation; all that is asked for there happens in its order."""

    def tell(self, number: int) -> None:
        """All others."""

    def wait(self, number: int) -> None:
        """For all others to have told this number, or a later one."""

    def mark(self) -> Callable[[], None]:
        """What makes the computation, in whatever stream it is then, wait for all that was asked for beside it so far."""


def _nothing() -> None:
    pass


class Copying:
    """A collective under way. It keeps what copies read and write until it is taken."""

    def __init__(
        self, number: int, copied: Callable[[], None], used: tuple[Tensor, ...], end: Callable[[], None] = _nothing
    ) -> None:
        self.number, self.copied, self.used, self.end = number, copied, used, end

    def wait(self) -> None:
        """The computation goes on with the result."""
        self.copied()
        self.end()
        self.used, self.end = (), _nothing


class Peers:
    """The collectives of one axis, which all its ranks begin in the same order and of the same sizes."""

    def __init__(
        self, rank: int, size: int, make: Callable[[int], Memory | None], add: Add, least: int = LEAST
    ) -> None:
        """make: slots of so many bytes, collectively; None, on every rank, where they cannot be had. least: bytes of a tensor
        that they are for.
        """
        self.rank, self.size, self.least, self._make, self._add = rank, size, least, make, add
        self.others = [(rank + step) % size for step in range(1, size)]  # each rank begins with another one
        self.allowed, self.begun = True, 0
        self._memory: Memory | None = None
        self._open: deque[Copying] = deque()

    def takes(self, num_bytes: int) -> bool:
        """Whether collectives are for these whose shard, or all parts of it, have so many bytes; on every rank alike.

        Collective where memory must grow.
        """
        if not (self.allowed and self.least <= num_bytes <= MOST):
            return False
        if self._memory is None or self._memory.slot_bytes < num_bytes:
            while self._open:
                self._open.popleft().wait()
            self._memory = self._make(
                1 << (num_bytes - 1).bit_length()
            )  # which waits for what others do with the old one
            self.allowed = self._memory is not None
        return self.allowed

    def gather(self, places: Sequence[Tensor], x: Tensor) -> Copying:
        """Begin to fill the places, one a rank and each like x, with the x of all ranks. All are dense."""
        memory, number = self._begin()
        _like(memory.slot(self.rank, number), x).copy_(x)
        if places[self.rank].data_ptr() != x.data_ptr():
            places[self.rank].copy_(x)
        memory.follow()
        memory.tell(number)
        memory.wait(number)
        for peer in self.others:
            memory.copy(places[peer], _like(memory.slot(peer, number), x))
        return self._keep(Copying(number, memory.mark(), (x, *places)))

    def scatter(self, out: Tensor, parts: Sequence[Tensor]) -> Copying:
        """Begin to fill out with the sum over the ranks of the part that each of them has for this one. Parts, one a rank, are
        like out, and dense. They are added in rank order, wide, and rounded once.
        """
        memory, number = self._begin()
        memory.follow()
        for peer in self.others:
            memory.copy(self._parts(memory.slot(peer, number), out)[self.rank], parts[peer])
        memory.tell(number)
        memory.wait(number)

        def add() -> None:
            came, mine = self._parts(memory.slot(self.rank, number), out), parts[self.rank]
            if self.size == 2:
                torch.add(mine, came[1 - self.rank], out=out)
            else:
                came[self.rank].copy_(mine)
                self._add(came, out)
            memory.follow()  # before anything else is told

        return self._keep(Copying(number, memory.mark(), (out, *parts), add))

    def _begin(self) -> tuple[Memory, int]:
        """The next number, when those are taken whose slots it needs."""
        assert self._memory is not None
        self.begun += 1
        while self._open and self._open[0].number <= self.begun - SLOTS + 1:
            self._open.popleft().wait()
        return self._memory, self.begun

    def _keep(self, copying: Copying) -> Copying:
        self._open.append(copying)
        return copying

    def _parts(self, slot: Tensor, out: Tensor) -> Tensor:
        """What all ranks bring to a slot, by rank."""
        return slot[: self.size * out.nbytes].view(out.dtype).view(self.size, *out.shape)


def _like(slot: Tensor, x: Tensor) -> Tensor:
    """The beginning of a slot, as a tensor of the shape of `x`."""
    return slot[: x.nbytes].view(x.dtype).view(x.shape)

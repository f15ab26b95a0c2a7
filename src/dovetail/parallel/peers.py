"""Gathers and sums between GPUs of one host by their copy engines, which leave the multiprocessors to products.

NCCL's collectives run on multiprocessors, and a product beside one loses those. Here every rank of an axis has a ring of slots in
memory that all of them reach (torch's symmetric memory). Collectives are numbered, and of n slots number k takes slot k % n of
each ring:

    gather    each rank lays its shard into its own slot and tells the others k; told by all, it copies their slots
    scatter   each rank copies to the slots of the others what they sum, and tells them k; told by all, it adds up its own slot

What is told is a number in the other's memory, which the front end of a GPU writes and waits for between two copies. Copies
within a GPU and sums need multiprocessors, and would wait for a long product beside them: they belong to the computation's
own stream, before the copies of a gather and after those of a scatter.

No slot is overwritten too early. What a rank does beside its computation is done in order, and it begins a collective when it has
taken the one n - 1 before. So when it lays a shard down for k, it was told k - n + 1 by all, who had copied k - n by then, and
its own sum of k - n is before it in the computation. And when it copies to a slot for k, it was told k - 1 by all: by its
owner, who had taken k - n by then, and by the others, who had copied it.

The computation may be in another stream for each collective, but takes it in the stream in which it began it. A record of a
stream's work that is replayed, such as a CUDA graph, cannot have collectives in it: their numbers would be old.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

LEAST = 1 << 19  # bytes; a smaller tensor is as fast otherwise


class Ring(NamedTuple):
    """What every rank has of one. Two slots are enough where each collective is taken before the next one begins."""

    slots: int
    slot_bytes: int


class Piece(NamedTuple):
    """Some of what a rank brings to a sum for another one: dense, and flat. What no piece has may be anything."""

    at: int  # in what that rank is to get
    numbers: Tensor


class Memory(Protocol):
    """The slots of all ranks, as this one reaches them, and the numbers that it is told."""

    device: torch.device
    ring: Ring

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

    def here(self) -> Callable[[], None]:
        """What makes the computation, in whatever stream it is then, wait for what it was asked for so far in this one."""


class Kernels(Protocol):
    """Of the computation, on the device of the memory: see `kernels.reference`."""

    @property
    def sum_deterministic(self) -> Callable[..., Tensor]: ...

    @property
    def copy_to_both(self) -> Callable[..., None]: ...


class Copying:
    """A collective under way. It keeps what copies read and write until it is taken."""

    def __init__(
        self, number: int, memory: Memory, used: tuple[Tensor, ...], end: Callable[[], None] | None = None
    ) -> None:
        """end: what the computation has to do when the copies are made."""
        self.number, self.memory, self.used, self.end = number, memory, used, end
        self.ready = memory.mark()

    def wait(self) -> None:
        """The computation goes on with the result."""
        self.ready()
        if self.end is not None:
            self.end()
            self.ready, self.end = self.memory.here(), None
        self.used = ()


class Peers:
    """The collectives of one axis, which all its ranks begin in the same order and of the same sizes."""

    def __init__(self, rank: int, size: int, memory: Memory, kernels: Kernels, least: int = LEAST) -> None:
        """least: bytes of a tensor that they are for."""
        self.rank, self.size, self.memory, self.kernels, self.least = rank, size, memory, kernels, least
        self.others = [(rank + step) % size for step in range(1, size)]  # each rank begins with another one
        self.begun = 0
        self._latest: deque[Copying] = deque()

    def takes(self, x: Tensor, times: int = 1) -> bool:
        """Whether they are for a shard, or for all parts of a sum, such as x so many times; on every rank alike."""
        most, here = self.memory.ring.slot_bytes, x.device.type == self.memory.device.type
        return here and self.least <= times * x.nbytes <= most

    def gather(self, places: Sequence[Tensor], x: Tensor) -> Copying:
        """Begin to fill the places, one a rank and each like x, with the x of all ranks. All are dense."""
        number, memory = self._begin(), self.memory
        slot, place = _like(memory.slot(self.rank, number), x), places[self.rank]
        if place.data_ptr() == x.data_ptr():
            slot.copy_(x)
        else:
            self.kernels.copy_to_both(x, slot, place)
        memory.follow()
        memory.tell(number)
        memory.wait(number)
        for peer in self.others:
            memory.copy(places[peer], _like(memory.slot(peer, number), x))
        return self._keep(Copying(number, memory, (x, *places)))

    def scatter(self, out: Tensor, parts: Sequence[Sequence[Piece]]) -> Copying:
        """Begin to fill out, which is dense, with the sum over the ranks of what each of them has for this one. Parts: what this
        one has, by rank. They are added in rank order, wide, and rounded once.
        """
        number, memory = self._begin(), self.memory
        memory.follow()
        for peer in self.others:
            place = self._parts(memory.slot(peer, number), out)[self.rank]
            for at, numbers in parts[peer]:
                memory.copy(place[at : at + len(numbers)], numbers)
        memory.tell(number)
        memory.wait(number)

        def add() -> None:
            came, flat = self._parts(memory.slot(self.rank, number), out), out.view(-1)
            for at, numbers in parts[self.rank]:
                here = slice(at, at + len(numbers))
                self.kernels.sum_deterministic(came[:, here], out=flat[here], own=(self.rank, numbers))
            memory.follow()  # before anything else is told

        return self._keep(Copying(number, memory, (out, *(piece.numbers for part in parts for piece in part)), add))

    def _begin(self) -> int:
        """The next number, when those are taken whose slots it needs."""
        self.begun += 1
        for copying in self._latest:
            if copying.number <= self.begun - self.memory.ring.slots + 1:
                copying.wait()
        return self.begun

    def _keep(self, copying: Copying) -> Copying:
        self._latest.append(copying)
        if len(self._latest) > self.memory.ring.slots:
            self._latest.popleft()
        return copying

    def _parts(self, slot: Tensor, out: Tensor) -> Tensor:
        """What all ranks bring to a slot, by rank, flat."""
        return slot[: self.size * out.nbytes].view(out.dtype).view(self.size, -1)


def rows_of(x: Tensor, ranks: int) -> list[list[Piece]]:
    """Of dense x [ranks rows, ...]: rows for every rank, in their order."""
    return [[Piece(0, part)] for part in x.view(ranks, -1)]


def _like(slot: Tensor, x: Tensor) -> Tensor:
    """The beginning of a slot, as a tensor of the shape of `x`."""
    return slot[: x.nbytes].view(x.dtype).view(x.shape)

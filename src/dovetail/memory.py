"""Contiguous memory that hands out aligned views, and state that steps aside to the host: few allocations, large copies.

Transfer buckets, snapshots for background saves and offloaded parameters all are many tensors in one stretch of bytes.
"""

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

from dovetail.system import free_memory

ALIGNMENT = 64  # bytes; any dtype may begin there, and so may a vector load
DEVICE_ALIGNMENT = 512  # bytes; of what torch's allocator for devices hands out
CHUNK_BYTES = 1 << 28  # of an arena; a power of two, since the allocator of pinned memory rounds up to one
SMALL_BYTES = 1 << 20  # requests up to which torch's allocator for devices serves from blocks of its own
LARGE_BYTES = 1 << 30  # such requests are likely to come several times: what a block keeps of a long sequence
HOST_RESERVE = 1 << 32  # bytes of the host's memory that are left to others: data, workers, libraries


def aligned(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    """The bytes that a tensor of `num_bytes` takes up in a buffer."""
    return -(-num_bytes // alignment) * alignment


def view_at(data: Tensor, start: int, dtype: torch.dtype, shape: Iterable[int]) -> Tensor:
    """The tensor that lies at byte `start` of `data` [bytes], without a copy."""
    shape = tuple(shape)
    return data[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def chunk_bytes(needed: int, most: int | None = None) -> int:
    """Of pinned memory that a request of that size begins: a power of two. Large ones leave an eighth unused at most, or
    more where no such chunk has at most `most` bytes, but a smaller one has room for one request.
    """
    size = CHUNK_BYTES
    while size < needed or (needed > LARGE_BYTES and size % needed > size // 8):
        size *= 2
    while most is not None and size > most and size // 2 >= max(needed, CHUNK_BYTES):
        size //= 2
    return size


def host_room() -> int | None:
    """Bytes of the host's memory that may be pinned still; None where nobody knows, and then nothing limits it."""
    found = free_memory()
    return None if found is None else max(found - HOST_RESERVE, 0)


def ask_once(sizes: Iterable[int], device: torch.device) -> None:
    """Have a device's allocator ask the driver once for what tensors of these sizes, in bytes, take next.

    The driver takes about as long for a tensor as for all; the allocator cuts what it has. On the host nothing happens.
    """
    needed = sum(aligned(size, DEVICE_ALIGNMENT) for size in sizes if size > SMALL_BYTES)
    if device.type == "cuda" and needed:
        torch.empty(needed, dtype=torch.uint8, device=device)  # at once free again, and kept


class PinnedArena:
    """Memory in large chunks that hands out views until `reset`, which makes all of it free again, still allocated."""

    def __init__(self, device: torch.device | str = "cpu", *, pinned: bool = False) -> None:
        self.device, self.pinned = device, pinned
        self._chunks: list[Tensor] = []
        self._chunk = self._used = 0

    def reserve(self, num_bytes: int) -> None:
        """Have memory for so many bytes more: in one chunk; pinned memory in the powers of two that they are the sum of."""
        while num_bytes > 0:
            size = max(1 << (num_bytes.bit_length() - 1), CHUNK_BYTES) if self.pinned else num_bytes
            self._add(size)
            num_bytes -= size

    def take(self, dtype: torch.dtype, shape: Iterable[int]) -> Tensor:
        """Uninitialized memory of that shape, contiguous and aligned."""
        shape = tuple(shape)
        needed = aligned(prod(shape) * dtype.itemsize)
        while self._chunk < len(self._chunks) and self._used + needed > len(self._chunks[self._chunk]):
            self._chunk, self._used = self._chunk + 1, 0
        if self._chunk == len(self._chunks):
            self._add(self._growth(needed))
        view = view_at(self._chunks[self._chunk], self._used, dtype, shape)
        self._used += needed
        return view

    def has(self, num_bytes: int) -> bool:
        """Whether `take` finds so many bytes in what is there."""
        needed = aligned(num_bytes)
        free = [len(chunk) for chunk in self._chunks[self._chunk :]]
        return any(needed <= size - (self._used if i == 0 else 0) for i, size in enumerate(free))

    def grow(self, num_bytes: int, most: int) -> bool:
        """Have memory in which `take` finds so many bytes, unless that takes more than `most`: whether there is."""
        needed = aligned(num_bytes)
        size = self._growth(needed, most)
        if size > most:
            return False
        self._add(size)
        return True

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor`, perhaps still under way: wait for its device before reading it."""
        return self.take(tensor.dtype, tensor.shape).copy_(tensor, non_blocking=True)

    def reset(self) -> None:
        """Take all views back; whoever still holds one will see it change."""
        self._chunk = self._used = 0

    def _growth(self, needed: int, most: int | None = None) -> int:
        return chunk_bytes(needed, most) if self.pinned else max(needed, ALIGNMENT)

    def _add(self, num_bytes: int) -> None:
        self._chunks.append(torch.empty(num_bytes, dtype=torch.uint8, device=self.device, pin_memory=self.pinned))

    @property
    def num_bytes(self) -> int:
        return sum(len(chunk) for chunk in self._chunks)


class OffloadedState:
    """Tensors whose contents wait on the host while their own memory is free. The tensors stay the objects they are.

    Storages, not tensors, are emptied, so every view of them (FSDP2's, the optimizer's) is whole again after `restore`.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {storage.data_ptr(): storage for storage in (x.untyped_storage() for x in tensors) if len(storage)}
        self._storages = list(storages.values())
        device = self._storages[0].device if self._storages else torch.device("cpu")
        self._device = device
        arena = PinnedArena(pinned=device.type != "cpu")
        self._copies = [arena.copy(_bytes_of(storage)) for storage in self._storages]
        wait_for(device)
        for storage in self._storages:
            storage.resize_(0)

    @property
    def num_bytes(self) -> int:
        return sum(len(copy) for copy in self._copies)

    def restore(self) -> None:
        """Give the tensors their memory and contents back."""
        for storage, copy in zip(self._storages, self._copies, strict=True):
            storage.resize_(len(copy))
            _bytes_of(storage).copy_(copy, non_blocking=True)
        wait_for(self._device)
        self._storages, self._copies = [], []


def wait_for(device: torch.device) -> None:
    """Wait until what was asked of the device is done."""
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

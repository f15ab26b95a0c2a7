"""Arenas for transfer buckets, snapshots and offloaded state."""

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

from dovetail.system import free_memory

ALIGNMENT = 64  # bytes, for any dtype and vector load
DEVICE_ALIGNMENT = 512  # bytes, of torch's device allocator
CHUNK_BYTES = 1 << 28  # the allocator of pinned memory rounds up to a power of two
SMALL_BYTES = 1 << 20  # torch's device allocator serves smaller requests from pooled blocks
LARGE_BYTES = 1 << 30  # larger requests tend to repeat
HOST_RESERVE = 1 << 32  # bytes for data, workers and libraries


def aligned(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    return -(-num_bytes // alignment) * alignment


def view_at(data: Tensor, start: int, dtype: torch.dtype, shape: Iterable[int]) -> Tensor:
    """data [bytes]; start in bytes."""
    shape = tuple(shape)
    return data[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def chunk_bytes(needed: int, most: int | None = None) -> int:
    """Size of a pinned chunk, a power of two."""
    size = CHUNK_BYTES
    while size < needed or (needed > LARGE_BYTES and size % needed > size // 8):
        size *= 2
    while most is not None and size > most and size // 2 >= max(needed, CHUNK_BYTES):
        size //= 2
    return size


def free_pinned_bytes() -> int | None:
    """Bytes that may be pinned; None: unknown."""
    free = free_memory()
    return None if free is None else max(free - HOST_RESERVE, 0)


def reserve_device_memory(sizes: Iterable[int], device: torch.device) -> None:
    """Reserve CUDA memory for tensors of these bytes in one call."""
    needed = sum(aligned(size, DEVICE_ALIGNMENT) for size in sizes if size > SMALL_BYTES)
    if device.type == "cuda" and needed:
        torch.empty(
            needed, dtype=torch.uint8, device=device
        )  # freed at once; the allocator keeps it


class PinnedArena:
    """Chunks of memory that serve views until `reset`."""

    def __init__(self, device: torch.device | str = "cpu", *, pinned: bool = False) -> None:
        self.device = device
        self.pinned = pinned
        self._chunks: list[Tensor] = []
        self._chunk = self._used = 0

    def reserve(self, num_bytes: int) -> None:
        while num_bytes > 0:
            size = max(1 << (num_bytes.bit_length() - 1), CHUNK_BYTES) if self.pinned else num_bytes
            self._add(size)
            num_bytes -= size

    def allocate(self, dtype: torch.dtype, shape: Iterable[int]) -> Tensor:
        shape = tuple(shape)
        needed = aligned(prod(shape) * dtype.itemsize)
        while self._chunk < len(self._chunks) and self._used + needed > len(
            self._chunks[self._chunk]
        ):
            self._chunk = self._chunk + 1
            self._used = 0
        if self._chunk == len(self._chunks):
            self._add(self._growth(needed))
        view = view_at(self._chunks[self._chunk], self._used, dtype, shape)
        self._used += needed
        return view

    def has(self, num_bytes: int) -> bool:
        needed = aligned(num_bytes)
        free = [len(chunk) for chunk in self._chunks[self._chunk :]]
        return any(needed <= size - (self._used if i == 0 else 0) for i, size in enumerate(free))

    def grow(self, num_bytes: int, most: int) -> bool:
        size = self._growth(aligned(num_bytes), most)
        if size <= most:
            self._add(size)
        return size <= most

    def copy(self, tensor: Tensor) -> Tensor:
        """Asynchronous: synchronize before reading it."""
        return self.allocate(tensor.dtype, tensor.shape).copy_(tensor, non_blocking=True)

    def reset(self) -> None:
        self._chunk = self._used = 0

    def _growth(self, needed: int, most: int | None = None) -> int:
        return chunk_bytes(needed, most) if self.pinned else max(needed, ALIGNMENT)

    def _add(self, num_bytes: int) -> None:
        self._chunks.append(
            torch.empty(num_bytes, dtype=torch.uint8, device=self.device, pin_memory=self.pinned)
        )

    @property
    def num_bytes(self) -> int:
        return sum(len(chunk) for chunk in self._chunks)


class OffloadedState:
    """Tensors on the host until `restore`; views stay valid."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {
            storage.data_ptr(): storage
            for storage in (x.untyped_storage() for x in tensors)
            if len(storage)
        }
        self._storages = list(storages.values())
        self._device = self._storages[0].device if self._storages else torch.device("cpu")
        arena = PinnedArena(pinned=self._device.type != "cpu")
        self._copies = [arena.copy(_bytes_of(storage)) for storage in self._storages]
        wait_for(self._device)
        for storage in self._storages:
            storage.resize_(0)

    @property
    def num_bytes(self) -> int:
        return sum(len(copy) for copy in self._copies)

    def restore(self) -> None:
        for storage, copy in zip(self._storages, self._copies, strict=True):
            storage.resize_(len(copy))
            _bytes_of(storage).copy_(copy, non_blocking=True)
        wait_for(self._device)
        self._storages = []
        self._copies = []


def wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

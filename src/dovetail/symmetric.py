"""Slots in memory that all GPUs of an axis reach, and numbers that they tell each other: what `peers` needs, on CUDA.

The memory is torch's symmetric memory. A number is written into another GPU's memory, and waited for, by a stream's own
operations (cuStreamWriteValue32, cuStreamWaitValue32), which torch does not have both of: they are asked of the driver.
"""

import ctypes
import platform
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric

from dovetail.errors import MachineError
from dovetail.peers import SLOTS, Add, Peers

NUMBER = 4  # bytes of what is told
AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ, in arithmetic that wraps around


class SymmetricSlots:
    """`peers.Memory` on a GPU. Made by all ranks of the group together; raises RuntimeError where the memory cannot be had."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int, device: torch.device, slot_bytes: int) -> None:
        self.slot_bytes, self.rank = slot_bytes, rank
        self.others = [other for other in range(size) if other != rank]
        self._side = torch.cuda.Stream(device, priority=-1)
        all_slots = SLOTS * slot_bytes
        self._own = symmetric.empty(all_slots + NUMBER * size, dtype=torch.uint8, device=device)
        self._handle = symmetric.rendezvous(self._own, group)
        everyone = [self._handle.get_buffer(other, self._own.shape, torch.uint8) for other in range(size)]
        self._slots = [memory[:all_slots].view(SLOTS, slot_bytes) for memory in everyone]
        self._told = [memory.data_ptr() + all_slots for memory in everyone]  # where each rank is told, by rank
        self._own[all_slots:].zero_()
        torch.cuda.synchronize(device)

    def slot(self, rank: int, number: int) -> Tensor:
        return self._slots[rank][number % SLOTS]

    def follow(self) -> None:
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))

    def copy(self, to: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._side):
            to.copy_(source, non_blocking=True)

    def tell(self, number: int) -> None:
        for other in self.others:
            _ask("cuStreamWriteValue32_v2", self._side, self._told[other] + NUMBER * self.rank, number, 0)

    def wait(self, number: int) -> None:
        for other in self.others:
            _ask("cuStreamWaitValue32_v2", self._side, self._told[self.rank] + NUMBER * other, number, AT_LEAST)

    def mark(self) -> Callable[[], None]:
        done = self._side.record_event()
        return lambda: torch.cuda.current_stream(self._side.device).wait_event(done)


def peers_of(group: dist.ProcessGroup, rank: int, size: int, device: torch.device, add: Add) -> Peers | None:
    """Of several GPUs; whether they reach each other shows when they are first needed. None for other devices."""
    if device.type != "cuda" or torch.version.cuda is None or size == 1:
        return None
    return Peers(rank, size, partial(_slots, group, rank, size, device), add)


def _slots(
    group: dist.ProcessGroup, rank: int, size: int, device: torch.device, slot_bytes: int
) -> SymmetricSlots | None:
    """Those of one axis, or None on all its ranks. Collective; afterwards nobody uses slots of before any more."""
    told: list[Any] = [None] * size
    dist.all_gather_object(told, _facts(device), group)
    if (
        len({host for host, *_ in told}) > 1
        or len({gpu for _, gpu, _ in told}) < size
        or not all(able for *_, able in told)
    ):
        return None
    found, error = None, ""
    try:
        found = SymmetricSlots(group, rank, size, device, slot_bytes)
    except RuntimeError as problem:
        error = str(problem)
    dist.all_gather_object(told, error, group)
    if not any(told):
        return found
    if rank == 0:
        first = next(filter(None, told)).splitlines()[0]
        warnings.warn(f"GPUs do not share memory, so their collectives go by NCCL alone: {first}", stacklevel=2)
    return None


def _facts(device: torch.device) -> tuple[str, str, bool]:
    """This rank's host and GPU, and whether it has what it takes: the driver, and the way to the other GPUs that it sees."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = boot.read_text() if boot.exists() else platform.node()
    index = torch.cuda.current_device() if device.index is None else device.index
    others = [other for other in range(torch.cuda.device_count()) if other != index]
    able = _driver() is not None and all(torch.cuda.can_device_access_peer(index, other) for other in others)
    return host, str(torch.cuda.get_device_properties(index).uuid), able


@cache
def _driver() -> Any:
    """CUDA's driver, with the two operations of streams; None where it is not found."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"):
            getattr(library, name).argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    except (OSError, AttributeError):
        return None
    return library


def _ask(name: str, stream: torch.cuda.Stream, place: int, number: int, flags: int) -> None:
    status = getattr(_driver(), name)(stream.cuda_stream, place, number % (1 << 32), flags)
    if status:
        raise MachineError(f"{name} says {status}")

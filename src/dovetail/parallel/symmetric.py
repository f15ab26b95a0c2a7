"""Slots in memory that all GPUs of an axis reach, and numbers that they tell each other: what `peers` needs, on CUDA.

The memory is torch's symmetric memory. A number is written into another GPU's memory, and waited for, by a stream's own
operations (cuStreamWriteValue32, cuStreamWaitValue32), which torch does not have both of: they are asked of the driver.

Rings are made all at once, by all ranks of the job together, and do not grow: torch counts how many a process has made, and
ranks that had made different numbers of them would wait for each other in vain.
"""

import ctypes
import json
import platform
import warnings
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric

from dovetail.errors import MachineError
from dovetail.parallel.collectives import gather_text
from dovetail.parallel.mesh import Axis
from dovetail.parallel.peers import Kernels, Peers, Ring

NUMBER = 4  # bytes of what is told
FAILED = Event()  # then nobody of this job tries again: its ranks may have made unequal numbers of rings
AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ, in arithmetic that wraps around


class SymmetricSlots:
    """`peers.Memory` on a GPU: of `memory`, which all ranks of the axis have made."""

    def __init__(self, axis: Axis, memory: Tensor, ring: Ring) -> None:
        """Collective over the axis. Raises RuntimeError."""
        self.device, self.ring, self.rank = memory.device, ring, axis.rank
        self.others = [other for other in range(axis.size) if other != axis.rank]
        all_slots = ring.slots * ring.slot_bytes
        memory[all_slots:].zero_()
        torch.cuda.synchronize(memory.device)
        assert axis.group is not None
        self._handle = symmetric.rendezvous(memory, axis.group)
        everyone = [self._handle.get_buffer(rank, memory.shape, torch.uint8) for rank in range(axis.size)]
        self._slots = [each[:all_slots].view(*ring) for each in everyone]
        self._told = [each.data_ptr() + all_slots for each in everyone]  # where each rank is told, by rank
        self._side = torch.cuda.Stream(memory.device, priority=-1)

    def sign(self) -> None:
        """Leave this rank's number with all others, and try what streams are asked for. Raises RuntimeError."""
        for other in (self.rank, *self.others):
            self._slots[other][0][self.rank] = self.rank
        self.tell(0)
        self.wait(0)
        torch.cuda.synchronize(self.device)

    def signed(self) -> bool:
        """Whether all have signed here: it is their memory that this rank reaches, and its own that they do."""
        size = len(self._slots)
        return self._slots[self.rank][0][:size].tolist() == list(range(size))

    def slot(self, rank: int, number: int) -> Tensor:
        return self._slots[rank][number % self.ring.slots]

    def follow(self) -> None:
        assert not torch.cuda.is_current_stream_capturing(), "numbers in a record would be old when it is replayed"
        self._side.wait_stream(torch.cuda.current_stream(self.device))

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
        return self._after(self._side)

    def here(self) -> Callable[[], None]:
        return self._after(torch.cuda.current_stream(self.device))

    def _after(self, stream: torch.cuda.Stream) -> Callable[[], None]:
        done = stream.record_event()
        return lambda: torch.cuda.current_stream(self.device).wait_event(done)


def rings(
    world: Axis, axes: Mapping[str, Axis], sizes: Mapping[str, Ring], device: torch.device, kernels: Kernels
) -> dict[str, Peers]:
    """A ring for each of these axes whose GPUs reach each other, in all groups of that name. Collective over the world; a warning
    says why where GPUs that should do not.

    sizes: of the rings.
    """
    if device.type != "cuda" or torch.version.cuda is None or FAILED.is_set():
        return {}
    told = partial(_everyone, world=world, device=device)
    facts = [Facts(*each) for each in told(_facts(device))]
    near = told([name for name, axis in axes.items() if _is_near(axis, facts)])
    found: dict[str, Peers] = {}
    names = [name for name in axes if all(name in each for each in near)]
    if names and any(each.seen == 1 for each in facts):
        _warn("a rank sees no other's (CUDA_VISIBLE_DEVICES)", world)
        return {}
    for name in names:
        slots, problem = _slots(axes[name], sizes[name], device, told)
        if slots is None:
            FAILED.set()
            _warn(problem, world)
            return {}
        found[name] = Peers(axes[name].rank, axes[name].size, slots, kernels)
    return found


class Facts(NamedTuple):
    """Where a rank is, how many GPUs it sees, and whether it has what it takes: the driver, and the way to those others."""

    host: str
    gpu: str
    seen: int
    able: bool


def _facts(device: torch.device) -> Facts:
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = boot.read_text() if boot.exists() else platform.node()
    index = torch.cuda.current_device() if device.index is None else device.index
    seen = torch.cuda.device_count()
    others = [other for other in range(seen) if other != index]
    able = _driver() is not None and all(torch.cuda.can_device_access_peer(index, other) for other in others)
    return Facts(host, str(torch.cuda.get_device_properties(index).uuid), seen, able)


def _is_near(axis: Axis, facts: list[Facts]) -> bool:
    """Whether it has several GPUs, all of one host, that may reach each other."""
    if axis.group is None or axis.size == 1:
        return False
    mine = [facts[rank] for rank in dist.get_process_group_ranks(axis.group)]
    own_gpus = len({each.gpu for each in mine}) == len(mine)
    return len({each.host for each in mine}) == 1 and own_gpus and all(each.able for each in mine)


def _slots(
    axis: Axis, ring: Ring, device: torch.device, told: Callable[[Any], list[Any]]
) -> tuple[SymmetricSlots | None, str]:
    """Those of one axis, for all ranks of the job or for none, and then why."""
    memory: Tensor | None = None
    slots: SymmetricSlots | None = None

    def allocate() -> None:
        nonlocal memory
        torch.cuda.empty_cache()
        memory = symmetric.empty(ring.slots * ring.slot_bytes + NUMBER * axis.size, dtype=torch.uint8, device=device)

    def meet() -> None:
        nonlocal slots
        assert memory is not None
        slots = SymmetricSlots(axis, memory, ring)

    def sign() -> None:
        assert slots is not None
        slots.sign()

    def read() -> None:
        assert slots is not None
        if not slots.signed():
            raise MachineError("what one GPU wrote did not arrive at another")

    for step in (allocate, meet, sign, read):
        problems = [each for each in told(_problem_of(step)) if each]
        if problems:
            return None, problems[0]
    return slots, ""


def _problem_of(step: Callable[[], None]) -> str:
    """What went wrong with it, if anything."""
    try:
        step()
    except RuntimeError as error:
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


def _everyone(mine: Any, world: Axis, device: torch.device) -> list[Any]:
    """What each rank of the job says, in rank order; what json can say."""
    return [json.loads(text) for text in gather_text(json.dumps(mine), world, device)]


def _warn(problem: str, world: Axis) -> None:
    if world.rank == 0:
        text = (
            f"NCCL moves everything, since these GPUs could not share memory: {problem}; "
            "layout.copy_engines: false does not try"
        )
        warnings.warn(text, stacklevel=2)


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

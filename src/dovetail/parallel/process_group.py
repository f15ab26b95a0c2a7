"""The device of a rank, its process group, determinism and stop signals.

Ranks are those of torchrun's environment, else there is one.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # they are public
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from dovetail.errors import ConfigError, LayoutError, LostStore, MachineError, SecondaryFailure
from dovetail.parallel.axes import TIMEOUT
from dovetail.parallel.devices import check_count, has_npu, refuse_absent
from dovetail.parallel.meeting import Meeting
from dovetail.system import raise_open_files_limit

BACKENDS: Mapping[str, str] = {
    "cpu": "gloo",
    "cuda": "cpu:gloo,cuda:nccl",
    "npu": "cpu:gloo,npu:hccl",
}
RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
FAILURE_COUNTER_KEY = "dovetail/failures"
DEVICE_KEY = "dovetail/devices"
CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
# Hardware queues of a GPU, read at CUDA's first use: FSDP2 and NCCL have more streams than the
# default 8, and in a shared queue computation waits for a transfer whose other end may wait for it.
QUEUES = ("CUDA_DEVICE_MAX_CONNECTIONS", "32")
# cuBLAS's own size on Hopper: so set, its sums have one order
CUBLAS = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
PROFILER = ("KINETO_LOG_LEVEL", "6")  # the profiler writes to standard error
NOT_DETERMINISTIC = "does not have a deterministic implementation"  # torch's message
KERNEL_CACHES = ("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "QUACK_CACHE_DIR")


def pick_device(name: str = "auto") -> torch.device:
    """Return a device and make it current: by LOCAL_RANK, unless one is visible.

    name: auto, cpu, cuda or npu. ConfigError, LayoutError.
    """
    os.environ.setdefault(*QUEUES)
    os.environ.setdefault(*CUBLAS)
    os.environ.setdefault(*PROFILER)
    present = {
        "cuda": torch.cuda.is_available(),
        "npu": has_npu(),
    }
    if name == "auto":
        name = next((kind for kind, available in present.items() if available), "cpu")
    if name not in BACKENDS:
        raise ConfigError(f"device {name!r}; expected auto, {', '.join(BACKENDS)}")
    if name == "cpu":
        return torch.device("cpu")
    if not present[name]:
        refuse_absent(name)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.get_device_module(name).device_count()
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    ranks = max(local + 1, local_world)  # so that rank 0 reports it
    if name == "cuda" and count == 1 and CUDA_VISIBLE_DEVICES in os.environ:
        local = 0
    else:
        check_count(name, ranks, count)
    device = torch.device(name, local)
    torch.get_device_module(name).set_device(device)
    if name == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        _set_kernel_cache(f"sm{major}{minor}")
    return device


def _set_kernel_cache(architecture: str) -> None:
    """Set a folder for each GPU architecture, which the keys of some packages lack."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    folder = base / "dovetail" / "kernels" / architecture
    with contextlib.suppress(OSError, RuntimeError):  # there may be no home
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
            for variable in KERNEL_CACHES:
                os.environ.setdefault(variable, str(folder))


@contextlib.contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Let torch, and kernels that follow its flag, compute the same bits in every run.

    New memory is not filled. ConfigError.
    """
    mode = torch.get_deterministic_debug_mode()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # a documented setting
    torch.set_deterministic_debug_mode("error" if enabled else "default")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a documented setting
    try:
        yield
    except RuntimeError as error:
        operation, lacks, _ = str(error).partition(NOT_DETERMINISTIC)
        if not lacks:
            raise
        raise ConfigError(
            f"trainer.deterministic=true: torch has no deterministic form of {operation.strip()}, "
            "which this model needs; set trainer.deterministic=false"
        ) from error
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]  # a documented setting


@contextlib.contextmanager
def process_group(
    device: torch.device,
    timeout: timedelta = TIMEOUT,
    met: Callable[..., None] = lambda *_: None,
    tell: Callable[[str], object] = lambda _: None,
) -> Iterator[None]:
    """Make the default group, unless there is one.

    Only the first rank that fails raises its own error.
    tell: gets a sentence about who is missing while ranks wait for others to come.
    met: gets store, rank and world when all ranks have come.
    """
    if dist.is_initialized():
        yield
        return
    store, rank, world = _meet(timeout, tell)
    with _one_report(store):
        met(store, rank, world)
        _initialize(device, store, rank, world, timeout)
        yield
        dist.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def temporary_process_group(device: torch.device, timeout: timedelta = TIMEOUT) -> Iterator[None]:
    """Make the default group for a process that lives on, unless there is one. Collective."""
    if dist.is_initialized():
        yield
        return
    environment = [os.environ.get(name) for name in RENDEZVOUS]
    store, rank, world = _kept_store(*environment)
    start = store.add(f"dovetail/starts/{rank}", 1)  # keys of an earlier group remain
    _initialize(device, PrefixStore(f"dovetail/start-{start}", store), rank, world, timeout)
    try:
        yield
    except BaseException:
        if world == 1:  # others may wait in it
            dist.destroy_process_group()
        raise
    dist.barrier()
    dist.destroy_process_group()


@cache
def _kept_store(*_: str | None) -> tuple[Store, int, int]:
    return _meet()


@contextlib.contextmanager
def _one_report(store: Store) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        try:
            first = store.add(FAILURE_COUNTER_KEY, 1) == 1
        except dist.DistError:  # the store ended with the first failing rank
            raise LostStore("the store of the ranks is gone") from error
        if not first:
            raise SecondaryFailure("another rank failed first") from error
        raise


def num_ranks() -> int:
    return dist.get_world_size()


def num_ranks_here(device: torch.device) -> int:
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    world = num_ranks()
    if local.isdecimal():
        return min(world, int(local))
    visible = 1 if device.type == "cpu" else torch.get_device_module(device).device_count()
    return min(world, visible) if visible > 1 else world


def ensure_process_group(device: torch.device | str = "cpu") -> None:
    if not dist.is_initialized():
        _initialize(torch.device(device), *_meet())


class StopSignal:
    """A request to stop: the first SIGTERM or SIGINT sets `number`. Main thread only.

    The next signal acts as usual, but for a launcher's repeats.
    """

    REPEAT_SECONDS = 1.0

    def __init__(self) -> None:
        self.number = 0
        self._first_time = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        for number, action in self._before.items():
            signal.signal(number, action)

    def _stop(self, number: int, _: FrameType | None) -> None:
        if not self.number:
            self.number = number
            self._first_time = time.monotonic()
            return
        is_repeat = time.monotonic() - self._first_time <= self.REPEAT_SECONDS
        if "RANK" not in os.environ or not is_repeat:
            signal.signal(number, self._before[signal.Signals(number)])
            signal.raise_signal(number)


def _meet(
    timeout: timedelta = TIMEOUT,
    tell: Callable[[str], object] = lambda _: None,
) -> tuple[Store, int, int]:
    """Return this start's part of the ranks' store, this rank, and the number of ranks."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return HashStore(), 0, 1
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            "RANK and WORLD_SIZE say that a launcher started this process, but "
            f"{' and '.join(missing)} is not set; set it, start with torchrun, "
            "or unset RANK to have dovetail start its own ranks"
        )
    place = os.environ["MASTER_ADDR"]
    port = os.environ["MASTER_PORT"]
    if not (port.isdecimal() and int(port) < 1 << 16):
        raise ConfigError(
            f"MASTER_PORT={port}: expected a whole number below 65536, a port of "
            f"MASTER_ADDR={place}"
        )
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    tell(f"the store at MASTER_ADDR={place}, MASTER_PORT={port} did not answer")
    try:
        store = TCPStore(
            place,
            int(port),
            world,
            is_master=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistError as error:
        reason = str(error).partition("\n")[0]
        raise MachineError(
            f"the ranks could not meet at MASTER_ADDR={place}, MASTER_PORT={port}: {reason}\n"
            "start all of them again, with a port that nobody listens at "
            "and an address that all machines reach"
        ) from error
    meeting = Meeting(store, rank, world, tell)
    try:
        name = meeting.gather(timeout.total_seconds())
    except dist.DistError as error:
        problem = f"{meeting.missing}, and the store of the ranks is gone"
        raise MachineError(f"{problem}; start all ranks again") from error
    return PrefixStore(f"dovetail/{name}", store), rank, world


def _initialize(
    device: torch.device, store: Store, rank: int, world: int, timeout: timedelta = TIMEOUT
) -> None:
    if world > 1:
        raise_open_files_limit()  # a group has dozens of sockets
        _claim_device(device, store, rank)
    dist.init_process_group(
        BACKENDS[device.type],
        store=PrefixStore("dovetail/group", store),
        rank=rank,
        world_size=world,
        timeout=timeout,
        device_id=None if device.type == "cpu" else device,
    )


def _claim_device(device: torch.device, store: Store, rank: int) -> None:
    if device.type != "cuda":
        return
    name = torch.cuda.get_device_properties(device).uuid
    owner = int(store.compare_set(f"{DEVICE_KEY}/{name}", "", str(rank)))
    if owner != rank:
        raise LayoutError(
            f"ranks {owner} and {rank} have the same {device.type} device, {name}; use fewer ranks "
            f"a machine, show each rank another by {CUDA_VISIBLE_DEVICES}, or use --device cpu"
        )

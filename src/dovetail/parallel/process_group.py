"""What a rank needs to join the others: its device, the default process group, and who reports a failure.

Ranks come from the environment (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT`), whoever set it:
torchrun, a cluster, or `dovetail.launch`. Without it this process is a group of one rank. Of the ranks that fail,
the first to take the ticket in the group's store raises its own error; the others raise `SecondaryFailure`.
"""

import contextlib
import importlib.util
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, rendezvous  # type: ignore[attr-defined]  # they are public

from dovetail.errors import ConfigError, LayoutError, LostStore, MachineError, SecondaryFailure
from dovetail.parallel.mesh import PATIENCE

BACKENDS: Mapping[str, str] = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}
FAILURE_COUNTER_KEY = "dovetail/failures"
DEVICE_KEY = "dovetail/devices"  # by which rank each
CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
# One queue for each stream of a GPU, of which FSDP2 and NCCL's groups have more than the default 8. In a queue that two
# share, computation waits for a transfer whose other end may wait for that computation. CUDA reads it at its first use.
QUEUES = ("CUDA_DEVICE_MAX_CONNECTIONS", "32")
# Eight buffers of 4 MiB for cuBLAS, as many bytes as it takes by itself on Hopper: with them its sums have one order.
CUBLAS = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
NOT_DETERMINISTIC = "does not have a deterministic implementation"  # of torch's message
COMPILED = ("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "QUACK_CACHE_DIR")  # where these packages keep what they compiled

OPEN_FILES = 1 << 13  # that a rank may want: each group has dozens of sockets, each layout of a job a dozen groups


def pick_device(name: str = "auto") -> torch.device:
    """This rank's device: `auto`, `cpu`, `cuda` or `npu`. An accelerator is chosen by LOCAL_RANK and made current.

    Where a launcher shows each rank but one GPU, that one: whether it is the rank's own is told when the ranks meet.
    """
    os.environ.setdefault(*QUEUES)
    os.environ.setdefault(*CUBLAS)
    present = {"cuda": torch.cuda.is_available(), "npu": importlib.util.find_spec("torch_npu") is not None}
    if name == "auto":
        name = next((kind for kind, there in present.items() if there), "cpu")
    if name not in BACKENDS:
        raise ConfigError(f"device {name!r}; expected auto, {', '.join(BACKENDS)}")
    if name == "cpu":
        return torch.device("cpu")
    if not present[name]:
        raise ConfigError(f"device {name!r}: torch {torch.__version__} sees none here; use --device cpu or auto")
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.get_device_module(name).device_count()
    ranks = max(local + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))  # so that rank 0, which speaks, refuses too
    if name == "cuda" and count == 1 and CUDA_VISIBLE_DEVICES in os.environ:
        local = 0
    elif ranks > count:
        raise LayoutError(
            f"{ranks} ranks on this machine need a {name} device each, there are {count}; use fewer ranks a machine, or "
            "--device cpu"
        )
    device = torch.device(name, local)
    torch.get_device_module(name).set_device(device)
    if name == "cuda":
        _keep_compiled("sm{}{}".format(*torch.cuda.get_device_capability(device)))
    return device


def _keep_compiled(architecture: str) -> None:
    """Have kernels that packages compile kept in the user's own cache directory, where this process can write there.

    Each GPU architecture has a folder: not all of the packages' keys name it, and hosts may share a home.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "dovetail" / "kernels" / architecture
    with contextlib.suppress(OSError, RuntimeError):  # no home
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
            for variable in COMPILED:
                os.environ.setdefault(variable, str(folder))


@contextlib.contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Within the block torch, and the kernels that follow its flag, compute the same bits in every run on the same devices.

    ConfigError where an operation has no deterministic form. New memory is not filled, as torch's flag alone would have it.
    """
    mode, filled = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # a documented setting
    torch.set_deterministic_debug_mode("error" if enabled else "default")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a documented setting
    try:
        yield
    except RuntimeError as error:
        operation, lacks, _ = str(error).partition(NOT_DETERMINISTIC)
        if not lacks:
            raise
        raise ConfigError(
            f"trainer.deterministic=true: torch has no deterministic form of {operation.strip()}, which this model needs; set "
            "trainer.deterministic=false"
        ) from error
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]  # a documented setting


class ProcessGroup:
    """The default process group for the length of a `with` block; one that is already there is used as it is.

    At the end all ranks wait for each other. A failure leaves the group as it is, since the process is about to end.
    `patience`: after which who waits in a collective of it gives up. `met`: called with the store, this rank and the
    number of ranks as soon as all have met, before the group is made.
    """

    def __init__(
        self,
        device: torch.device,
        patience: timedelta = PATIENCE,
        met: Callable[[Store, int, int], None] = lambda *_: None,
    ) -> None:
        self.device, self.patience, self.met = device, patience, met
        self.store: Store | None = None

    def __enter__(self) -> Self:
        if not dist.is_initialized():
            store, rank, world = _meet()
            with _OneReport(store):
                self.met(store, rank, world)
                _initialize(self.device, store, rank, world, self.patience)
            self.store = store
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.store is None:
            return
        with _OneReport(self.store):
            if error is not None:
                raise error
            dist.barrier()
        dist.destroy_process_group()


class _OneReport:
    """Lets the error of the first rank that fails pass; any other's becomes `SecondaryFailure`."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, Exception) and not self._is_first():
            raise SecondaryFailure("another rank failed first") from error

    def _is_first(self) -> bool:
        """Take a ticket. A store that is gone went with the rank that failed before."""
        try:
            return self.store.add(FAILURE_COUNTER_KEY, 1) == 1
        except dist.DistError as error:
            raise LostStore("the store of the ranks is gone") from error


def num_ranks() -> int:
    """How many ranks the job has. The default process group exists."""
    return dist.get_world_size()


def num_ranks_here(device: torch.device) -> int:
    """How many ranks of the job this host has at most: as its launcher says, else as many as this rank sees devices."""
    said, world = os.environ.get("LOCAL_WORLD_SIZE", ""), num_ranks()
    if said.isdecimal():
        return min(world, int(said))
    seen = 1 if device.type == "cpu" else torch.get_device_module(device).device_count()
    return min(world, seen) if seen > 1 else world


def ensure_process_group(device: torch.device | str = "cpu") -> None:
    """Have a default process group: the one that is there, the one of the environment, or one of this process alone."""
    if not dist.is_initialized():
        _initialize(torch.device(device), *_meet())


class StopSignal:
    """Within the `with` block the first SIGTERM or SIGINT sets `number`, which is 0 before; the next one acts as usual.

    A rank may get one wish twice, straight and by its launcher: what comes within `SAME_WISH_SECONDS` is the same one.
    """

    SAME_WISH_SECONDS = 1.0

    def __init__(self) -> None:
        self.number = 0
        self._asked = 0.0

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, action in self._before.items():
            signal.signal(number, action)

    def _stop(self, number: int, _: FrameType | None) -> None:
        if not self.number:
            self.number, self._asked = number, time.monotonic()
        elif "RANK" not in os.environ or time.monotonic() - self._asked > self.SAME_WISH_SECONDS:
            signal.signal(number, self._before[signal.Signals(number)])
            signal.raise_signal(number)


def _meet() -> tuple[Store, int, int]:
    """The store that all ranks share, this rank, and how many there are."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return HashStore(), 0, 1
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"RANK and WORLD_SIZE say that a launcher started this process, but {' and '.join(missing)} is not set; set "
            "it, start with torchrun, or unset RANK to have dovetail start its own ranks"
        )
    place, port = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not (port.isdecimal() and int(port) < 1 << 16):
        raise ConfigError(f"MASTER_PORT={port}: expected a whole number below 65536, a port of MASTER_ADDR={place}")
    try:
        store, rank, world = next(rendezvous("env://", timeout=PATIENCE))
    except dist.DistError as error:
        reason = str(error).partition("\n")[0]
        raise MachineError(
            f"the ranks could not meet at MASTER_ADDR={place}, MASTER_PORT={port}: {reason}\nstart all of them again, with a "
            "port that nobody listens at and an address that all machines reach"
        ) from error
    return store, rank, world


def _initialize(device: torch.device, store: Store, rank: int, world: int, patience: timedelta = PATIENCE) -> None:
    """Make the default process group."""
    if world > 1:
        _allow_open_files()
        _take(device, store, rank)
    dist.init_process_group(
        BACKENDS[device.type],
        store=PrefixStore("dovetail/group", store),
        rank=rank,
        world_size=world,
        timeout=patience,
        device_id=None if device.type == "cpu" else device,
    )


def _take(device: torch.device, store: Store, rank: int) -> None:
    """Have a GPU for this rank alone, or raise LayoutError: two ranks would wait for each other in NCCL."""
    if device.type != "cuda":
        return
    name = torch.cuda.get_device_properties(device).uuid
    owner = int(store.compare_set(f"{DEVICE_KEY}/{name}", "", str(rank)))
    if owner != rank:
        raise LayoutError(
            f"ranks {owner} and {rank} have the same {device.type} device, {name}; use fewer ranks a machine, show each rank "
            f"another by {CUDA_VISIBLE_DEVICES}, or use --device cpu"
        )


def _allow_open_files() -> None:
    """Raise this process's limit of open files, which many systems begin at 1024, as far as they let it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

"""Runs test bodies on several ranks: worker processes that live for the whole test session, gloo, no ports.

`@distributed(world=N)` turns a test function into one whose body runs on N ranks; `run(world, fn, *args)` calls any
module-level function on N ranks and returns every rank's result. Both use the same workers: rank r is always worker r,
so a session never has more workers than its widest test; `tests.helpers.template` forks them. Every call gets a fresh default
process group (rendezvous through a file), a fixed seed and one thread. The first rank that reports an error gives the
test its traceback, and the workers of a failed or late call are killed, because nobody knows what they still wait for.
"""

import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import io
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._pytree import tree_map_only

from dovetail.parallel.process_group import BACKENDS, pick_device
from tests.helpers.template import TEMPLATES, Template

T = TypeVar("T")
TIMEOUT = 300.0  # seconds for one body, on every rank: far more than any takes on a busy machine
START_TIMEOUT = (
    180.0  # seconds for a template to import on a busy machine, and a worker to come of it
)
STACK_TIMEOUT = 10.0  # seconds for a worker to write its stacks


class RankFailed(AssertionError):
    """A rank raised, died or did not finish; the message holds its traceback."""


def run(
    world: int,
    fn: Callable[..., T],
    *args: Any,
    timeout: float = TIMEOUT,
    device: str = "cpu",
    **kwargs: Any,
) -> list[T]:
    """`fn(*args, **kwargs)` on ranks 0 .. world - 1 of a default process group; the results in rank order.

    `fn` must be importable by name, arguments and results must pickle; tensors come back detached, on the CPU.
    device: "cuda" gives each rank a GPU, of its own where there are enough, and the group NCCL.
    """
    job = (inspect.getmodule(fn).__name__, fn.__qualname__, args, kwargs)  # type: ignore[union-attr]  # never None
    return _POOL.call(world, job, timeout, device)


def needs_gpus(ranks: int) -> None:
    """Skip a test that `run` cannot run: each rank has a GPU, or RANKS_PER_GPU of them share one."""
    found, sharing = torch.cuda.device_count(), int(os.environ.get("RANKS_PER_GPU", "1"))
    if ranks > found * sharing:
        pytest.skip(f"{ranks} ranks, {found} GPUs, of which each takes {sharing} (RANKS_PER_GPU)")


def distributed(
    world: int, *, timeout: float = TIMEOUT
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated test on `world` ranks. Fixtures and parameters reach every rank, so they must pickle."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(*args: Any, **kwargs: Any) -> None:
            run(world, body, *args, timeout=timeout, **kwargs)

        test.__dict__["distributed_body"] = body
        return test

    return decorate


@dataclass
class _Worker:
    template: Template
    pid: int
    pipe: Connection
    stacks: Path  # where the worker writes the stacks of its threads on SIGUSR1

    def end(self) -> int:
        """Kill it if it runs; its exit code, negative for a signal."""
        self.pipe.close()
        return self.template.end(self.pid)

    def stack(self) -> str:
        """Where a rank that does not answer is right now."""
        os.kill(self.pid, signal.SIGUSR1)
        deadline, told = time.monotonic() + STACK_TIMEOUT, ""
        while time.monotonic() < deadline and (
            not told or told != self.stacks.read_text(errors="replace")
        ):
            told = self.stacks.read_text(errors="replace")
            time.sleep(0.3)
        return told


class _Pool:
    """The worker processes of this session; rank r runs on worker r."""

    def __init__(self) -> None:
        self.templates: list[Template] = []
        self.workers: dict[int, _Worker] = {}
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self.calls = self.apart = 0
        self.gpus = 0  # of the last call that had some

    def call(
        self, world: int, job: tuple[Any, ...], timeout: float, device: str = "cpu"
    ) -> list[Any]:
        """Run `job` on ranks 0 .. world - 1. Workers of a call that does not succeed are killed."""
        if device == "cuda" and world != self.gpus:
            # torch numbers what GPUs share by process, and ranks with unequal numbers would wait for each other
            self.discard(max(self.workers, default=-1) + 1)
            self.gpus = world
        folder = self._start(world)
        self.calls += 1
        store = folder / f"store-{self.calls}"
        try:
            for rank in range(world):
                message = (sys.path, rank, world, str(store), timeout, device, job)
                self.workers[rank].pipe.send_bytes(pickle.dumps(message))
            return self._collect(world, timeout)
        except BaseException:
            self.discard(world)
            raise
        finally:
            store.unlink(missing_ok=True)

    def discard(self, world: int) -> None:
        """Kill the workers of ranks 0 .. world - 1."""
        gone = [self.workers.pop(rank) for rank in range(world) if rank in self.workers]
        for worker in gone:
            worker.end()

    def close(self) -> None:
        """End all workers, politely first, and their templates."""
        for worker in self.workers.values():
            with contextlib.suppress(OSError):
                worker.pipe.send_bytes(b"")
        for worker in self.workers.values():
            with contextlib.suppress(OSError, EOFError):
                worker.pipe.poll(5)  # its end of the pipe closes
        self.discard(max(self.workers, default=-1) + 1)
        for template in self.templates:
            template.close()
        self.templates = []
        if self.folder is not None:
            self.folder.cleanup()
            self.folder = None

    def fresh(self) -> _Worker:
        """A worker that has run nothing and that no call will use; whoever asks for it ends it."""
        self.folder = self.folder or tempfile.TemporaryDirectory(prefix="ranks-")
        template = self.template()
        self.apart += 1
        stacks = Path(self.folder.name) / f"stacks-apart-{self.apart}"
        pipe = template.fork(stacks)
        if not pipe.poll(START_TIMEOUT):
            raise RankFailed(f"a worker did not start within {START_TIMEOUT:.0f} s")
        return _Worker(template, int(pipe.recv_bytes()), pipe, stacks)

    def template(self) -> Template:
        """The first template, which starts when it is first asked for."""
        if not self.templates:
            self.templates.append(Template(_serve))
        return self.templates[0]

    def _start(self, world: int) -> Path:
        """Have workers 0 .. world - 1 ready; those that are missing start together."""
        self.folder = self.folder or tempfile.TemporaryDirectory(prefix="ranks-")
        folder = Path(self.folder.name)
        fresh = [rank for rank in range(world) if rank not in self.workers]
        while fresh and len(self.templates) < min(world, TEMPLATES):
            self.templates.append(Template(_serve))
        pipes = {
            rank: self.templates[rank % TEMPLATES].fork(folder / f"stacks-{rank}") for rank in fresh
        }
        deadline = time.monotonic() + START_TIMEOUT
        try:
            for rank, pipe in pipes.items():
                if not pipe.poll(deadline - time.monotonic()):
                    raise RankFailed(f"worker {rank} did not start within {START_TIMEOUT:.0f} s")
                pid = int(pipe.recv_bytes())
                self.workers[rank] = _Worker(
                    self.templates[rank % TEMPLATES], pid, pipe, folder / f"stacks-{rank}"
                )
        except (EOFError, RankFailed):
            self.close()
            raise
        return folder

    def _collect(self, world: int, timeout: float) -> list[Any]:
        """Every rank's result; raises for the first rank that reports an error, dies, or is late."""
        results: dict[int, Any] = {}
        waiting = {self.workers[rank].pipe: rank for rank in range(world)}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                where = "\n".join(
                    f"rank {r}:\n{self.workers[r].stack()}" for r in sorted(waiting.values())
                )
                raise RankFailed(
                    f"ranks {sorted(waiting.values())} did not finish within {timeout:g} s\n{where}"
                )
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    kind, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    code = self.workers.pop(rank).end()
                    raise RankFailed(f"rank {rank} of {world} died with exit code {code}") from None
                if kind == "skipped":
                    pytest.skip(value)
                if kind == "failed":
                    raise RankFailed(f"rank {rank} of {world} failed\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(world)]


_POOL = _Pool()


class Apart:
    """A process of its own, of no group, that does one thing after another: it has one thread, and may fork."""

    def __init__(self) -> None:
        self.worker = _POOL.fresh()

    def __call__(self, fn: Callable[..., T], *args: Any) -> T:
        """`fn(*args)` there; what `run` says of both. A failure ends the process."""
        job: tuple[Any, ...] = (inspect.getmodule(fn).__name__, fn.__qualname__, args, {})  # type: ignore[union-attr]  # never None
        self.worker.pipe.send_bytes(pickle.dumps((sys.path, 0, 0, "", TIMEOUT, "cpu", job)))
        assert self.worker.pipe.poll(TIMEOUT), (
            f"not done within {TIMEOUT:g} s\n{self.worker.stack()}"
        )
        kind, value = pickle.loads(self.worker.pipe.recv_bytes())
        if kind != "ok":
            raise RankFailed(value)
        found: T = value
        return found

    def end(self) -> None:
        self.worker.end()


def fork_template() -> None:
    """Let the first template be a fork of this process, which has run nothing yet."""
    if not torch.accelerator.is_available():
        _POOL.templates.append(Template(_serve, here=True))


def template() -> Template:
    """The process that workers are forked from: of one thread, and with most modules."""
    return _POOL.template()


def close_workers() -> None:
    """End the session's workers; the next call starts new ones."""
    _POOL.close()


def worker_ids() -> dict[int, int]:
    """Process id by rank of the workers that are alive."""
    return {rank: worker.pid for rank, worker in _POOL.workers.items()}


def _serve(pipe: Connection, stacks: str) -> None:
    """A worker's life: one job after another until the pipe closes, or an empty message comes."""
    with open(stacks, "w") as file, contextlib.suppress(EOFError), _shapes_inferred_once():
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        pipe.send_bytes(b"%d" % os.getpid())
        while message := pipe.recv_bytes():
            pipe.send_bytes(_answer(*pickle.loads(message)))
    sys.stdout.flush()
    sys.stderr.flush()


def _answer(
    path: list[str],
    rank: int,
    world: int,
    store: str,
    timeout: float,
    device: str,
    job: tuple[Any, ...],
) -> bytes:
    """What one rank reports of one job: (`ok`, result), (`failed`, traceback) or (`skipped`, reason), pickled."""
    try:
        sys.path[:] = path
        module, name, args, kwargs = job
        fn = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        fn = vars(fn).get("distributed_body", fn)
        with (
            _process_group(rank, world, store, timeout, device)
            if world
            else contextlib.nullcontext()
        ):
            result = fn(*args, **kwargs)
            return _pickled(("ok", result))
    except pytest.skip.Exception as skipped:
        return _pickled(("skipped", str(skipped)))
    except BaseException:
        return _pickled(("failed", traceback.format_exc()))


@contextlib.contextmanager
def _shapes_inferred_once() -> Iterator[None]:
    """DTensor runs an operation on fake tensors for the shape that it gives, 10 ms each time; every body would do it anew."""
    infer, known = ShardingPropagator._propagate_tensor_meta_non_cached, {}

    def remembered(propagator: ShardingPropagator, schema: Any) -> Any:
        given = (schema.args_schema, schema.kwargs_schema)
        key = f"{schema.op} {tree_map_only(DTensorSpec, lambda spec: spec.tensor_meta, given)}"
        if key not in known:
            known[key] = infer(propagator, schema)
        return known[key]

    with mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", remembered):
        yield


class _SharedLoopGloo(dist.ProcessGroupGloo):
    """All groups of a worker on one transport: gloo wakes the thread of each transport 100 times a second."""

    devices: ClassVar[list[Any]] = []

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # stubs lack it
        self.devices[:] = self.devices or [dist.ProcessGroupGloo.create_device(interface="lo")]
        options._devices, options._threads, options._timeout = list(self.devices), 2, timeout
        super().__init__(store, rank, size, options)


@contextlib.contextmanager
def _process_group(
    rank: int, world: int, store: str, timeout: float, device: str
) -> Iterator[None]:
    """A default process group for one body. On failure it is left as it is: this process is about to be killed."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    file = dist.FileStore(store, world)  # type: ignore[attr-defined]  # torch exports it without saying so
    limit = timedelta(seconds=timeout + 30)  # the parent's limit comes first
    bound = None
    if device != "cpu":
        places = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
        if device == "cuda" and world > (gpus := torch.cuda.device_count()):
            # NCCL lets ranks of several hosts share a GPU, for it does not notice; it then sends through sockets
            places = {"LOCAL_RANK": rank % gpus, "LOCAL_WORLD_SIZE": gpus, "NCCL_HOSTID": rank}
        os.environ |= {name: str(value) for name, value in places.items()}
        bound = pick_device(device)
    with mock.patch.object(distributed_c10d, "ProcessGroupGloo", _SharedLoopGloo):
        dist.init_process_group(
            BACKENDS[device],
            store=file,
            rank=rank,
            world_size=world,
            timeout=limit,
            device_id=bound,
        )
        yield
    dist.barrier()  # nobody leaves while others still talk to it
    dist.destroy_process_group()
    # engines are cycles, and DTensor remembers meshes; what is left of either keeps three threads a group awake
    _clear_sharding_prop_cache()
    gc.collect()
    gc.freeze()  # what is left stays: the next collection need not look at it


class _Pickler(pickle.Pickler):
    """Sends tensors by value: detached, on the CPU, without the rest of the storage that they are views of."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and (
            obj.requires_grad or obj.device.type != "cpu" or _is_view(obj)
        ):
            return obj.detach().cpu().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _is_view(x: torch.Tensor) -> bool:
    return x.numel() * x.element_size() < x.untyped_storage().nbytes()


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()

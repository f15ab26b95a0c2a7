"""Buckets of weights, by files, shared memory or broadcasts."""

import base64
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dovetail.errors import CheckpointError, MachineError
from dovetail.inference_servers.checksums import Checksums
from dovetail.memory import aligned
from dovetail.weights.safetensors import memory_of

TransportKind = Literal["file", "nccl", "ipc"]
MEMORY_NAME = "dovetail-push"
OPEN_FILE = re.compile(r"/proc/\d+/fd/\d+")
SLOTS = 2  # one is filled while the other is sent


class BucketEntry(NamedTuple):
    name: str
    dtype: str  # without "torch."
    shape: tuple[int, ...]
    start: int
    checksum: str


@dataclass(frozen=True)
class WeightBucket:
    number: int
    entries: tuple[BucketEntry, ...]
    data: Tensor  # uint8


class Transport:
    """Memory for two buckets, used alternately; all that broadcasts need."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._slots: dict[int, Tensor] = {}

    def memory(self, number: int, num_bytes: int) -> Tensor:
        """Returns uint8, at least `num_bytes`: the memory of bucket `number - SLOTS`."""
        slot = self._slots.get(number % SLOTS)
        if slot is None or len(slot) < num_bytes:
            self._slots.pop(number % SLOTS, None)
            slot = self._slots[number % SLOTS] = self._allocate(number % SLOTS, num_bytes)
        return slot

    def publish(self, bucket: WeightBucket) -> None:
        """Makes a bucket visible to all servers."""

    def fields(self, bucket: WeightBucket, workers: int) -> list[dict[str, Any]]:
        """Returns the fields of a request: for all workers of a server, or for each."""
        return [{}]

    def close(self) -> None:
        """Frees the memory."""
        self._slots = {}

    def _allocate(self, slot: int, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)


class FileTransport(Transport):
    """Two files, used alternately, at paths that the servers see."""

    def __init__(self, directory: Path) -> None:
        super().__init__(torch.device("cpu"))
        self._parent = directory
        self._own = directory / f"push-{socket.gethostname()}-{os.getpid()}"

    def publish(self, bucket: WeightBucket) -> None:
        try:
            if not self._own.exists():
                self._sweep()
                self._own.mkdir(parents=True)
            self._path(bucket).write_bytes(memory_of(bucket.data))
        except OSError as error:
            raise MachineError(f"rollout.push.directory: {error}") from error

    def fields(self, bucket: WeightBucket, workers: int) -> list[dict[str, Any]]:
        return [{"file": str(self._path(bucket).resolve())}]

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._own, ignore_errors=True)

    def _path(self, bucket: WeightBucket) -> Path:
        return self._own / f"{bucket.number % SLOTS}.bucket"

    def _sweep(self) -> None:
        """Removes files of killed processes of this host."""
        for left in self._parent.glob(f"push-{socket.gethostname()}-*"):
            if not Path("/proc", left.name.rpartition("-")[2]).exists():
                shutil.rmtree(left, ignore_errors=True)


class MemoryTransport(Transport):
    """Memory that processes of this host map: by CUDA IPC, or an anonymous file of Linux."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._files: dict[int, int] = {}  # slot -> file descriptor

    def fields(self, bucket: WeightBucket, workers: int) -> list[dict[str, Any]]:
        if self.device.type == "cuda":
            return [{"memory": self._handle(bucket.data)} for _ in range(workers)]
        return [
            {"memory": {"path": f"/proc/{os.getpid()}/fd/{self._files[bucket.number % SLOTS]}"}}
        ]

    def close(self) -> None:
        super().close()
        files = self._files
        self._files = {}
        for file in files.values():
            os.close(file)
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()

    def _allocate(self, slot: int, num_bytes: int) -> Tensor:
        if self.device.type == "cuda":
            return super()._allocate(slot, num_bytes)
        if slot in self._files:
            os.close(self._files.pop(slot))
        self._files[slot] = file = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC)
        os.truncate(file, num_bytes)
        return torch.from_file(
            f"/proc/self/fd/{file}", shared=True, size=num_bytes, dtype=torch.uint8
        )

    def _handle(self, data: Tensor) -> dict[str, Any]:
        """Returns a handle for one process: torch counts those that open it."""
        storage = data.untyped_storage()
        _, handle, size, offset, counter, counter_offset, event, waits = storage._share_cuda_()
        parts = {"handle": handle, "counter": counter, "event": event}
        text = {name: base64.b64encode(raw).decode() for name, raw in parts.items()}
        numbers = {
            "size": size,
            "offset": offset,
            "counter_offset": counter_offset,
            "event_waits": waits,
        }
        return {
            "device": str(torch.cuda.get_device_properties(data.device).uuid),
            **text,
            **numbers,
        }


def map_memory(fields: Mapping[str, Any], num_bytes: int) -> Tensor:
    """Returns the uint8 memory that `MemoryTransport.fields` names, in another process."""
    if "path" in fields:
        return _map_file(str(fields["path"]), num_bytes)
    known = [
        str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())
    ]
    if fields["device"] not in known:
        raise CheckpointError(
            f"the trainer's GPU {fields['device']} is not visible here; use "
            "rollout.push.transport=nccl"
        )
    place = known.index(fields["device"])
    names = ("handle", "size", "offset", "counter", "counter_offset", "event")
    parts = [base64.b64decode(x) if isinstance(x := fields[name], str) else x for name in names]
    storage = torch.UntypedStorage._new_shared_cuda(place, *parts, fields["event_waits"])
    return torch.empty(0, dtype=torch.uint8, device=f"cuda:{place}").set_(
        storage, 0, (num_bytes,), (1,)
    )


def _map_file(path: str, num_bytes: int) -> Tensor:
    """Maps an open file of `MemoryTransport` alone: any other could be changed by that."""
    what = f"{path}, which is to be mapped,"
    if not OPEN_FILE.fullmatch(path):
        raise CheckpointError(f"{what} is not an open file of a trainer's process")
    try:
        name = os.readlink(path)
        size = os.stat(path).st_size
    except OSError as error:
        raise CheckpointError(f"{what} is not there: {error.strerror}") from error
    if not name.startswith(f"/memfd:{MEMORY_NAME} "):
        raise CheckpointError(f"{what} is not memory of a trainer")
    if size < num_bytes:
        raise CheckpointError(f"{what} has {size} bytes, announced were {num_bytes}")
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


def make_transport(kind: TransportKind, device: torch.device, directory: Path) -> Transport:
    if kind == "file":
        return FileTransport(directory)
    return MemoryTransport(device) if kind == "ipc" else Transport(device)


def fill(
    weights: Iterable[tuple[str, Tensor]],
    transport: Transport,
    bucket_bytes: int,
    *,
    alignment: int,
) -> Iterator[WeightBucket]:
    """Yields whole tensors in buckets of at most `bucket_bytes`, or of one larger tensor."""
    number = 0
    end = 0
    entries: list[tuple[str, str, tuple[int, ...], int]] = []
    checksums = Checksums()

    def bucket() -> WeightBucket:
        rows = tuple(
            BucketEntry(*entry, text)
            for entry, text in zip(entries, checksums.hexadecimal(), strict=True)
        )
        data = transport.memory(number, end)[:end]
        if data.is_cuda:
            torch.cuda.current_stream(
                data.device
            ).synchronize()  # weights may be on their way from the host
        return WeightBucket(number, rows, data)

    for name, tensor in weights:
        num_bytes = tensor.numel() * tensor.element_size()
        if entries and aligned(end, alignment) + num_bytes > bucket_bytes:
            yield bucket()
            number = number + 1
            end = 0
            entries = []
            checksums = Checksums()
        start = aligned(end, alignment)
        memory = transport.memory(number, max(bucket_bytes, num_bytes))
        end = start + num_bytes
        memory[start:end].copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
        entries.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start))
        checksums.add(tensor)
    if entries:
        yield bucket()

"""The receiving side of pushes."""

import math
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import CheckpointError, shortened
from dovetail.inference_servers.checksums import checksums_of
from dovetail.inference_servers.transports import BucketEntry, map_memory
from dovetail.parallel.private_group import PrivateGroup

MAX_SECONDS = 300.0  # of a transfer, whatever a trainer asks for: samples wait meanwhile


class Receiver:
    """An update: `begin`, `take` of each bucket, `check`. CheckpointError names a wrong tensor.

    directory: the only one whose files are read. max_bytes: of a bucket.
    """

    def __init__(
        self,
        device: torch.device,
        directory: Path | None = None,
        max_bytes: int = sys.maxsize,
    ) -> None:
        self.device = device
        self.directory = directory
        self.max_bytes = max_bytes
        self._group: PrivateGroup | None = None
        self.begin()

    def connect(self, info: Mapping[str, Any]) -> None:
        """Joins the trainer's group, if it has one. info: of `VllmPushTarget`.

        What waits in the group before ends with an error.
        """
        self.close()
        if "master_address" not in info:
            return
        group = PrivateGroup(
            info["backend"],
            info["master_address"],
            info["world_size"],
            min(info["timeout"], MAX_SECONDS),
            rank=info["rank_offset"],
            port=info["master_port"],
        )
        group.connect(self.device)
        self._group = group

    def begin(self) -> None:
        self._seen: dict[str, tuple[str, tuple[int, ...], str]] = {}
        self._buckets = 0

    def take(self, update: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
        """Views of the bucket's memory, once all sums are checked."""
        number = update["bucket"]
        entries = [BucketEntry(*row) for row in update["tensors"]]
        first = entries[0].name
        if number != self._buckets:
            raise CheckpointError(
                f"{first}: its bucket has number {number}, expected was {self._buckets}"
            )
        memory = self._memory(update, self._size(update, entries))
        views = [_view(entry, memory) for entry in entries]
        for entry, found in zip(entries, checksums_of(views), strict=True):
            if entry.name in self._seen:
                raise CheckpointError(f"{entry.name}: came twice")
            if found != entry.checksum:
                raise CheckpointError(
                    f"{entry.name}: its bytes have the sum {found}, announced was {entry.checksum}"
                )
            self._seen[entry.name] = entry.dtype, tuple(entry.shape), found
        self._buckets += 1
        return [(entry.name, view) for entry, view in zip(entries, views, strict=True)]

    def check(self, manifest: Sequence[tuple[str, str, Sequence[int], str]]) -> None:
        """Checks what came. manifest: name, dtype, shape and checksum of every tensor."""
        announced = {name: (dtype, tuple(shape), total) for name, dtype, shape, total in manifest}
        for name in announced.keys() | self._seen.keys():
            if announced.get(name) != self._seen.get(name):
                problem = (
                    "did not come"
                    if name not in self._seen
                    else "is not as in the manifest, or not in it"
                )
                raise CheckpointError(f"{name}: {problem}")

    def close(self) -> None:
        group = self._group
        self._group = None
        if group is not None:
            group.abort()

    def _memory(self, update: Mapping[str, Any], count: int) -> Tensor:
        """Returns uint8 [count] on this device, to which no other process writes."""
        if "file" in update:
            data = torch.frombuffer(self._read(Path(update["file"]), count), dtype=torch.uint8)
            return data.to(self.device)
        if "memory" in update:
            return map_memory(update["memory"], count).to(self.device, copy=True)
        if self._group is None:
            raise CheckpointError(
                "no group with the trainer: its last broadcast failed; initialize the transfer "
                "again"
            )
        place = self.device if self._group.backend == "nccl" else torch.device("cpu")
        memory = torch.empty(count, dtype=torch.uint8, device=place)
        try:
            self._group.broadcast(memory)
        except RuntimeError:
            self.close()
            raise
        return memory.to(self.device)

    def _size(self, update: Mapping[str, Any], entries: Sequence[BucketEntry]) -> int:
        """Bytes of a bucket, which ends with its last tensor."""
        count: int = update["num_bytes"]
        first = entries[0].name
        end = max(entry.start + _num_bytes(entry) for entry in entries)
        if count != end:
            raise CheckpointError(
                f"{first}: its bucket has {count} bytes, its tensors end at {end}"
            )
        if count > self.max_bytes:
            most = f"at most {self.max_bytes} are taken for this model"
            raise CheckpointError(f"{first}: its bucket has {count} bytes; {most}")
        return count

    def _read(self, path: Path, count: int) -> bytearray:
        """A regular file of `count` bytes in the directory."""
        inside = self.directory
        real = Path(os.path.realpath(path))
        if inside is None or not real.is_relative_to(os.path.realpath(inside)):
            allowed = "no directory" if inside is None else str(inside)
            option = "start the server with --push-dir, as rollout.push.directory"
            raise CheckpointError(f"{path}: files are taken from {allowed} alone; {option}")
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(real, flags), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path} is not a regular file")
            if status.st_size != count:
                has = f"{path} has {status.st_size} bytes"
                raise CheckpointError(f"{has}, announced were {count}")
            data = bytearray(count)
            if file.readinto(data) != count:
                raise CheckpointError(f"{path} became shorter while it was read")
            return data


def _num_bytes(entry: BucketEntry) -> int:
    kind = vars(torch).get(entry.dtype)
    shape = entry.shape
    if not isinstance(kind, torch.dtype) or min(shape, default=0) < 0:
        given = f"dtype {shortened(repr(entry.dtype))} and shape {shape}"
        raise CheckpointError(f"{entry.name}: {given} are not a tensor's")
    return kind.itemsize * math.prod(shape)


def _view(entry: BucketEntry, memory: Tensor) -> Tensor:
    name, dtype, shape, start, _ = entry
    end = start + _num_bytes(entry)
    kind: torch.dtype = vars(torch)[dtype]
    if start < 0 or end > len(memory) or start % kind.itemsize:
        raise CheckpointError(f"{name}: bytes {start} to {end} of a bucket of {len(memory)}")
    return memory[start:end].view(kind).view(*shape)

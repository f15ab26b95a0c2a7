"""The receiving side of pushes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import CheckpointError, shortened
from dovetail.parallel.private_group import PrivateGroup
from dovetail.rollout.remote.sums import sums_of
from dovetail.rollout.remote.transports import Entry, map_memory


class Receiver:
    """An update is `begin`, `take` of each bucket, and `check`. CheckpointError names a wrong tensor."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._group: PrivateGroup | None = None
        self.begin()

    def connect(self, info: Mapping[str, Any]) -> None:
        """Joins the trainer's group, if it has one. info: of `VllmReplica`."""
        self.close()
        if "master_address" in info:
            address, size, rank = info["master_address"], info["world_size"], info["rank_offset"]
            group = PrivateGroup(info["backend"], address, size, info["timeout"], rank=rank, port=info["master_port"])
            group.connect(self.device)
            self._group = group

    def begin(self) -> None:
        self._seen: dict[str, tuple[str, tuple[int, ...], str]] = {}
        self._buckets = 0

    def take(self, update: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
        """Views of the bucket's memory, once all sums are checked."""
        number, entries = update["bucket"], [Entry(*row) for row in update["tensors"]]
        first = entries[0].name
        if number != self._buckets:
            raise CheckpointError(f"{first}: its bucket has number {number}, expected was {self._buckets}")
        memory = self._memory(update)
        views = [_view(entry, memory) for entry in entries]
        for entry, found in zip(entries, sums_of(views), strict=True):
            if entry.name in self._seen:
                raise CheckpointError(f"{entry.name}: came twice")
            if found != entry.sum:
                raise CheckpointError(f"{entry.name}: its bytes have the sum {found}, announced was {entry.sum}")
            self._seen[entry.name] = entry.dtype, tuple(entry.shape), found
        self._buckets += 1
        return [(entry.name, view) for entry, view in zip(entries, views, strict=True)]

    def check(self, manifest: Sequence[tuple[str, str, Sequence[int], str]]) -> None:
        """manifest: name, dtype, shape and sum of every tensor."""
        announced = {name: (dtype, tuple(shape), total) for name, dtype, shape, total in manifest}
        for name in announced.keys() | self._seen.keys():
            if announced.get(name) != self._seen.get(name):
                problem = "did not come" if name not in self._seen else "is not as in the manifest, or not in it"
                raise CheckpointError(f"{name}: {problem}")

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _memory(self, update: Mapping[str, Any]) -> Tensor:
        """uint8 on this device; no other process writes to it."""
        count = update["num_bytes"]
        if "file" in update:
            data = torch.frombuffer(bytearray(Path(update["file"]).read_bytes()), dtype=torch.uint8)
            if len(data) != count:
                raise CheckpointError(f"{update['tensors'][0][0]}: its bucket has {len(data)} bytes, announced {count}")
            return data.to(self.device)
        if "memory" in update:
            return map_memory(update["memory"], count).to(self.device, copy=True)
        if self._group is None:
            raise CheckpointError("no group with the trainer: its last broadcast failed; initialize the transfer again")
        place = self.device if self._group.backend == "nccl" else torch.device("cpu")
        memory = torch.empty(count, dtype=torch.uint8, device=place)
        try:
            self._group.broadcast(memory)
        except RuntimeError:
            self.close()
            raise
        return memory.to(self.device)


def _view(entry: Entry, memory: Tensor) -> Tensor:
    name, dtype, shape, start, _ = entry
    kind = vars(torch).get(dtype)
    if not isinstance(kind, torch.dtype) or min(shape, default=0) < 0:
        raise CheckpointError(f"{name}: dtype {shortened(repr(dtype))} and shape {shape} are not a tensor's")
    end = start + kind.itemsize * torch.Size(shape).numel()
    if start < 0 or end > len(memory) or start % kind.itemsize:
        raise CheckpointError(f"{name}: bytes {start} to {end} of a bucket of {len(memory)}")
    return memory[start:end].view(kind).view(*shape)

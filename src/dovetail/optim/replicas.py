"""Whether copies of a tensor have the same bits on all ranks."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dovetail.errors import MachineError, listing
from dovetail.nn.model import StagedModel
from dovetail.optim.optimizer import Optimizer
from dovetail.parallel.collectives import stack_over
from dovetail.parallel.consensus import of_all
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import as_index
from dovetail.weights.shards import local_params

BITS: Mapping[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class ReplicaSlice(NamedTuple):
    name: str
    tensor: Tensor

    @property
    def digest(self) -> int:
        return int.from_bytes(hashlib.blake2b(self.name.encode(), digest_size=8).digest(), "big", signed=True)


def check_replicas(model: nn.Module, mesh: Mesh, optimizer: Optimizer | None) -> None:
    """MachineError on every rank, with names and ranks, where copies differ. Collective."""
    slices = list(_slices(model, optimizer, mesh))
    holders = _gather([item.digest for item in slices], mesh)
    counts = Counter(digest for digests in holders for digest in digests)
    copied = [item for item in slices if counts[item.digest] > 1]
    hashes = torch.stack([hash_bits(item.tensor.to(mesh.device)) for item in copied]).tolist() if copied else []
    known = {item.digest: value for item, value in zip(copied, hashes, strict=True)}
    values: dict[int, dict[int, int]] = defaultdict(dict)
    for rank, row in enumerate(_gather([known.get(item.digest, 0) for item in slices], mesh)):
        for digest, value in zip(holders[rank], row, strict=True):
            values[digest][rank] = value
    differ = [f"{s.name}: {_difference(values[s.digest])}" for s in copied if len(set(values[s.digest].values())) > 1]
    problems = list(dict.fromkeys(line for lines in of_all(differ, mesh) for line in lines))
    if problems:
        raise MachineError(
            "copies that must be equal differ, so a device or its memory made a mistake:\n"
            f"{listing(problems)}\nresume from the last checkpoint, without the device of the rank that stands out"
        )


def hash_bits(x: Tensor) -> Tensor:
    """int64 []; any one bit changes it."""
    bits = x.detach().contiguous().view(-1).view(BITS[x.element_size()])
    if hasattr(torch, "hash_tensor"):  # not in torch 2.11
        return torch.hash_tensor(bits).view(torch.int64)
    return bits.sum(dtype=torch.int64)


def _slices(model: nn.Module, optimizer: Optimizer | None, mesh: Mesh) -> Iterator[ReplicaSlice]:
    states = {shard.name: optimizer.rule.stored(shard.local) for shard in optimizer.shards} if optimizer else {}
    params = local_params(model, mesh)
    for param in params:
        tensors: dict[str, Tensor] = {"": param.local}
        tensors |= {f" ({kind})": x for kind, x in sorted(states.get(param.name, {}).items())}
        for region in param.regions:
            rows = "x".join(f"{start}:{stop}" for start, stop in region.checkpoint_slice)
            for kind, tensor in tensors.items():
                yield ReplicaSlice(f"{region.checkpoint_name}[{rows}]{kind}", tensor[as_index(region.local_slice)])
    names = {param.name for param in params}
    stored = model.stored_name if isinstance(model, StagedModel) else str
    for name, buffer in model.named_buffers():
        if stored(name) not in names:
            yield ReplicaSlice(f"buffer {stored(name)}", buffer)


def _gather(row: Sequence[int], mesh: Mesh) -> list[list[int]]:
    own = torch.tensor([len(row), *row], dtype=torch.int64, device=mesh.device)
    sizes = stack_over(own[0], mesh["world"]).tolist()
    padded = torch.nn.functional.pad(own[1:], (0, max(sizes) - len(row)))
    return [row[:n] for row, n in zip(stack_over(padded, mesh["world"]).tolist(), sizes, strict=True)]


def _difference(values: Mapping[int, int]) -> str:
    groups: dict[int, list[int]] = defaultdict(list)
    for rank, value in values.items():
        groups[value].append(rank)
    *fewer, most = sorted(groups.values(), key=len)
    names = [", ".join(map(str, sorted(ranks))) for ranks in fewer]
    if len(most) > len(fewer[-1]):
        return f"rank {' and rank '.join(names)} differs from rank {', '.join(map(str, most))}"
    return f"rank {' and rank '.join([*names, ', '.join(map(str, most))])} differ, and no majority tells which is right"

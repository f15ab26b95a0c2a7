"""Whether ranks that hold copies of the same piece still hold the same bits: parameters, their moments, buffers.

Equal operations on equal bits leave equal bits, so copies that differ mean that a device or its memory made a mistake,
and nothing else would notice: each rank would train on, with a model of its own.
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dovetail.errors import MachineError, listing
from dovetail.nn.model import StagedModel
from dovetail.optim.optimizer import Optimizer
from dovetail.parallel.collectives import gather_text, stack_over
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import as_index
from dovetail.weights.shards import local_params

# By an element's bytes: an integer type as wide.
BITS: Mapping[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NOTHING = 0  # fills the row of a rank that has fewer pieces than another


class ReplicaSlice(NamedTuple):
    """Something that this rank holds; what has the same name on another rank should be the same."""

    name: str
    tensor: Tensor

    @property
    def digest(self) -> int:
        return int.from_bytes(hashlib.blake2b(self.name.encode(), digest_size=8).digest(), "big", signed=True)


def check_replicas(model: nn.Module, mesh: Mesh, optimizer: Optimizer | None) -> None:
    """Raise MachineError on every rank, with the names and the ranks, where copies differ. Collective.

    Two small gathers: who holds what, and a hash of each piece that several hold. Hashes are made on the device.
    """
    pieces = list(_pieces(model, optimizer, mesh))
    holders = _gather([piece.digest for piece in pieces], mesh)
    counts = Counter(digest for digests in holders for digest in digests)
    copied = [piece for piece in pieces if counts[piece.digest] > 1]
    hashes = torch.stack([hash_bits(piece.tensor.to(mesh.device)) for piece in copied]).tolist() if copied else []
    known = {piece.digest: value for piece, value in zip(copied, hashes, strict=True)}
    values: dict[int, dict[int, int]] = defaultdict(dict)  # of a piece, by rank
    for rank, row in enumerate(_gather([known.get(piece.digest, NOTHING) for piece in pieces], mesh)):
        for digest, value in zip(holders[rank], row, strict=True):
            values[digest][rank] = value
    wrong = [f"{p.name}: {_difference(values[p.digest])}" for p in copied if len(set(values[p.digest].values())) > 1]
    everyone = [json.loads(text) for text in gather_text(json.dumps(wrong), mesh["world"], mesh.device)]
    found = list(dict.fromkeys(line for lines in everyone for line in lines))
    if found:
        raise MachineError(
            "copies that must be equal differ, so a device or its memory made a mistake:\n"
            f"{listing(found)}\nresume from the last checkpoint, without the device of the rank that stands out"
        )


def hash_bits(x: Tensor) -> Tensor:
    """int64 [], on the device: another number when any one bit of `x` is another."""
    bits = x.detach().contiguous().view(-1).view(BITS[x.element_size()])
    if hasattr(torch, "hash_tensor"):  # newer than the oldest torch that we take
        return torch.hash_tensor(bits).view(torch.int64)
    return bits.sum(dtype=torch.int64)


def _pieces(model: nn.Module, optimizer: Optimizer | None, mesh: Mesh) -> Iterator[ReplicaSlice]:
    """Each region of each parameter, of its moments, and of the buffers."""
    shards, names = iter(optimizer.shards if optimizer else ()), set()
    for item in local_params(model, mesh):
        names.add(item.name)
        tensors: dict[str, Tensor] = {"": item.local}
        if item.parameter is not None and optimizer is not None:
            state = optimizer.adamw.state[next(shards).local]
            tensors |= {f" ({kind})": x for kind, x in sorted(state.items()) if x.shape == item.local.shape}
        for region in item.regions:
            rows = "x".join(f"{start}:{stop}" for start, stop in region.checkpoint_slice)
            for kind, tensor in tensors.items():
                yield ReplicaSlice(f"{region.checkpoint_name}[{rows}]{kind}", tensor[as_index(region.local_slice)])
    stored = model.stored_name if isinstance(model, StagedModel) else str
    for name, buffer in model.named_buffers():
        if stored(name) not in names:
            yield ReplicaSlice(f"buffer {stored(name)}", buffer)


def _gather(row: Sequence[int], mesh: Mesh) -> list[list[int]]:
    """Every rank's numbers, in rank order; rows may differ in length."""
    own = torch.tensor([len(row), *row], dtype=torch.int64, device=mesh.device)
    sizes = stack_over(own[0], mesh["world"]).tolist()
    padded = torch.nn.functional.pad(own[1:], (0, max(sizes) - len(row)), value=NOTHING)
    return [found[:n] for found, n in zip(stack_over(padded, mesh["world"]).tolist(), sizes, strict=True)]


def _difference(values: Mapping[int, int]) -> str:
    """Which ranks stand out among those that hold a piece, by majority where there is one."""
    groups: dict[int, list[int]] = defaultdict(list)
    for rank, value in values.items():
        groups[value].append(rank)
    *fewer, most = sorted(groups.values(), key=len)
    names = [", ".join(map(str, sorted(ranks))) for ranks in fewer]
    if len(most) > len(fewer[-1]):
        return f"rank {' and rank '.join(names)} differs from rank {', '.join(map(str, most))}"
    return f"rank {' and rank '.join([*names, ', '.join(map(str, most))])} differ, and no majority tells which is right"

"""A check that copies of a tensor have the same bits on all ranks."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from dovetail.errors import MachineError, listing
from dovetail.nn.model import StagedModel
from dovetail.optim.optimizer import Optimizer
from dovetail.parallel.consensus import of_all
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import as_index
from dovetail.weights.shards import local_params

BITS = (torch.uint8, torch.int16, torch.int32, torch.int64)


def check_replicas(model: nn.Module, mesh: Mesh, optimizer: Optimizer | None) -> None:
    """Raise MachineError on every rank, with names and ranks, where copies differ. Collective."""
    slices = {}
    for name, tensor in slices_of(model, optimizer, mesh):
        slices[_digest(name)] = (name, tensor)
    counts: Counter[int] = Counter()
    for digests in of_all([*slices], mesh):
        counts.update(digests)
    copied = [digest for digest in slices if counts[digest] > 1]
    hashes = []
    for digest in copied:
        _, tensor = slices[digest]
        tensor = tensor.to(mesh.device)
        hashes.append(hash_bits(tensor))
    numbers = []
    if hashes:
        numbers = torch.stack(hashes).tolist()
    pairs = [*zip(copied, numbers, strict=True)]
    values: dict[int, dict[int, int]] = defaultdict(dict)
    for rank, theirs in enumerate(of_all(pairs, mesh)):
        for digest, value in theirs:
            values[digest][rank] = value
    lines = []
    for digest in copied:
        found = values[digest]
        if len({*found.values()}) > 1:
            name, _ = slices[digest]
            lines.append(f"{name}: {_difference(found)}")
    problems: dict[str, None] = {}
    for theirs in of_all(lines, mesh):
        problems |= dict.fromkeys(theirs)
    if problems:
        raise MachineError(
            "copies that must be equal differ, so a device or its memory made a mistake:\n"
            f"{listing([*problems])}\nresume from the last checkpoint, "
            "without the device of the rank that stands out"
        )


def _digest(name: str) -> int:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def hash_bits(x: Tensor) -> Tensor:
    """Return a hash, int64 [], which any one bit changes."""
    size = x.element_size()
    dtype = next(dtype for dtype in BITS if dtype.itemsize == size)
    flat = x.detach().contiguous()
    flat = flat.view(-1)
    bits = flat.view(dtype)
    if hasattr(torch, "hash_tensor"):  # not in torch 2.11
        return torch.hash_tensor(bits).view(torch.int64)
    return bits.sum(dtype=torch.int64)


def slices_of(
    model: nn.Module, optimizer: Optimizer | None, mesh: Mesh
) -> Iterator[tuple[str, Tensor]]:
    """Yield what this rank holds, named by its place in the checkpoint."""
    states = {}
    if optimizer is not None:
        for shard in optimizer.shards:
            stored_state = optimizer.rule.stored(shard.local)
            states[shard.name] = stored_state
    params = local_params(model, mesh)
    for param in params:
        tensors: dict[str, Tensor] = {"": param.local}
        state = states.get(param.name, {})
        for kind in sorted(state):
            tensors[f" ({kind})"] = state[kind]
        for region in param.regions:
            index = as_index(region.local_slice)
            rows = "x".join(f"{start}:{stop}" for start, stop in region.checkpoint_slice)
            for kind, x in tensors.items():
                yield f"{region.checkpoint_name}[{rows}]{kind}", x[index]
    names = {param.name for param in params}
    stored = model.stored_name if isinstance(model, StagedModel) else str
    for name, buffer in model.named_buffers():
        if stored(name) not in names:
            yield f"buffer {stored(name)}", buffer


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _difference(values: Mapping[int, int]) -> str:
    groups: dict[int, list[int]] = defaultdict(list)
    for rank, value in values.items():
        groups[value].append(rank)
    by_size = sorted(groups.values(), key=len)
    *fewer, most = by_size
    names = [_listed(sorted(ranks)) for ranks in fewer]
    others = _listed(most)
    if len(most) > len(fewer[-1]):
        return f"rank {' and rank '.join(names)} differs from rank {others}"
    all_names = " and rank ".join([*names, others])
    return f"rank {all_names} differ, and no majority tells which is right"

"""Whether copies of a tensor have the same bits on all ranks."""

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

BITS: Mapping[int, torch.dtype] = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}  # by bytes


def check_replicas(model: nn.Module, mesh: Mesh, optimizer: Optimizer | None) -> None:
    """MachineError on every rank, with names and ranks, where copies differ. Collective."""
    slices = {_digest(name): (name, tensor) for name, tensor in slices_of(model, optimizer, mesh)}
    counts = Counter(digest for digests in of_all([*slices], mesh) for digest in digests)
    copied = [digest for digest in slices if counts[digest] > 1]
    bits = [hash_bits(slices[digest][1].to(mesh.device)) for digest in copied]
    values: dict[int, dict[int, int]] = defaultdict(dict)
    for rank, pairs in enumerate(
        of_all([*zip(copied, (torch.stack(bits).tolist() if bits else []), strict=True)], mesh)
    ):
        for digest, value in pairs:
            values[digest][rank] = value
    differ = [digest for digest in copied if len({*values[digest].values()}) > 1]
    lines = [f"{slices[digest][0]}: {_difference(values[digest])}" for digest in differ]
    problems = list(dict.fromkeys(line for theirs in of_all(lines, mesh) for line in theirs))
    if problems:
        raise MachineError(
            "copies that must be equal differ, so a device or its memory made a mistake:\n"
            f"{listing(problems)}\nresume from the last checkpoint, without the device of the rank that stands out"
        )


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def hash_bits(x: Tensor) -> Tensor:
    """int64 []; any one bit changes it."""
    bits = x.detach().contiguous().view(-1).view(BITS[x.element_size()])
    if hasattr(torch, "hash_tensor"):  # not in torch 2.11
        return torch.hash_tensor(bits).view(torch.int64)
    return bits.sum(dtype=torch.int64)


def slices_of(
    model: nn.Module, optimizer: Optimizer | None, mesh: Mesh
) -> Iterator[tuple[str, Tensor]]:
    """What this rank holds, named by its place in the checkpoint."""
    states = (
        {shard.name: optimizer.rule.stored(shard.local) for shard in optimizer.shards}
        if optimizer
        else {}
    )
    params = local_params(model, mesh)
    for param in params:
        tensors: dict[str, Tensor] = {"": param.local}
        tensors |= {f" ({kind})": x for kind, x in sorted(states.get(param.name, {}).items())}
        for region in param.regions:
            rows = "x".join(f"{start}:{stop}" for start, stop in region.checkpoint_slice)
            for kind, tensor in tensors.items():
                yield (
                    f"{region.checkpoint_name}[{rows}]{kind}",
                    tensor[as_index(region.local_slice)],
                )
    names = {param.name for param in params}
    stored = model.stored_name if isinstance(model, StagedModel) else str
    for name, buffer in model.named_buffers():
        if stored(name) not in names:
            yield f"buffer {stored(name)}", buffer


def _difference(values: Mapping[int, int]) -> str:
    groups: dict[int, list[int]] = defaultdict(list)
    for rank, value in values.items():
        groups[value].append(rank)
    *fewer, most = sorted(groups.values(), key=len)
    names = [", ".join(map(str, sorted(ranks))) for ranks in fewer]
    if len(most) > len(fewer[-1]):
        return f"rank {' and rank '.join(names)} differs from rank {', '.join(map(str, most))}"
    return f"rank {' and rank '.join([*names, ', '.join(map(str, most))])} differ, and no majority tells which is right"

"""Sums of micro-batches: the loss, under the name "", and metrics, each a total and a count."""

import json
import math
import zlib

import torch
from torch import Tensor

from dovetail.batch.loss import Loss
from dovetail.parallel.collectives import gather_text, stack_numbers, sum_over
from dovetail.parallel.mesh import Mesh

Sums = dict[str, tuple[Tensor, Tensor]]


def add_sums(sums: Sums, value: Loss) -> None:
    for name, (total, count) in {"": (value.total, value.count), **value.metrics}.items():
        before = sums.get(name)
        now = total.detach(), torch.as_tensor(count, device=total.device).detach()
        sums[name] = now if before is None else (before[0] + now[0], before[1] + now[1])


def unify_names(sums: Sums, mesh: Mesh) -> None:
    """Add zeros for metrics of other ranks. Collective."""
    names, world = json.dumps(sorted(sums)), mesh["world"]
    hashes = stack_numbers([zlib.crc32(names.encode()) if sums else 0], world, mesh.device)
    if len({value for (value,) in hashes if value}) > 1:  # 0: of stages without a loss
        everywhere = {name for text in gather_text(names, world, mesh.device) for name in json.loads(text)}
        zero = torch.zeros((), dtype=torch.float64, device=mesh.device)
        sums |= {name: (zero, zero) for name in everywhere - sums.keys() if sums}


def reduce_sums(sums: Sums, mesh: Mesh) -> Tensor:
    """float64 [n, 2] by sorted name on the last stage, [0, 2] elsewhere."""
    if mesh["pp"].rank < mesh["pp"].size - 1:
        return torch.zeros(0, 2, dtype=torch.float64, device=mesh.device)
    flat = torch.stack([torch.stack([x.to(torch.float64) for x in sums[name]]) for name in sorted(sums)])
    return sum_over(flat, mesh["fsdp"])


def sums_by_name(names: list[str], rows: list[list[float]], mesh: Mesh) -> dict[str, tuple[float, float]]:
    """The last stage's sums, on all pipeline ranks. Collective."""
    text = json.dumps(dict(zip(names, rows, strict=True)))
    last = json.loads(gather_text(text, mesh["pp"], mesh.device)[-1])
    return {name: (total, count) for name, (total, count) in last.items()}


def mean(total: float, count: float) -> float:
    return total / count if count else math.nan

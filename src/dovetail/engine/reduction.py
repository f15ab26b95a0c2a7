"""What a step's micro-batches add up to: the loss, under the name "", and metrics, each a total and a count."""

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
    """Add one micro-batch's loss (under the name "") and metrics, detached, to the running sums."""
    for name, (total, count) in {"": (value.total, value.count), **value.metrics}.items():
        before = sums.get(name)
        now = total.detach(), torch.as_tensor(count, device=total.device).detach()
        sums[name] = now if before is None else (before[0] + now[0], before[1] + now[1])


def name_alike(sums: Sums, mesh: Mesh) -> None:
    """Have zeros under the names that other replicas have metrics of: a loss may have none of what its tokens lack.
    Collective: a number, between hosts.
    """
    mine, world = json.dumps(sorted(sums)), mesh["world"]
    seen = stack_numbers([zlib.crc32(mine.encode()) if sums else 0], world, mesh.device)
    if len({number for (number,) in seen if number}) > 1:  # 0: of stages without a loss
        names = {name for text in gather_text(mine, world, mesh.device) for name in json.loads(text)}
        zero = torch.zeros((), dtype=torch.float64, device=mesh.device)
        sums |= {name: (zero, zero) for name in names - sums.keys() if sums}


def reduce_sums(sums: Sums, mesh: Mesh) -> Tensor:
    """All tokens' sums in the order of their names: float64 [n, 2] on ranks of the last stage, [0, 2] on others."""
    if mesh["pp"].rank < mesh["pp"].size - 1:
        return torch.zeros(0, 2, dtype=torch.float64, device=mesh.device)
    flat = torch.stack([torch.stack([x.to(torch.float64) for x in sums[name]]) for name in sorted(sums)])
    return sum_over(flat, mesh["fsdp"])


def by_name(names: list[str], rows: list[list[float]], mesh: Mesh) -> dict[str, tuple[float, float]]:
    """The sums. Under a pipeline ranks of the last stage tell those of the others."""
    mine = json.dumps(dict(zip(names, rows, strict=True)))
    told = json.loads(gather_text(mine, mesh["pp"], mesh.device)[-1])
    return {name: (total, count) for name, (total, count) in told.items()}


def mean(total: float, count: float) -> float:
    """Not a number where nothing was counted."""
    return total / count if count else math.nan

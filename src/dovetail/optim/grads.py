"""The trainable parameters as this rank's own plain tensors, and their gradients: summed, measured, scaled."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.kernels.reference import wide
from dovetail.parallel.collectives import all_reduce_, sum_over
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import Placement, Region, as_index
from dovetail.weights.shards import local_params, local_tensor


@dataclass(frozen=True)
class Shard:
    """One parameter as this rank holds it; `local` shares the storage of `source`."""

    name: str
    source: nn.Parameter
    local: nn.Parameter
    placement: Placement
    regions: tuple[Region, ...]

    @property
    def is_decayed(self) -> bool:
        """Norms and biases may have two dims: one vector a head, or an expert."""
        *_, module, leaf = ("", *self.name.split("."))
        return self.local.dim() > 1 and "norm" not in module and not leaf.endswith("bias")

    def collect_grad(self) -> Tensor:
        """Assign this rank's rows of the gradient to `local.grad`."""
        assert self.source.grad is not None, f"{self.name} has no gradient: a path of the model left it out"
        self.local.grad = local_tensor(self.source.grad)
        return self.local.grad


def shards_of(model: nn.Module, mesh: Mesh) -> list[Shard]:
    """Every parameter that requires a gradient, each once, in the model's order."""
    params = local_params(model, mesh)  # reshards, which may replace the parameter objects
    return [
        Shard(p.name, p.parameter, nn.Parameter(p.local), p.placement, p.regions)
        for p in params
        if p.parameter is not None and p.parameter.requires_grad
    ]


def param_groups(shards: list[Shard], weight_decay: float) -> list[dict[str, Any]]:
    """torch's parameter groups; vectors, norms and biases are not decayed."""
    groups: list[dict[str, Any]] = [
        {"params": [s.local for s in shards if s.is_decayed], "weight_decay": weight_decay},
        {"params": [s.local for s in shards if not s.is_decayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def reduce_partial(shards: Iterable[Shard], mesh: Mesh) -> None:
    """Sum over ranks that saw other tokens or heads, and over copies of KV rows, in place."""
    partial: dict[str, list[Tensor]] = defaultdict(list)
    copied: dict[int, list[Tensor]] = defaultdict(list)
    for shard in shards:
        grad = shard.collect_grad()
        for axis in shard.placement.partial_over:
            partial[axis].append(grad)
        for region in shard.regions:
            if region.copies > 1:
                copied[region.copies].append(grad[as_index(region.local_slice)])
    for name in sorted(partial):
        all_reduce_(partial[name], mesh[name])
    for copies in sorted(copied):
        all_reduce_(copied[copies], mesh.copies[copies])


def global_norm(shards: Iterable[Shard], mesh: Mesh, nonfinite_candidates: Sequence[Tensor] = ()) -> Tensor:
    """The 2-norm of the whole gradient, float64 [], equal on every rank.

    NaN where one of `nonfinite_candidates` is not finite on any rank, by the same collective.
    """
    parts: list[Tensor] = []
    for shard in shards:
        grad = shard.local.grad
        assert grad is not None
        owned = [grad[as_index(r.local_slice)] for r in shard.regions if r.owned]
        parts += [part for part in owned if part.numel()]
    norms = torch._foreach_norm(parts, dtype=wide(parts[0].dtype)) if parts else ()
    groups = [group for group in (norms, _nan_where_nonfinite(nonfinite_candidates)) if group]
    squares = [torch.stack(scalars).square().sum() for scalars in groups]
    total = sum((x.to(torch.float64) for x in squares), torch.zeros((), dtype=torch.float64, device=mesh.device))
    return sum_over(total, mesh["world"]).sqrt()


def _nan_where_nonfinite(tensors: Iterable[Tensor]) -> list[Tensor]:
    """0 for each tensor, or NaN; the host does not wait."""
    real = [x.detach() for x in tensors if x.is_floating_point() and x.numel()]
    return list(torch._foreach_mul(torch._foreach_norm(real, math.inf), 0.0)) if real else []


def scale_(shards: Iterable[Shard], factor: Tensor) -> None:
    """Multiply every gradient. The host reads the factor only for a narrower dtype."""
    grads = [shard.local.grad for shard in shards if shard.local.grad is not None]
    dtype = wide(grads[0].dtype) if grads else factor.dtype
    torch._foreach_mul_(grads, factor.to(dtype) if grads and grads[0].dtype == dtype else float(factor))

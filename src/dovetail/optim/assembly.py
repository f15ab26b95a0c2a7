"""The trainable parameters as this rank's own plain tensors, without FSDP2's DTensors."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import Placement, Region
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

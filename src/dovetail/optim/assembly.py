"""Which parameters the optimizer updates, as this rank's own plain tensors, and what their placements say of them.

FSDP2 wraps every parameter in a DTensor; optimizer, gradient reduction and norm need only the local shard. A `Shard`
is that shard's storage as an ordinary parameter, with the regions of the checkpoint that it holds.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dovetail.optim.adamw import CPUOffloadAdamW, SkippableAdamW
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import Placement, Region
from dovetail.weights.shards import local_params, local_tensor


@dataclass(frozen=True)
class Shard:
    """One parameter as this rank holds it: `local` shares the storage of `source`."""

    name: str
    source: nn.Parameter
    local: nn.Parameter
    placement: Placement
    regions: tuple[Region, ...]

    @property
    def is_decayed(self) -> bool:
        """Whether weight decay acts on it. Norms and biases may have two dims: one vector a head, or an expert."""
        *_, module, leaf = ("", *self.name.split("."))
        return self.local.dim() > 1 and "norm" not in module and not leaf.endswith("bias")

    def collect_grad(self) -> Tensor:
        """This rank's rows of the gradient, handed to `local`; every parameter has one after a reducing backward."""
        assert self.source.grad is not None, f"{self.name} has no gradient: a path of the model left it out"
        self.local.grad = local_tensor(self.source.grad)
        return self.local.grad


def shards_of(model: nn.Module, mesh: Mesh) -> list[Shard]:
    """Every parameter of `model` that is trained, each once, in the model's order."""
    found = local_params(model, mesh)  # reshards, which may put other objects in the parameters' places
    return [
        Shard(h.name, h.parameter, nn.Parameter(h.local), h.placement, h.regions)
        for h in found
        if h.parameter is not None
    ]


def adamw(
    shards: list[Shard],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    on_host: bool = False,
) -> SkippableAdamW:
    """AdamW over local shards. Vectors, norms and biases are not decayed. on_host: its moments wait there."""
    groups: list[dict[str, Any]] = [
        {"params": [s.local for s in shards if s.is_decayed], "weight_decay": weight_decay},
        {"params": [s.local for s in shards if not s.is_decayed], "weight_decay": 0.0},
    ]
    kind = CPUOffloadAdamW if on_host else SkippableAdamW
    return kind([g for g in groups if g["params"]], lr=lr, betas=betas, eps=eps, fused=True)

"""One optimizer step from summed gradients: divide by the count, clip by the true norm, update, or skip."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor, nn

from dovetail.errors import ConfigError
from dovetail.optim.adamw import MOMENTS
from dovetail.optim.assembly import adamw, shards_of
from dovetail.optim.grads import global_norm, reduce_partial, scale_
from dovetail.optim.lr import Schedule, lr_factor
from dovetail.parallel.collectives import AsyncHostCopy
from dovetail.parallel.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class OptimSettings:
    """AdamW and its learning-rate schedule. `clip_norm` None: no clipping, the norm is still reported.

    on_host: the moments wait in host memory, and pass through the device while parameters are updated.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    total_steps: int = 1
    min_lr_ratio: float = 0.0
    decay_steps: int | None = None
    on_host: bool = False

    def __post_init__(self) -> None:
        if self.schedule not in get_args(Schedule):
            raise ConfigError(f"schedule={self.schedule!r}; expected one of {', '.join(get_args(Schedule))}")
        for name in ("lr", "weight_decay", "min_lr_ratio"):
            if not 0 <= vars(self)[name] < math.inf:
                raise ConfigError(f"{name}={vars(self)[name]!r}; expected 0 or more")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"clip_norm={self.clip_norm!r}; expected more than 0, or None for no limit")


@dataclass(frozen=True)
class Update:
    """What one step did. A skipped step changed nothing and does not count for the schedule.

    `faults`: which parameters and gradients of this rank are not finite, where it was skipped; none where nothing was counted.
    """

    grad_norm: float
    lr: float
    skipped: bool
    faults: tuple[str, ...] = ()


class Optimizer:
    """AdamW over this rank's shards of a model's parameters."""

    def __init__(self, model: nn.Module, mesh: Mesh, settings: OptimSettings) -> None:
        self.mesh, self.settings = mesh, settings
        self.shards = shards_of(model, mesh)
        self.steps = 0
        s = settings
        self.adamw = adamw(
            self.shards, lr=s.lr, betas=s.betas, eps=s.eps, weight_decay=s.weight_decay, on_host=s.on_host
        )

    def step(self, count: float | Tensor, suspects: Sequence[Tensor] = ()) -> Update:
        """Update from gradients that are sums over `count` tokens (or sequences) of all ranks; then drop them.

        Collective. A number that is not finite, in a gradient, a parameter or one of `suspects` (whatever the gradients
        came from) of any rank, skips the update on every rank, and so does a count of nothing. The device decides: the host
        reads the norm when all work is on its way, so that the device has no pause between the last backward pass and the
        update, and goes on while parameters are updated. Moments in host memory are updated when this returns.
        """
        s = self.settings
        count = torch.as_tensor(count, dtype=torch.float64, device=self.mesh.device)
        divisor = torch.where(count == 0, 1.0, count)
        reduce_partial(self.shards, self.mesh)
        norm = global_norm(self.shards, self.mesh, [*suspects, *self._watched()]) / divisor
        lr = s.lr * lr_factor(
            s.schedule,
            self.steps,
            warmup=s.warmup_steps,
            total=s.total_steps,
            floor=s.min_lr_ratio,
            decay=s.decay_steps,
        )
        finite = norm.isfinite() & (count > 0)
        clip = torch.ones_like(norm) if s.clip_norm is None else (s.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        scale_(self.shards, torch.where(finite, clip / divisor, 1.0))
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.found_inf = (~finite).to(torch.float32)
        fresh, numbers = not self.adamw.state, torch.stack([norm, ~finite])
        early = None if s.on_host else AsyncHostCopy(numbers)
        self.adamw.step()
        grad_norm, skipped = (early or AsyncHostCopy(numbers)).wait()
        skipped = bool(skipped)
        self.steps += not skipped
        if skipped and fresh:
            self.adamw.state.clear()  # moments of nothing
        faults = tuple(self._faults()) if skipped else ()
        self.zero_grad()
        return Update(grad_norm, lr, skipped, faults)

    def _watched(self) -> Iterator[Tensor]:
        """What the norm does not see: the parameters, and gradients that another rank counts."""
        for shard in self.shards:
            yield shard.local
            if shard.local.grad is not None and not all(region.owned for region in shard.regions):
                yield shard.local.grad

    def _faults(self) -> Iterator[str]:
        for kind in ("parameter", "gradient"):
            pairs = [(s.name, s.local if kind == "parameter" else s.local.grad) for s in self.shards]
            names = [name for name, x in pairs if x is not None and not bool(x.isfinite().all())]
            if names:
                yield f"{kind} {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """AdamW's moments, kind -> name of the parameter -> tensor as its shard lies; zeros before the first step."""
        self.adamw.begin(self.steps)
        return {kind: {s.name: self.adamw.state[s.local][kind] for s in self.shards} for kind in MOMENTS}

    def resume(self, steps: int) -> None:
        """Go on as after `steps` updates; the moments are filled by whoever loads them."""
        self.moments()
        self.steps = steps
        for state in self.adamw.state.values():
            state["step"].fill_(steps)

    def zero_grad(self) -> None:
        """Free every gradient."""
        for shard in self.shards:
            shard.local.grad = shard.source.grad = None

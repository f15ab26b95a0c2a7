"""One optimizer step from summed gradients: divide, clip by the global norm, update or skip."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from dovetail.errors import ConfigError
from dovetail.optim.adamw import CPUOffloadAdamW, SkippableAdamW, UpdateRule
from dovetail.optim.grads import Shard, global_norm, param_groups, reduce_partial, scale_, shards_of
from dovetail.parallel.collectives import AsyncHostCopy
from dovetail.parallel.mesh import Mesh

Schedule = Literal["constant", "linear", "cosine", "wsd"]


@dataclass(frozen=True, kw_only=True)
class OptimSettings:
    """AdamW and its learning-rate schedule. `clip_norm` None: no clipping. `on_host`: moments in host memory."""

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

    def make_rule(self, shards: list[Shard]) -> UpdateRule:
        rule = CPUOffloadAdamW if self.on_host else SkippableAdamW
        return rule(param_groups(shards, self.weight_decay), lr=self.lr, betas=self.betas, eps=self.eps, fused=True)

    def lr_at(self, step: int) -> float:
        return self.lr * lr_factor(
            self.schedule,
            step,
            warmup=self.warmup_steps,
            total=self.total_steps,
            floor=self.min_lr_ratio,
            decay=self.decay_steps,
        )


def lr_factor(
    schedule: Schedule, step: int, *, warmup: int = 0, total: int = 1, floor: float = 0.0, decay: int | None = None
) -> float:
    """The factor on the base rate at `step`, counted from 0; never 0 at the first.

    Warm-up: (step + 1) / (warmup + 1). Then constant; linear or cosine to `floor` over `decay` steps (default: to the
    last of `total`); wsd: 1 until the last `decay` steps (default: a tenth of `total`, at least 2), then linearly to `floor`.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if schedule == "constant":
        return 1.0
    start, last = warmup, total - 1
    if schedule == "wsd":
        start = max(warmup, total - max(2, total // 10 if decay is None else decay))  # the first has factor 1
        if step < start:
            return 1.0
    elif decay is not None:
        last = min(last, start + decay - 1)
    progress = min(1.0, (step - start) / max(1, last - start))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress
    return floor + (1 - floor) * shape


@dataclass(frozen=True)
class Update:
    """`faults`: this rank's parameters and gradients that are not finite, where the step was skipped."""

    grad_norm: float
    lr: float
    skipped: bool
    faults: tuple[str, ...] = ()


class Optimizer:
    """An update rule over this rank's shards of the trainable parameters."""

    def __init__(self, model: nn.Module, mesh: Mesh, settings: OptimSettings) -> None:
        self.mesh, self.settings = mesh, settings
        self.shards = shards_of(model, mesh)
        self.rule = settings.make_rule(self.shards)
        self.steps = 0

    def step(self, count: float | Tensor, watched: Sequence[Tensor] = ()) -> Update:
        """Update from gradients summed over `count` tokens (or sequences) of all ranks, and free them. Collective.

        A number that is not finite in a gradient, a parameter or `watched`, on any rank, skips the update on all; so does a
        count of 0. The device decides; the host reads the norm once all work is queued, unless state is on the host.
        """
        s = self.settings
        count = torch.as_tensor(count, dtype=torch.float64, device=self.mesh.device)
        divisor = torch.where(count == 0, 1.0, count)
        reduce_partial(self.shards, self.mesh)
        norm = global_norm(self.shards, self.mesh, [*watched, *self._unseen_by_norm()]) / divisor
        finite = norm.isfinite() & (count > 0)
        clip = torch.ones_like(norm) if s.clip_norm is None else (s.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        scale_(self.shards, torch.where(finite, clip / divisor, 1.0))
        lr = s.lr_at(self.steps)
        for group in self.rule.param_groups:
            group["lr"] = lr
        self.rule.found_inf = (~finite).to(torch.float32)
        fresh, numbers = not self.rule.state, torch.stack([norm, ~finite])
        early = None if s.on_host else AsyncHostCopy(numbers)
        self.rule.step()
        grad_norm, skipped = (early or AsyncHostCopy(numbers)).wait()
        skipped = bool(skipped)
        self.steps += not skipped
        if skipped and fresh:
            self.rule.state.clear()  # the state of no step
        faults = tuple(self._faults()) if skipped else ()
        self.zero_grad()
        return Update(grad_norm, lr, skipped, faults)

    def _unseen_by_norm(self) -> Iterator[Tensor]:
        """Parameters, and gradients that another rank's norm counts."""
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

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Kind -> parameter name -> state of its shard; zeros before the first step."""
        self.rule.begin(self.steps)
        return {kind: {s.name: self.rule.state[s.local][kind] for s in self.shards} for kind in self.rule.state_names}

    def resume(self, steps: int) -> None:
        """Continue as after `steps` updates; the caller fills `state_tensors`."""
        self.rule.begin(steps)
        self.steps = steps
        for state in self.rule.state.values():
            state["step"].fill_(steps)

    def zero_grad(self) -> None:
        for shard in self.shards:
            shard.local.grad = shard.source.grad = None

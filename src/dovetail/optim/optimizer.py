"""One optimizer step: sum partial gradients, divide, clip by the global norm, update or skip."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dovetail.kernels.reference import wide
from dovetail.optim.adamw import Groups
from dovetail.optim.groups import ParamGroup, match
from dovetail.optim.muon import Held, muon_names
from dovetail.optim.rules import Class, Schedule, checked, make_rule
from dovetail.parallel.collectives import AsyncHostCopy, all_reduce_, sum_over
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import Placement, as_index
from dovetail.weights.shards import local_params


@dataclass(frozen=True)
class Shard(Held):
    source: nn.Parameter
    placement: Placement

    @property
    def is_decayed(self) -> bool:
        """Norms and biases may have two dims, by head or expert."""
        *_, module, leaf = ("", *self.name.split("."))
        return self.local.dim() > 1 and "norm" not in module and not leaf.endswith("bias")

    def collect_grad(self) -> Tensor:
        assert self.source.grad is not None, (
            f"{self.name} has no gradient: a path of the model left it out"
        )
        grad = self.source.grad
        self.local.grad = grad.to_local() if isinstance(grad, DTensor) else grad
        return self.local.grad

    @cached_property
    def owned(self) -> list[tuple[slice, ...]]:
        return [as_index(r.local_slice) for r in self.regions if r.owned]

    @cached_property
    def copied(self) -> list[tuple[int, tuple[slice, ...]]]:
        """Copies and regions of copied KV rows."""
        return [(r.copies, as_index(r.local_slice)) for r in self.regions if r.copies > 1]


def shards_of(model: nn.Module, mesh: Mesh) -> list[Shard]:
    params = local_params(model, mesh)  # reshards, which may replace parameters
    return [
        Shard(p.name, nn.Parameter(p.local), p.regions, p.parameter, p.placement)
        for p in params
        if p.parameter is not None and p.parameter.requires_grad
    ]


def param_groups(
    shards: list[Shard],
    groups: Sequence[ParamGroup],
    chosen: Mapping[str, int],
    muon: Collection[str] = (),
) -> Groups:
    """torch's groups; the first has what is not `chosen`. Empty ones only if all are."""
    by_kind: dict[tuple[int, bool, bool], list[nn.Parameter]] = defaultdict(list)
    for shard in shards:
        by_kind[chosen.get(shard.name, -1) + 1, shard.is_decayed, shard.name in muon].append(
            shard.local
        )
    kinds = sorted(by_kind, key=lambda kind: (kind[0], not kind[1])) or [(0, True, False)]
    own = {n: {"number": n, "own_lr": n > 0 and groups[n].lr is not None} for n, _, _ in kinds}
    return [
        {"params": by_kind[k], **rates(groups, *k[:2]), **own[k[0]], "decayed": k[1], "muon": k[2]}
        for k in kinds
    ]


def rates(groups: Sequence[ParamGroup], number: int, decayed: bool) -> dict[str, float]:
    """Peaks; vectors, norms and biases decay only where a group says so."""
    first = groups[0]
    own = groups[number]
    decay = (
        own.weight_decay
        if number and own.weight_decay is not None
        else first.weight_decay
        if decayed
        else 0.0
    )
    return {"lr": first.lr if own.lr is None else own.lr, "weight_decay": decay}  # type: ignore[dict-item]  # not None


def reduce_partial(shards: Iterable[Shard], mesh: Mesh) -> None:
    """Sum gradients over ranks that saw other tokens or heads, and over copies of KV rows."""
    partial: dict[str, list[Tensor]] = defaultdict(list)
    copied: dict[int, list[Tensor]] = defaultdict(list)
    for shard in shards:
        grad = shard.collect_grad()
        for axis in shard.placement.partial_over:
            partial[axis].append(grad)
        for copies, rows in shard.copied:
            copied[copies].append(grad[rows])
    for name in sorted(partial):
        all_reduce_(partial[name], mesh[name])
    for copies in sorted(copied):
        all_reduce_(copied[copies], mesh.copies[copies])


def global_norm(
    shards: Iterable[Shard], mesh: Mesh, nonfinite_candidates: Sequence[Tensor] = ()
) -> Tensor:
    """float64 []; NaN where a candidate is not finite on any rank."""
    parts: list[Tensor] = []
    for shard in shards:
        grad = shard.local.grad
        assert grad is not None
        parts += [part for part in (grad[rows] for rows in shard.owned) if part.numel()]
    norms = torch._foreach_norm(parts, dtype=wide(parts[0].dtype)) if parts else ()
    groups = [group for group in (norms, _nan_where_nonfinite(nonfinite_candidates)) if group]
    squares = [torch.stack(scalars).square().sum() for scalars in groups]
    total = sum(
        (x.to(torch.float64) for x in squares),
        torch.zeros((), dtype=torch.float64, device=mesh.device),
    )
    return sum_over(total, mesh["world"]).sqrt()


def _nan_where_nonfinite(tensors: Iterable[Tensor]) -> list[Tensor]:
    """0 or NaN each; the host does not wait."""
    real = [x.detach() for x in tensors if x.is_floating_point() and x.numel()]
    return list(torch._foreach_mul(torch._foreach_norm(real, math.inf), 0.0)) if real else []


def scale_(shards: Iterable[Shard], factor: Tensor) -> None:
    """The host reads the factor for a narrower dtype only."""
    grads = [shard.local.grad for shard in shards if shard.local.grad is not None]
    if grads:
        dtype = wide(grads[0].dtype)
        torch._foreach_mul_(grads, factor.to(dtype) if grads[0].dtype == dtype else float(factor))


@dataclass(frozen=True, kw_only=True)
class OptimSettings:
    """clip_norm None: no clipping. on_host: AdamW's moments in host memory. frozen: patterns of names.

    name: as `optim.name` of a recipe, or a class like torch's; options: its other arguments.
    """

    name: str | Class = "adamw"
    options: Mapping[str, Any] = field(default_factory=dict)
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
    groups: tuple[ParamGroup, ...] = ()
    frozen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value in checked(
            vars(self), {each.name: each.default for each in fields(self)}
        ).items():
            object.__setattr__(self, name, value)

    def factor_at(self, step: int) -> float:
        """The factor on the base rate at `step` >= 0: warm-up, (step + 1) / (warmup + 1), then the schedule.

        linear, cosine: to the floor in `decay_steps` (default: to the end). wsd: 1, then linearly to the floor in the last
        `decay_steps` (default: a tenth of all, at least 2).
        """
        start = self.warmup_steps
        total = self.total_steps
        decay = self.decay_steps
        floor = self.min_lr_ratio
        if step < start:
            return (step + 1) / (start + 1)
        if self.schedule == "constant":
            return 1.0
        last = total - 1
        if self.schedule == "wsd":
            start = max(
                start, total - max(2, total // 10 if decay is None else decay)
            )  # the first has factor 1
            if step < start:
                return 1.0
        elif decay is not None:
            last = min(last, start + decay - 1)
        progress = min(1.0, (step - start) / max(1, last - start))
        shape = (
            0.5 * (1 + math.cos(math.pi * progress)) if self.schedule == "cosine" else 1 - progress
        )
        return floor + (1 - floor) * shape


@dataclass(frozen=True)
class Update:
    grad_norm: float
    lr: float
    skipped: bool
    faults: tuple[str, ...] = ()


class Optimizer:
    """An update rule over this rank's trainable shards. groups: may change between steps."""

    def __init__(self, model: nn.Module, mesh: Mesh, settings: OptimSettings) -> None:
        self.mesh = mesh
        self.settings = settings
        self.shards = shards_of(model, mesh)
        self.groups = [
            ParamGroup("*", settings.lr, settings.weight_decay),
            *map(replace, settings.groups),
        ]
        chosen = match(model, mesh, [group.pattern for group in settings.groups], "groups")
        decayed = [shard for shard in self.shards if shard.is_decayed]
        muon = (
            muon_names(model, mesh, decayed, settings.options["matrices"])
            if settings.name == "muon"
            else ()
        )
        self.rule = make_rule(
            settings, param_groups(self.shards, self.groups, chosen, muon), self.shards, mesh
        )
        self.steps = 0

    def reserve(self) -> None:
        if self.settings.on_host:
            self.rule.reserve()

    def step(self, count: float | Tensor, watched: Sequence[Tensor] = ()) -> Update:
        """Update by gradients summed over `count` tokens of all ranks, and free them. Collective.

        Skipped on all ranks where a gradient, parameter or `watched` is not finite, or the count is 0. The device decides;
        the host reads the norm once all work is queued, unless state is on the host.
        """
        s = self.settings
        count = torch.as_tensor(count, dtype=torch.float64, device=self.mesh.device)
        divisor = torch.where(count == 0, 1.0, count)
        reduce_partial(self.shards, self.mesh)
        norm = global_norm(self.shards, self.mesh, [*watched, *self._unseen_by_norm()]) / divisor
        finite = norm.isfinite() & (count > 0)
        clip = (
            torch.ones_like(norm)
            if s.clip_norm is None
            else (s.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        )
        scale_(self.shards, torch.where(finite, clip / divisor, 1.0))
        factor = s.factor_at(self.steps)
        for group in self.rule.param_groups:
            group.update(rates(self.groups, group["number"], group["decayed"]))
            group["lr"] *= factor
        self.rule.found_inf = (~finite).to(torch.float32)
        fresh = not self.rule.state
        numbers = torch.stack([norm, ~finite])
        early = None if s.on_host else AsyncHostCopy(numbers)
        self.rule.step()
        grad_norm, skipped = (early or AsyncHostCopy(numbers)).wait()
        skipped = bool(skipped)
        self.steps += not skipped
        if skipped and fresh:
            self.rule.state.clear()
        faults = tuple(self._faults()) if skipped else ()
        self.zero_grad()
        return Update(grad_norm, (self.groups[0].lr or 0.0) * factor, skipped, faults)

    def _unseen_by_norm(self) -> Iterator[Tensor]:
        """Parameters, and gradients that another rank's norm counts."""
        for shard in self.shards:
            yield shard.local
            if shard.local.grad is not None and not all(region.owned for region in shard.regions):
                yield shard.local.grad

    def _faults(self) -> Iterator[str]:
        for kind in ("parameter", "gradient"):
            pairs = [
                (s.name, s.local if kind == "parameter" else s.local.grad) for s in self.shards
            ]
            names = [name for name, x in pairs if x is not None and not bool(x.isfinite().all())]
            if names:
                yield f"{kind} {names[0]}" + (
                    f" and {len(names) - 1} more" if len(names) > 1 else ""
                )

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Kind -> name -> state; AdamW's are zeros before the first step."""
        self.rule.begin(self.steps)
        stored = {shard.name: self.rule.stored(shard.local) for shard in self.shards}
        return {
            k: {name: x[k] for name, x in stored.items() if k in x} for k in self.rule.state_names
        }

    def restore(
        self, states: Mapping[str, Mapping[str, Tensor]], others: Mapping[str, Tensor]
    ) -> None:
        """Call it after a load into `state_tensors` and `rule.others`."""
        stored = {
            s.local: {k: named[s.name] for k, named in states.items() if s.name in named}
            for s in self.shards
        }
        self.rule.restored(stored, others)

    def resume(self, steps: int) -> None:
        """Continue as after `steps` updates; then fill the state and call `restore`."""
        self.steps = steps
        self.rule.resume(steps)

    def zero_grad(self) -> None:
        for shard in self.shards:
            shard.local.grad = shard.source.grad = None

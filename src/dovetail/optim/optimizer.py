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
from dovetail.optim.matrices import LocalShard
from dovetail.optim.muon import muon_names
from dovetail.optim.rules import Class, Schedule, check_settings, make_rule
from dovetail.parallel.collectives import AsyncHostCopy, all_reduce_, sum_over
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import Placement, as_index
from dovetail.weights.shards import local_params


@dataclass(frozen=True)
class Shard(LocalShard):
    """A trainable parameter as this rank holds it. source: the parameter of the model."""

    source: nn.Parameter
    placement: Placement

    @property
    def is_decayed(self) -> bool:
        """Whether it is a matrix. Norms and biases may have two dims, by head or expert."""
        path, _, leaf = self.name.rpartition(".")
        _, _, module = path.rpartition(".")
        is_special = "norm" in module or leaf.endswith("bias")
        return self.local.dim() > 1 and not is_special

    def collect_grad(self) -> Tensor:
        grad = self.source.grad
        assert grad is not None, f"{self.name} has no gradient: a path of the model left it out"
        self.local.grad = grad.to_local() if isinstance(grad, DTensor) else grad
        return self.local.grad

    @cached_property
    def owned(self) -> list[tuple[slice, ...]]:
        regions = [region for region in self.regions if region.owned]
        return [as_index(region.local_slice) for region in regions]

    @cached_property
    def copied(self) -> list[tuple[int, tuple[slice, ...]]]:
        """The number of copies and the rows, for KV rows that several ranks hold."""
        regions = [region for region in self.regions if region.copies > 1]
        return [(region.copies, as_index(region.local_slice)) for region in regions]


def shards_of(model: nn.Module, mesh: Mesh) -> list[Shard]:
    """Return the shards of the trainable parameters."""
    shards = []
    for param in local_params(model, mesh):  # reshards, which may replace parameters
        source = param.parameter
        if source is not None and source.requires_grad:
            local = nn.Parameter(param.local)
            shards.append(Shard(param.name, local, param.regions, source, param.placement))
    return shards


def param_groups(
    shards: list[Shard],
    groups: Sequence[ParamGroup],
    chosen: Mapping[str, int],
    muon: Collection[str] = (),
) -> Groups:
    """Return torch's groups; the first has what is not `chosen`.

    Only a rank without parameters has an empty one.
    """
    by_kind: dict[tuple[int, bool, bool], list[nn.Parameter]] = defaultdict(list)
    for shard in shards:
        number = chosen.get(shard.name, -1) + 1
        kind = (number, shard.is_decayed, shard.name in muon)
        by_kind[kind].append(shard.local)
    if not shards:
        by_kind[0, True, False] = []
    made = []
    for kind in sorted(by_kind, key=lambda kind: (kind[0], not kind[1])):
        number, decayed, is_muon = kind
        group: dict[str, Any] = {"params": by_kind[kind]}
        group |= rates(groups, number, decayed)
        group["number"] = number
        group["own_lr"] = number > 0 and groups[number].lr is not None
        group["decayed"] = decayed
        group["muon"] = is_muon
        made.append(group)
    return made


def rates(groups: Sequence[ParamGroup], number: int, decayed: bool) -> dict[str, float]:
    """Return the peaks of a group; vectors, norms and biases decay only where a group says so."""
    first = groups[0]
    own = groups[number]
    lr = first.lr if own.lr is None else own.lr
    decay = first.weight_decay if decayed else 0.0
    if number and own.weight_decay is not None:
        decay = own.weight_decay
    assert lr is not None
    assert decay is not None
    return {"lr": lr, "weight_decay": decay}


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
    """Return the norm, float64 []; NaN where a candidate is not finite on any rank."""
    grads = []
    for shard in shards:
        grad = shard.local.grad
        assert grad is not None
        for rows in shard.owned:
            part = grad[rows]
            if part.numel():
                grads.append(part)
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    if grads:
        dtype = wide(grads[0].dtype)
        norms = torch.stack(torch._foreach_norm(grads, dtype=dtype))
        total += norms.square().sum()
    floating = [x for x in nonfinite_candidates if x.is_floating_point()]
    candidates = [x.detach() for x in floating if x.numel()]
    if candidates:
        largest = torch.stack(torch._foreach_norm(candidates, math.inf))
        total += (largest * 0.0).sum()  # 0 or NaN; the host does not wait
    total = sum_over(total, mesh["world"])
    return total.sqrt()


def scale_(shards: Iterable[Shard], factor: Tensor) -> None:
    """Multiply the gradients. The host reads the factor for a narrower dtype only."""
    grads = [shard.local.grad for shard in shards if shard.local.grad is not None]
    if not grads:
        return
    dtype = grads[0].dtype
    if dtype == wide(dtype):
        torch._foreach_mul_(grads, factor.to(dtype))
    else:
        torch._foreach_mul_(grads, float(factor))


@dataclass(frozen=True, kw_only=True)
class OptimSettings:
    """What the optimizer does.

    name: as `optim.name` of a recipe, or a class like torch's; options: its other arguments.
    clip_norm None: no clipping. on_host: AdamW's moments in host memory. frozen: patterns of names.
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
        defaults = {each.name: each.default for each in fields(self)}
        for name, value in check_settings(vars(self), defaults).items():
            object.__setattr__(self, name, value)

    def factor_at(self, step: int) -> float:
        """Return the factor on the base rate at `step` >= 0.

        It warms up as (step + 1) / (warmup + 1). Then linear and cosine go to the floor in
        `decay_steps` (default: to the end); wsd stays at 1, then goes linearly to the floor in the
        last `decay_steps` (default: a tenth of all, at least 2).
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
            if decay is None:
                decay = total // 10
            start = max(start, total - max(2, decay))  # the first has factor 1
            if step < start:
                return 1.0
        elif decay is not None:
            last = min(last, start + decay - 1)
        decay_length = max(1, last - start)
        progress = min(1.0, (step - start) / decay_length)
        shape = 1 - progress
        if self.schedule == "cosine":
            wave = math.cos(math.pi * progress)
            shape = 0.5 * (1 + wave)
        return floor + (1 - floor) * shape


@dataclass(frozen=True)
class Update:
    """The outcome of a step.

    lr: of the first group. faults: what was not finite in a skipped step.
    """

    grad_norm: float
    lr: float
    skipped: bool
    faults: tuple[str, ...] = ()


class Optimizer:
    """An update rule over this rank's trainable shards. `groups` may change between steps."""

    def __init__(self, model: nn.Module, mesh: Mesh, settings: OptimSettings) -> None:
        self.mesh = mesh
        self.settings = settings
        self.shards = shards_of(model, mesh)
        first = ParamGroup("*", settings.lr, settings.weight_decay)
        self.groups = [first, *map(replace, settings.groups)]
        patterns = [group.pattern for group in settings.groups]
        chosen = match(model, mesh, patterns, "groups")
        muon: Collection[str] = ()
        if settings.name == "muon":
            decayed = [shard for shard in self.shards if shard.is_decayed]
            muon = muon_names(model, mesh, decayed, settings.options["matrices"])
        groups = param_groups(self.shards, self.groups, chosen, muon)
        self.rule = make_rule(settings, groups, self.shards, mesh)
        self.steps = 0

    def reserve(self) -> None:
        if self.settings.on_host:
            self.rule.reserve()

    def step(self, count: float | Tensor, watched: Sequence[Tensor] = ()) -> Update:
        """Update by gradients summed over `count` tokens of all ranks, and free them. Collective.

        The step is skipped on all ranks where a gradient, parameter or `watched` is not finite, or
        the count is 0. The device decides; the host reads the norm once all work is queued, unless
        state is on the host.
        """
        settings = self.settings
        count = torch.as_tensor(count, dtype=torch.float64, device=self.mesh.device)
        divisor = torch.where(count == 0, 1.0, count)
        reduce_partial(self.shards, self.mesh)
        candidates = [*watched, *self._unseen_by_norm()]
        norm = global_norm(self.shards, self.mesh, candidates) / divisor
        finite = norm.isfinite() & (count > 0)
        clip = torch.ones_like(norm)
        if settings.clip_norm is not None:
            ratio = settings.clip_norm / (norm + 1e-6)
            clip = ratio.clamp(max=1.0)
        scale = torch.where(finite, clip / divisor, 1.0)
        scale_(self.shards, scale)
        factor = settings.factor_at(self.steps)
        for group in self.rule.param_groups:
            peaks = rates(self.groups, group["number"], group["decayed"])
            group.update(peaks)
            group["lr"] *= factor
        self.rule.found_inf = (~finite).to(torch.float32)
        fresh = not self.rule.state
        numbers = torch.stack([norm, ~finite])
        early = None if settings.on_host else AsyncHostCopy(numbers)
        self.rule.step()
        grad_norm, skipped = (early or AsyncHostCopy(numbers)).wait()
        skipped = bool(skipped)
        self.steps += not skipped
        if skipped and fresh:
            self.rule.state.clear()
        faults = tuple(self._faults()) if skipped else ()
        self.zero_grad()
        lr = self.groups[0].lr or 0.0
        return Update(grad_norm, lr * factor, skipped, faults)

    def _unseen_by_norm(self) -> Iterator[Tensor]:
        """Yield all parameters, and gradients that another rank's norm counts."""
        for shard in self.shards:
            yield shard.local
            grad = shard.local.grad
            is_counted = all(region.owned for region in shard.regions)
            if grad is not None and not is_counted:
                yield grad

    def _faults(self) -> Iterator[str]:
        for kind in ("parameter", "gradient"):
            names = []
            for shard in self.shards:
                x = shard.local if kind == "parameter" else shard.local.grad
                if x is not None and not bool(x.isfinite().all()):
                    names.append(shard.name)
            if len(names) > 1:
                yield f"{kind} {names[0]} and {len(names) - 1} more"
            elif names:
                yield f"{kind} {names[0]}"

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return kind -> name -> state; AdamW's are zeros before the first step."""
        self.rule.begin(self.steps)
        states: dict[str, dict[str, Tensor]] = {kind: {} for kind in self.rule.state_names}
        for shard in self.shards:
            stored = self.rule.stored(shard.local)
            for kind, x in stored.items():
                states[kind][shard.name] = x
        return states

    def restore(
        self, states: Mapping[str, Mapping[str, Tensor]], others: Mapping[str, Tensor]
    ) -> None:
        """Take the state after a load into `state_tensors` and `rule.others`."""
        stored = {}
        for shard in self.shards:
            name = shard.name
            found = {}
            for kind, by_name in states.items():
                if name in by_name:
                    found[kind] = by_name[name]
            stored[shard.local] = found
        self.rule.restored(stored, others)

    def resume(self, steps: int) -> None:
        """Continue as after `steps` updates; then fill the state and call `restore`."""
        self.steps = steps
        self.rule.resume(steps)

    def zero_grad(self) -> None:
        for shard in self.shards:
            shard.local.grad = None
            shard.source.grad = None

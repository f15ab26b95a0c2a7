"""Update rules; AdamW, with moments on the device or the host."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from dovetail.memory import PinnedArena, aligned, view_at
from dovetail.nn.activation_checkpoint import PinnedPool

MOMENTS = ("exp_avg", "exp_avg_sq")
Groups = list[dict[str, Any]]  # of torch
Stored = Mapping[nn.Parameter, Mapping[str, Tensor]]
BUCKET_BYTES = 1 << 29  # unless a parameter is larger


class UpdateRule:
    """Updates local shards. Where `found_inf` is 1, `step` does and counts nothing."""

    state_names: tuple[str, ...]  # of the parameter's shape, in checkpoints
    param_groups: Groups  # lr and weight_decay are set before each step
    state: defaultdict[Any, Any]  # parameter -> name -> state
    found_inf: Tensor  # float32 [], on the device

    def step(self, closure: Any = None) -> Any:
        raise NotImplementedError

    def reserve(self) -> None: ...

    def begin(self, steps: int = 0) -> None:
        """Zeros for parameters without state, as after so many steps."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state.get(parameter):
                    self._set_state(
                        parameter, steps, [torch.zeros_like(parameter) for _ in self.state_names]
                    )

    def resume(self, steps: int) -> None:
        """Continue as after so many steps; the caller fills the rest."""
        self.begin(steps)
        for state in self.state.values():
            if "step" in state:
                state["step"].fill_(steps)

    def stored(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """State in checkpoints. Where it is copied, `restored` follows a load."""
        state = self.state.get(parameter, {})
        return {name: state[name] for name in self.state_names if name in state}

    def others(self) -> dict[str, Tensor] | None:
        """More for checkpoints, of any shape, equal on ranks that have the name. None, on every rank: never any."""
        return None

    def restored(self, stored: Stored, others: Mapping[str, Tensor]) -> None:
        """Called after a load into `stored` and those of `others` that it has."""

    def resident(self) -> Iterator[Tensor]:
        for state in self.state.values():
            yield from (state[name] for name in self.state_names if name in state)

    def _set_state(self, parameter: nn.Parameter, steps: int, tensors: Sequence[Tensor]) -> None:
        count = torch.tensor(float(steps), dtype=torch.float32, device=parameter.device)
        self.state[parameter] = {"step": count, **dict(zip(self.state_names, tensors, strict=True))}


class SkippableAdamW(torch.optim.AdamW, UpdateRule):
    state_names = MOMENTS


@dataclass(frozen=True)
class Bucket:
    group: Mapping[str, Any]
    params: list[nn.Parameter]

    @property
    def num_bytes(self) -> int:
        return len(MOMENTS) * sum(aligned(parameter.nbytes) for parameter in self.params)

    def views(self, data: Tensor) -> list[list[Tensor]]:
        starts = iter(
            accumulate(
                (aligned(parameter.nbytes) for _ in MOMENTS for parameter in self.params), initial=0
            )
        )
        return [
            [view_at(data, next(starts), p.dtype, p.shape) for p in self.params] for _ in MOMENTS
        ]


class CPUOffloadAdamW(SkippableAdamW):
    """Moments in pinned host memory, bit for bit: buckets come, are updated and leave."""

    def __init__(self, groups: Groups, **options: Any) -> None:
        super().__init__(groups, **options)
        buckets = [bucket for group in self.param_groups for bucket in _buckets(group)]
        self.buckets = sorted(buckets, key=lambda bucket: -bucket.num_bytes)  # largest first
        self.hosts: list[Tensor] = []
        self.device = self.buckets[0].params[0].device
        # a link carries both directions at once
        self._coming = PinnedPool(self.device)
        self._leaving = PinnedPool(self.device)

    def reserve(self) -> None:
        if not self.hosts:
            arena = PinnedArena(pinned=self.device.type != "cpu")
            arena.reserve(sum(bucket.num_bytes for bucket in self.buckets))
            self.hosts = [
                arena.allocate(torch.uint8, (bucket.num_bytes,)) for bucket in self.buckets
            ]

    def begin(self, steps: int = 0) -> None:
        if all(self.state.get(parameter) for bucket in self.buckets for parameter in bucket.params):
            return
        self.reserve()
        for bucket, host in zip(self.buckets, self.hosts, strict=True):
            for parameter, *moments in zip(bucket.params, *bucket.views(host.zero_()), strict=True):
                self._set_state(parameter, steps, moments)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """The host does not wait."""
        self.begin()
        size = max(bucket.num_bytes for bucket in self.buckets)
        buffers = [
            torch.empty(size, dtype=torch.uint8, device=self.device) for _ in self.buckets[:2]
        ]
        here = [buffers[i % 2][: bucket.num_bytes] for i, bucket in enumerate(self.buckets)]
        coming = self._coming.copy(here[0], self.hosts[0])
        left = None
        for i, bucket in enumerate(self.buckets):
            came = coming
            if i + 1 < len(self.buckets):
                self._leaving.wait(left)
                coming = self._coming.copy(here[i + 1], self.hosts[i + 1])
            self._coming.wait(came)
            self._update(bucket, here[i])
            left = self._leaving.copy(self.hosts[i], here[i])
        self._leaving.wait(left)

    def _update(self, bucket: Bucket, data: Tensor) -> None:
        group = bucket.group
        (averages, squares) = bucket.views(data)
        grads = [parameter.grad for parameter in bucket.params if parameter.grad is not None]
        steps = [self.state[parameter]["step"] for parameter in bucket.params]
        options = {
            key: group[key] for key in ("lr", "weight_decay", "eps", "amsgrad", "maximize", "fused")
        }
        beta1, beta2 = group["betas"]
        assert len(grads) == len(steps), "a parameter without a gradient"
        options |= {"beta1": beta1, "beta2": beta2, "found_inf": self.found_inf}
        adamw([*bucket.params], grads, averages, squares, [], steps, **options)


def _buckets(group: Mapping[str, Any]) -> Iterator[Bucket]:
    params: list[nn.Parameter] = []
    for parameter in group["params"]:
        if params and Bucket(group, [*params, parameter]).num_bytes > BUCKET_BYTES:
            yield Bucket(group, params)
            params = []
        params.append(parameter)
    yield Bucket(group, params)

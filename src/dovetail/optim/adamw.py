"""AdamW whose step a number on the device can stop, with moments that stay on the device or wait on the host.

Moments on the host pass through the device during the step alone, a bucket at a time: while one is updated and leaves,
the next one comes. Kernel and arithmetic, and so every bit, are those of moments that stay.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from dovetail.memory import PinnedArena, aligned, view_at
from dovetail.nn.activation_checkpoint import PinnedPool

MOMENTS = ("exp_avg", "exp_avg_sq")
BUCKET_BYTES = 1 << 29  # of moments that are on the device together; a parameter with more has a bucket of its own


class SkippableAdamW(torch.optim.AdamW):
    """AdamW whose fused step does nothing, and does not count, where a number on the device is 1: nobody waits for it."""

    found_inf: Tensor

    def reserve(self) -> None:
        """Take what memory of the host the moments need, before others take it."""

    def begin(self, steps: int = 0) -> None:
        """Give parameters without moments zeros, as after so many steps."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state.get(parameter):
                    self._place(parameter, steps, [torch.zeros_like(parameter) for _ in MOMENTS])

    def _place(self, parameter: nn.Parameter, steps: int, moments: Sequence[Tensor]) -> None:
        count = torch.tensor(float(steps), dtype=torch.float32, device=parameter.device)
        self.state[parameter] = {"step": count, **dict(zip(MOMENTS, moments, strict=True))}


@dataclass(frozen=True)
class Bucket:
    """Parameters whose moments come and go together."""

    group: Mapping[str, Any]
    params: list[nn.Parameter]

    @property
    def num_bytes(self) -> int:
        return sum(_num_bytes(parameter) for parameter in self.params)

    def views(self, data: Tensor) -> list[list[Tensor]]:
        """The moments that lie in `data` [bytes], one after another: for every kind those of all parameters."""
        found, start = [], 0
        for _ in MOMENTS:
            row = []
            for parameter in self.params:
                row.append(view_at(data, start, parameter.dtype, parameter.shape))
                start += aligned(parameter.nbytes)
            found.append(row)
        return found


class CPUOffloadAdamW(SkippableAdamW):
    """The same with moments in pinned host memory; on a CPU in plain memory. `state` shows them where they wait.

    The device holds two buckets during a step, and none otherwise. Who waits for the device finds the moments updated.
    """

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        super().__init__(groups, **options)
        found = [bucket for group in self.param_groups for bucket in _buckets(group)]
        self.buckets = sorted(found, key=lambda bucket: -bucket.num_bytes)  # those that are hard to place come first
        self.hosts: list[Tensor] = []  # for every bucket its bytes, once there are moments
        self.device = self.buckets[0].params[0].device
        # a queue of copies for each way, since a link carries both at once
        self._coming, self._leaving = PinnedPool(self.device), PinnedPool(self.device)

    def reserve(self) -> None:
        if not self.hosts:
            arena = PinnedArena(pinned=self.device.type != "cpu")
            arena.reserve(sum(bucket.num_bytes for bucket in self.buckets))
            self.hosts = [arena.allocate(torch.uint8, (bucket.num_bytes,)) for bucket in self.buckets]

    def begin(self, steps: int = 0) -> None:
        """The same. Memory is taken the first time, if it was not before."""
        if all(self.state.get(parameter) for bucket in self.buckets for parameter in bucket.params):
            return
        self.reserve()
        for bucket, host in zip(self.buckets, self.hosts, strict=True):
            for parameter, *moments in zip(bucket.params, *bucket.views(host.zero_()), strict=True):
                self._place(parameter, steps, moments)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter. Nothing waits for the device, and the device waits only for the next bucket."""
        self.begin()
        size = max(bucket.num_bytes for bucket in self.buckets)
        rooms = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in self.buckets[:2]]
        here = [rooms[i % 2][: bucket.num_bytes] for i, bucket in enumerate(self.buckets)]
        come, left = self._coming.copy(here[0], self.hosts[0]), None
        for i, bucket in enumerate(self.buckets):
            came = come
            if i + 1 < len(self.buckets):
                self._leaving.wait(left)  # of the bucket before, whose room it is
                come = self._coming.copy(here[i + 1], self.hosts[i + 1])
            self._coming.wait(came)
            self._update(bucket, here[i])
            left = self._leaving.copy(self.hosts[i], here[i])
        self._leaving.wait(left)

    def _update(self, bucket: Bucket, data: Tensor) -> None:
        group, (averages, squares) = bucket.group, bucket.views(data)
        grads = [parameter.grad for parameter in bucket.params if parameter.grad is not None]
        steps = [self.state[parameter]["step"] for parameter in bucket.params]
        options = {key: group[key] for key in ("lr", "weight_decay", "eps", "amsgrad", "maximize", "fused")}
        beta1, beta2 = group["betas"]
        assert len(grads) == len(steps), "a parameter without a gradient"
        params: list[Tensor] = [*bucket.params]
        options |= {"beta1": beta1, "beta2": beta2, "found_inf": self.found_inf}
        adamw(params, grads, averages, squares, [], steps, **options)


def _buckets(group: Mapping[str, Any]) -> Iterator[Bucket]:
    """The parameters of a group in their order, as many together as a bucket takes."""
    params: list[nn.Parameter] = []
    for parameter in group["params"]:
        if params and Bucket(group, [*params, parameter]).num_bytes > BUCKET_BYTES:
            yield Bucket(group, params)
            params = []
        params.append(parameter)
    yield Bucket(group, params)


def _num_bytes(parameter: nn.Parameter) -> int:
    return len(MOMENTS) * aligned(parameter.nbytes)

"""Update rules: what all of them can do, and AdamW with its moments on the device or the host."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from dovetail.memory import PinnedArena, aligned, view_at
from dovetail.nn.activation_checkpoint import PinnedPool

MOMENTS = ("exp_avg", "exp_avg_sq")
Groups = list[dict[str, Any]]  # of torch
Stored = Mapping[nn.Parameter, Mapping[str, Tensor]]
OPTIONS = ("lr", "weight_decay", "eps", "amsgrad", "maximize", "fused")  # of torch's `adamw`
BUCKET_BYTES = 1 << 29  # unless a parameter is larger


class UpdateRule:
    """A rule that updates local shards. Where `found_inf` is 1, `step` does and counts nothing."""

    state_names: tuple[str, ...]  # of the parameter's shape, in checkpoints
    param_groups: Groups  # lr and weight_decay are set before each step
    state: defaultdict[Any, Any]  # parameter -> name -> state
    found_inf: Tensor  # float32 [], on the device

    def step(self, closure: Any = None) -> Any:
        raise NotImplementedError

    def reserve(self) -> None: ...

    def begin(self, steps: int = 0) -> None:
        """Give zeros to parameters without state, as after so many steps."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.state.get(parameter):
                    continue
                zeros = [torch.zeros_like(parameter) for _ in self.state_names]
                self._set_state(parameter, steps, zeros)

    def resume(self, steps: int) -> None:
        """Continue as after so many steps; the caller fills the rest."""
        self.begin(steps)
        for state in self.state.values():
            if "step" in state:
                state["step"].fill_(steps)

    def stored(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the state for checkpoints. Where it is copied, `restored` follows a load."""
        state = self.state.get(parameter, {})
        return {name: state[name] for name in self.state_names if name in state}

    def others(self) -> dict[str, Tensor] | None:
        """Return more tensors for checkpoints, of any shape, equal on ranks that have the name.

        None, on every rank: never any.
        """
        return None

    def restored(self, stored: Stored, others: Mapping[str, Tensor]) -> None:
        """Take the state after a load into `stored` and those of `others` that it has."""

    def resident(self) -> Iterator[Tensor]:
        for state in self.state.values():
            for name in self.state_names:
                if name in state:
                    yield state[name]

    def _set_state(self, parameter: nn.Parameter, steps: int, tensors: Sequence[Tensor]) -> None:
        count = torch.full((), steps, dtype=torch.float32, device=parameter.device)
        named = zip(self.state_names, tensors, strict=True)
        self.state[parameter] = {"step": count, **dict(named)}


class SkippableAdamW(torch.optim.AdamW, UpdateRule):
    """torch's AdamW, which skips a step by its `found_inf`."""

    state_names = MOMENTS


@dataclass(frozen=True)
class Bucket:
    """Parameters whose moments are in host memory side by side, and move together."""

    group: Mapping[str, Any]
    params: list[nn.Parameter]

    @property
    def num_bytes(self) -> int:
        sizes = [aligned(parameter.nbytes) for parameter in self.params]
        return len(MOMENTS) * sum(sizes)

    def views(self, data: Tensor) -> list[list[Tensor]]:
        """Return the views of each moment in `data`, uint8 [num_bytes]."""
        start = 0
        moments = []
        for _ in MOMENTS:
            views = []
            for parameter in self.params:
                view = view_at(data, start, parameter.dtype, parameter.shape)
                views.append(view)
                start += aligned(parameter.nbytes)
            moments.append(views)
        return moments


class CPUOffloadAdamW(SkippableAdamW):
    """AdamW with moments in pinned host memory, bit for bit: each bucket visits the device."""

    def __init__(self, groups: Groups, **options: Any) -> None:
        super().__init__(groups, **options)
        self.buckets: list[Bucket] = []
        for group in self.param_groups:
            self.buckets += _buckets(group)
        self.buckets.sort(key=lambda bucket: -bucket.num_bytes)  # largest first
        self.hosts: list[Tensor] = []
        largest = self.buckets[0]
        self.device = largest.params[0].device
        # a link carries both directions at once
        self._to_device = PinnedPool(self.device)
        self._to_host = PinnedPool(self.device)

    def reserve(self) -> None:
        if self.hosts:
            return
        sizes = [bucket.num_bytes for bucket in self.buckets]
        arena = PinnedArena(pinned=self.device.type != "cpu")
        arena.reserve(sum(sizes))
        for size in sizes:
            host = arena.allocate(torch.uint8, (size,))
            self.hosts.append(host)

    def begin(self, steps: int = 0) -> None:
        params = [parameter for bucket in self.buckets for parameter in bucket.params]
        if all(self.state.get(parameter) for parameter in params):
            return
        self.reserve()
        pairs = zip(self.buckets, self.hosts, strict=True)
        for bucket, host in pairs:
            averages, squares = bucket.views(host.zero_())
            for i, parameter in enumerate(bucket.params):
                moments = (averages[i], squares[i])
                self._set_state(parameter, steps, moments)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update one bucket while the next is copied. The host does not wait."""
        self.begin()
        hosts = self.hosts
        buffers = [torch.empty_like(host, device=self.device) for host in hosts[:2]]
        moments = []
        for i, host in enumerate(hosts):
            buffer = buffers[i % 2]
            moments.append(buffer[: len(host)])
        prefetched = self._to_device.copy(moments[0], hosts[0])
        written = None
        for i, bucket in enumerate(self.buckets):
            current = prefetched
            following = i + 1
            if following < len(self.buckets):
                self._to_host.wait(written)
                prefetched = self._to_device.copy(moments[following], hosts[following])
            self._to_device.wait(current)
            self._update(bucket, moments[i])
            written = self._to_host.copy(hosts[i], moments[i])
        self._to_host.wait(written)

    def _update(self, bucket: Bucket, data: Tensor) -> None:
        group = bucket.group
        averages, squares = bucket.views(data)
        params = bucket.params
        grads = [parameter.grad for parameter in params if parameter.grad is not None]
        steps = [self.state[parameter]["step"] for parameter in params]
        assert len(grads) == len(steps), "a parameter without a gradient"
        options = {key: group[key] for key in OPTIONS}
        options["beta1"], options["beta2"] = group["betas"]
        options["found_inf"] = self.found_inf
        adamw([*params], grads, averages, squares, [], steps, **options)


def _buckets(group: Mapping[str, Any]) -> Iterator[Bucket]:
    params: list[nn.Parameter] = []
    for parameter in group["params"]:
        larger = Bucket(group, [*params, parameter])
        if params and larger.num_bytes > BUCKET_BYTES:
            yield Bucket(group, params)
            params = []
        params.append(parameter)
    yield Bucket(group, params)

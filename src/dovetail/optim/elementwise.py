"""Any torch optimizer whose update is elementwise, over local shards."""

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dovetail.errors import CheckpointError
from dovetail.optim.adamw import Groups, Stored, UpdateRule

STEP = "step"
TRIAL_SHAPE = (6, 8)
TRIAL_STEPS = 3
TRIAL_ERROR = 1e-4  # of the largest change; mixing elements gives far more
Make = Callable[..., torch.optim.Optimizer]  # of parameter groups


class Layout(NamedTuple):
    """State after a step: name -> dtype; name -> value in the trial."""

    shaped: Mapping[str, torch.dtype]
    scalars: Mapping[str, Any]


class Elementwise(UpdateRule):
    """make: of torch's parameter groups. keys: that a group has."""

    def __init__(self, groups: Groups, make: Make, keys: Sequence[str], layout: Layout) -> None:
        self.param_groups = groups
        self._make = make
        self._keys = keys
        self._layout = layout
        self.state_names = tuple(layout.shaped)
        self._filled = [group for group in groups if group["params"]]
        self.inner = self._fresh()

    def _fresh(self) -> torch.optim.Optimizer | None:
        groups = [{key: group[key] for key in ("params", *self._keys)} for group in self._filled]
        return self._make(groups) if groups else None

    @property
    def state(self) -> MutableMapping[Any, Any]:  # type: ignore[override]  # of the optimizer inside
        return {} if self.inner is None else self.inner.state

    def step(self, closure: Any = None) -> Any:
        """The host waits."""
        if self.inner is None or bool(self.found_inf):
            return
        for group, inner in zip(self._filled, self.inner.param_groups, strict=True):
            for key in self._keys:
                if isinstance(inner[key], Tensor):
                    inner[key].fill_(group[key])
                else:
                    inner[key] = group[key]
        self.inner.step()

    def begin(self, steps: int = 0) -> None:
        """The first step makes its own."""
        for group in self._filled if steps else ():
            for parameter in group["params"]:
                if not self.stored(parameter).keys() >= {*self.state_names}:
                    self.state[parameter] = copy.deepcopy({**self._layout.scalars}) | self._zeros(
                        parameter
                    )

    def _zeros(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return {
            name: torch.zeros_like(parameter, dtype=dtype)
            for name, dtype in self._layout.shaped.items()
        }

    def resume(self, steps: int) -> None:
        self.inner = self._fresh()
        self.begin(steps)
        for state in self.state.values() if steps else ():
            if STEP in state:
                state[STEP] = _like(steps, state[STEP])

    def others(self) -> dict[str, Tensor] | None:
        """Equal for all parameters of a group."""
        if not self._scalars():
            return None
        found = (
            (_key(n, group), states[0][n])
            for group, states in self._states()
            for n in self._scalars()
        )
        return {key: torch.as_tensor(value).detach().reshape(1).to("cpu") for key, value in found}

    def restored(self, stored: Stored, others: Mapping[str, Tensor]) -> None:
        for group, states in self._states():
            for name in self._scalars():
                if (value := others.get(_key(name, group))) is None:
                    raise CheckpointError(
                        f"the checkpoint has no {name} for the parameter group {group['number']}"
                    )
                for state in states:
                    state[name] = _like(value.item(), state[name])

    def _scalars(self) -> list[str]:
        return [name for name in self._layout.scalars if name != STEP]

    def _states(self) -> Iterator[tuple[Mapping[str, Any], list[MutableMapping[str, Any]]]]:
        for group in self._filled:
            states = [self.state[p] for p in group["params"] if p in self.state]
            if states and all(state.keys() >= {*self._layout.scalars} for state in states):
                yield group, states


def _key(name: str, group: Mapping[str, Any]) -> str:
    return f"{name}/{group['number']}/{'decayed' if group['decayed'] else 'other'}"


def _like(value: float, old: Any) -> Any:
    return torch.full_like(old, value) if isinstance(old, Tensor) else type(old)(value)


def try_out(
    make: Make, keys: Sequence[str], device: torch.device | str, dtype: torch.dtype
) -> Layout:
    """State after a step. ValueError unless a shard's update is the update's shard."""
    draw = torch.Generator().manual_seed(0)
    rows, columns = TRIAL_SHAPE
    scale = torch.logspace(-2, 2, rows)[:, None] * torch.logspace(-1, 1, columns)
    start, *grads = (torch.randn(TRIAL_SHAPE, generator=draw) for _ in range(1 + TRIAL_STEPS))
    whole, layout = _trained(make, keys, start, [grad * scale for grad in grads], device, dtype)
    largest = (whole - start.to(whole)).abs().max()
    if not largest > 0:
        raise ValueError("it changes nothing in its first steps")
    for cut in (
        (slice(0, 2),),
        (slice(2, rows),),
        (slice(None), slice(0, 3)),
        (slice(None), slice(3, columns)),
    ):
        part, _ = _trained(
            make, keys, start[cut], [(grad * scale)[cut] for grad in grads], device, dtype
        )
        error = (part - whole[cut]).abs().max() / largest
        if not error <= TRIAL_ERROR:
            raise ValueError(
                f"its update of a part of a matrix is not that part of its update (they differ by {float(error):.2g} of the "
                "largest change), so it cannot update the shards of a model; take an optimizer that is elementwise"
            )
    return layout


def _trained(
    make: Make,
    keys: Sequence[str],
    start: Tensor,
    grads: list[Tensor],
    device: torch.device | str,
    dtype: torch.dtype,
) -> tuple[Tensor, Layout]:
    parameter = nn.Parameter(start.to(device, dtype, copy=True))
    optimizer = make(
        [{"params": [parameter], **{key: {"lr": 0.01, "weight_decay": 0.1}[key] for key in keys}}]
    )
    for grad in grads:
        parameter.grad = grad.to(device, dtype, copy=True)
        optimizer.step()
    state = {name: value for name, value in optimizer.state[parameter].items() if value is not None}
    shaped = {
        n: x.dtype for n, x in state.items() if isinstance(x, Tensor) and x.shape == parameter.shape
    }
    scalars = {n: x for n, x in state.items() if n not in shaped}
    if odd := [
        n
        for n, x in scalars.items()
        if not isinstance(x, int | float | Tensor) or torch.as_tensor(x).numel() != 1
    ]:
        raise ValueError(
            f"its state {odd[0]} is neither of the parameter's shape nor a number, as checkpoints need"
        )
    return parameter.detach(), Layout(shaped, scalars)
